//! What a plan may use: available memory without the floor that stays free.

use std::{fmt, str::FromStr};

use viaduct_export::{
    bytes::{ByteSize, ByteSizeError},
    device::{DeviceProfile, Provider},
};

use super::{GpuMemory, HostMemory};

/// Memory that must stay free for everything else on the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Floor {
    /// 5 % of all memory, and at least 512 MiB.
    #[default]
    Default,
    Bytes(ByteSize),
    /// A share of all memory, between 0 and 100.
    Percent(f64),
}

/// A text that is no floor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FloorError {
    #[error("{0:?} is no share of the memory; write it like 5%, from 0% to 100%")]
    Percent(String),
    #[error(transparent)]
    Bytes(#[from] ByteSizeError),
}

const DEFAULT_PERCENT: f64 = 5.0;
const DEFAULT_LEAST: u64 = 512 << 20;

impl Floor {
    /// Bytes of the floor where there is so much memory in all: [`HostMemory::total`].
    pub fn of(self, total: u64) -> u64 {
        let share = |percent: f64| (total as f64 / 100.0 * percent) as u64;
        match self {
            Floor::Default => share(DEFAULT_PERCENT).max(DEFAULT_LEAST),
            Floor::Bytes(bytes) => bytes.0,
            Floor::Percent(percent) => share(percent),
        }
    }
}

impl FromStr for Floor {
    type Err = FloorError;

    /// `512MiB` or `5%`.
    fn from_str(text: &str) -> Result<Floor, FloorError> {
        let Some(number) = text.trim().strip_suffix('%') else {
            return Ok(Floor::Bytes(text.parse()?));
        };
        let percent = number.trim_end().parse().ok().filter(|percent| (0.0..=100.0).contains(percent));
        percent.map(Floor::Percent).ok_or_else(|| FloorError::Percent(text.to_owned()))
    }
}

impl fmt::Display for Floor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Floor::Default => write!(f, "{DEFAULT_PERCENT}%, at least {}", ByteSize(DEFAULT_LEAST)),
            Floor::Bytes(bytes) => bytes.fmt(f),
            Floor::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// Bytes that a plan may use now. A plan fits if its host part is within `host`, its device part within `device` and
/// their sum within `total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub host: u64,
    pub device: u64,
    /// With unified memory less than the sum of the two: they are cut from one piece.
    pub total: u64,
}

/// What may be used of a machine and one device of it. `floor` is in bytes; `gpu` is what the device's driver tells of
/// it, if it does.
///
/// A GPU with unified memory takes its pages from what is available to everything, no more than its driver (GTT) and the
/// kernel (`ttm.pages_limit`) allow, and beside them what is free of its carve-out. What it uses already is gone from
/// the available memory, and is taken off its own ceilings only.
pub fn effective_budget(
    host: &HostMemory,
    floor: u64,
    device: &DeviceProfile,
    gpu: Option<&GpuMemory>,
) -> Budget {
    let free = host.available().saturating_sub(floor);
    // The CPU provider's device is the host.
    let gpu = gpu.filter(|_| device.provider != Provider::Cpu);
    let (shared, own) = match (gpu, device.unified_memory || device.provider == Provider::Cpu) {
        (Some(gpu), true) => (gpu.shared_free().min(free), gpu.vram.free()),
        (Some(gpu), false) => (0, gpu.vram.free()),
        (None, true) => (free, 0),
        (None, false) => (0, device.memory),
    };
    Budget { host: free, device: shared.saturating_add(own), total: free.saturating_add(own) }
}

#[cfg(test)]
mod tests {
    use viaduct_export::tuning::Tuning;

    use super::*;
    use crate::runtime::memory::{CgroupMemory, Pool};

    const GIB: u64 = 1 << 30;

