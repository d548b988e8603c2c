//! The memory that a run may take.

use std::fmt;

use serde::Serialize;
use viaduct_export::{bytes::ByteSize, device::DeviceProfile, memory::Predicted};

use crate::runtime::memory;

/// Bounds of one stage's process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// Whether CPU and device share one memory, so that the sum of both parts counts.
    pub unified: bool,
    pub host: u64,
    pub device: u64,
    /// Of both parts together.
    pub total: u64,
}

impl Budget {
    /// What is free, or what the user asked for in its place: of the shared memory, or of the device's own.
    pub fn new(device: &DeviceProfile, free: memory::Budget, asked: Option<u64>) -> Budget {
        let unified = device.unified_memory;
        let memory::Budget { host, device, total } = free;
        match (asked, unified) {
            (None, _) => Budget { unified, host, device, total },
            (Some(asked), true) => Budget { unified, host: asked, device: asked, total: asked },
            (Some(asked), false) => {
                Budget { unified, host, device: asked, total: host.saturating_add(asked) }
            }
        }
    }

    /// Bounds of nothing but what the user asked for.
    pub fn asked(device: &DeviceProfile, asked: Option<u64>) -> Budget {
        let none = memory::Budget { host: u64::MAX, device: u64::MAX, total: u64::MAX };
        Budget::new(device, none, asked)
    }

    pub fn holds(self, predicted: Predicted) -> bool {
        let sum = predicted.device.saturating_add(predicted.host);
        predicted.host <= self.host && predicted.device <= self.device && sum <= self.total
    }

    /// The bytes that a stage is known by: of both parts where they share one memory, else the device's.
    pub fn counted(self, predicted: Predicted) -> u64 {
        match self.unified {
            true => predicted.device.saturating_add(predicted.host),
            false => predicted.device,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [host, device, total] = [self.host, self.device, self.total].map(ByteSize);
        match self.unified {
            true if self.device < self.total => write!(f, "the budget of {total} ({device} for the device)"),
            true => write!(f, "the budget of {total}"),
            // A plan for another machine knows nothing of its host.
            false if self.host == u64::MAX => write!(f, "the budget of {device} on the device"),
            false => write!(f, "the budget of {device} on the device and {host} on the host"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_and_the_sum_have_a_bound() {
        let budget = Budget { unified: true, host: 10, device: 6, total: 12 };
        assert!(budget.holds(Predicted { device: 6, host: 6 }));
        assert!(!budget.holds(Predicted { device: 7, host: 1 }));
        assert!(!budget.holds(Predicted { device: 1, host: 11 }));
        assert!(!budget.holds(Predicted { device: 6, host: 7 }));
        assert!(!budget.holds(Predicted { device: u64::MAX, host: 1 }));
    }

    #[test]
    fn what_is_asked_for_takes_the_place_of_what_is_free() {
        let free = memory::Budget { host: 8, device: 4, total: 10 };
        let device = |unified_memory| DeviceProfile { unified_memory, ..DeviceProfile::cpu(100) };
        let shared = Budget::new(&device(true), free, Some(99));
        assert!(
            shared.holds(Predicted { device: 50, host: 49 })
                && !shared.holds(Predicted { device: 50, host: 50 })
        );
        let card = Budget::new(&device(false), free, Some(99));
        assert!(
            card.holds(Predicted { device: 99, host: 8 }) && !card.holds(Predicted { device: 1, host: 9 })
        );
    }
}
