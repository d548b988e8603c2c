//! The memory that a run may take.

use std::fmt;

use serde::Serialize;
use viaduct_export::{device::DeviceProfile, memory::Predicted};

use viaduct_export::bytes::ByteSize;

/// Bounds of one stage's process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "memory", rename_all = "snake_case")]
pub enum Budget {
    /// CPU and device share one memory: their sum counts.
    Shared { total: u64 },
    /// The device has its own.
    Separate { device: u64, host: u64 },
}

impl Budget {
    /// The budget on a device, with `available` bytes of host memory and, where the user sets one, `asked` instead: of
    /// the shared memory, or of the device's own.
    pub fn new(device: &DeviceProfile, available: u64, asked: Option<u64>) -> Budget {
        match device.unified_memory {
            true => Budget::Shared { total: asked.unwrap_or(available.min(device.memory)) },
            false => Budget::Separate { device: asked.unwrap_or(device.memory), host: available },
        }
    }

    /// Without bounds: a report that nobody gave a budget.
    pub fn unlimited(device: &DeviceProfile) -> Budget {
        match device.unified_memory {
            true => Budget::Shared { total: u64::MAX },
            false => Budget::Separate { device: u64::MAX, host: u64::MAX },
        }
    }

    pub fn holds(self, predicted: Predicted) -> bool {
        match self {
            Budget::Shared { total } => predicted.device.saturating_add(predicted.host) <= total,
            Budget::Separate { device, host } => predicted.device <= device && predicted.host <= host,
        }
    }

    /// The bytes that are compared with the bound.
    pub fn counted(self, predicted: Predicted) -> u64 {
        match self {
            Budget::Shared { .. } => predicted.device.saturating_add(predicted.host),
            Budget::Separate { .. } => predicted.device,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Shared { total } => write!(f, "the budget of {}", ByteSize(*total)),
            Budget::Separate { device, host } => {
                write!(f, "the device's {} and {} of host memory", ByteSize(*device), ByteSize(*host))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_counts_the_sum_and_a_card_each_side() {
        let need = Predicted { device: 6, host: 3 };
        assert!(Budget::Shared { total: 9 }.holds(need));
        assert!(!Budget::Shared { total: 8 }.holds(need));
        assert!(Budget::Separate { device: 6, host: 3 }.holds(need));
        assert!(!Budget::Separate { device: 6, host: 2 }.holds(need));
        assert!(!Budget::Separate { device: 5, host: 3 }.holds(need));
        assert!(!Budget::Shared { total: u64::MAX - 1 }.holds(Predicted { device: u64::MAX, host: 1 }));
    }
}