    #[test]
    fn floors_parse() {
        for (text, floor) in [
            ("512MiB", Floor::Bytes(ByteSize(512 << 20))),
            ("5%", Floor::Percent(5.0)),
            (" 2.5 % ", Floor::Percent(2.5)),
            ("0", Floor::Bytes(ByteSize(0))),
        ] {
            assert_eq!(text.parse(), Ok(floor), "{text}");
        }
        for text in ["", "%", "-1%", "101%", "NaN%", "inf%", "5%%", "five"] {
            let message = text.parse::<Floor>().unwrap_err().to_string();
            assert!(message.starts_with(&format!("{text:?}")), "{message}");
        }
    }

    #[test]
    fn the_default_floor_is_the_larger_of_two() {
        for (total, floor) in [(0, GIB / 2), (4 * GIB, GIB / 2), (20 * GIB, GIB), (u64::MAX, u64::MAX / 20)] {
            assert!(Floor::Default.of(total).abs_diff(floor) < 4096, "{total}");
        }
        assert_eq!(Floor::Percent(100.0).of(GIB), GIB);
        assert_eq!(Floor::Percent(100.0).of(u64::MAX), u64::MAX);
    }

    #[test]
    fn budgets_count_shared_pages_once() {
        let machine = |available| HostMemory {
            machine_total: 16 * GIB,
            machine_available: available,
            swap_total: 0,
            swap_free: 0,
            cgroup: None,
        };
        let device = |provider, unified_memory| DeviceProfile {
            name: "a GPU".to_owned(),
            provider,
            unified_memory,
            memory: 6 * GIB,
            f16: true,
            subgroup_size: 64,
            max_binding: GIB,
            max_buffer: GIB,
            max_storage_buffers: 10,
            tuning: Tuning::default(),
        };
        let (unified, discrete, cpu) =
            (device(Provider::WebGpu, true), device(Provider::WebGpu, false), device(Provider::Cpu, true));
        let gpu = |gtt_total, gtt_used, ttm_ceiling| GpuMemory {
            card: "card0".to_owned(),
            vendor_id: 0x1002,
            device_id: 0x13fe,
            vram: Pool { total: GIB, used: GIB / 2 },
            gtt: Pool { total: gtt_total, used: gtt_used },
            ttm_ceiling,
        };
        let budget = |host, device, total| Budget { host, device, total };
        let half = GIB / 2;
        for (host, profile, card, expected) in [
            // 4 GiB are lent already; they are missing from the 9 that are available, and are not taken off again.
            (machine(9 * GIB), &unified, Some(gpu(15 * GIB, 4 * GIB, None)), budget(8, 8, 8)),
            (machine(9 * GIB), &unified, Some(gpu(6 * GIB, 4 * GIB, None)), budget(8, 2, 8)),
            (machine(9 * GIB), &unified, Some(gpu(15 * GIB, 4 * GIB, Some(7 * GIB))), budget(8, 3, 8)),
            (machine(9 * GIB), &unified, Some(gpu(15 * GIB, 8 * GIB, Some(7 * GIB))), budget(8, 0, 8)),
            (machine(GIB / 2), &unified, Some(gpu(15 * GIB, 0, None)), budget(0, 0, 0)),
        ] {
            let expected = Budget {
                host: expected.host * GIB,
                device: expected.device * GIB + half,
                total: expected.total * GIB + half,
            };
            assert_eq!(effective_budget(&host, GIB, profile, card.as_ref()), expected);
        }
        let card = gpu(15 * GIB, 0, None);
        let host = machine(9 * GIB);
        for (profile, card, expected) in [
            (&discrete, Some(&card), budget(8 * GIB, half, 8 * GIB + half)),
            (&discrete, None, budget(8 * GIB, 6 * GIB, 14 * GIB)),
            (&unified, None, budget(8 * GIB, 8 * GIB, 8 * GIB)),
            (&cpu, Some(&card), budget(8 * GIB, 8 * GIB, 8 * GIB)),
        ] {
            assert_eq!(effective_budget(&host, GIB, profile, card), expected);
        }
        let limited =
            HostMemory { cgroup: Some(CgroupMemory { limit: 4 * GIB, available: 3 * GIB }), ..host };
        assert_eq!(effective_budget(&limited, GIB, &unified, None), budget(2 * GIB, 2 * GIB, 2 * GIB));
    }
}
