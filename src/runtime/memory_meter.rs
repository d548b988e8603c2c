//! The most memory that this process takes while it is measured.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use serde::Serialize;

use super::{Device, DeviceKind, memory::MemorySource, peak, vulkan::HeapUsage};

/// Between two readings. What is taken and given back in between is missed on the device; on the host the system notes
/// the peak itself.
const INTERVAL: Duration = Duration::from_millis(10);

/// Bytes at the peak; none where the system does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryPeaks {
    /// Resident pages of the process, mapped files included.
    pub host: Option<u64>,
    /// What the process holds of the device. Of a device that computes on the CPU everything is host memory.
    pub device: Option<u64>,
}

/// Reads this process's memory again and again, in a thread of its own.
pub struct MemoryMeter {
    stop: Arc<AtomicBool>,
    thread: io::Result<JoinHandle<MemoryPeaks>>,
}

impl MemoryMeter {
    pub fn start(device: &Device) -> MemoryMeter {
        peak::restart();
        let stop = Arc::new(AtomicBool::new(false));
        let (gauge, stopped) = (DeviceGauge::of(device), stop.clone());
        let thread = thread::Builder::new().name("memory meter".to_owned()).spawn(move || {
            let mut peaks = MemoryPeaks::default();
            while !stopped.load(Ordering::Relaxed) {
                // The peak is forgotten whenever a stage is opened; what it was is kept here.
                peaks.host = peaks.host.max(peak::bytes());
                peaks.device = peaks.device.max(gauge.read());
                thread::sleep(INTERVAL);
            }
            peaks.host = peaks.host.max(peak::bytes());
            peaks
        });
        MemoryMeter { stop, thread }
    }

    /// Ends the thread.
    pub fn stop(self) -> MemoryPeaks {
        self.stop.store(true, Ordering::Relaxed);
        let peaks = self.thread.ok().and_then(|thread| thread.join().ok());
        peaks.unwrap_or_default()
    }
}

/// Who tells of the device's memory.
enum DeviceGauge {
    Nobody,
    /// The kernel's driver, by `fdinfo`.
    Kernel(MemorySource),
    Vulkan(Box<HeapUsage>),
}

impl DeviceGauge {
    fn of(device: &Device) -> DeviceGauge {
        if matches!(device.kind, DeviceKind::Software | DeviceKind::Cpu) {
            return DeviceGauge::Nobody;
        }
        let source = MemorySource::at("/");
        if source
            .gpus()
            .iter()
            .any(|gpu| (gpu.vendor_id, gpu.device_id) == (device.vendor_id, device.device_id))
        {
            return DeviceGauge::Kernel(source);
        }
        let usage = HeapUsage::open(device.vendor_id, device.device_id);
        usage.map_or(DeviceGauge::Nobody, |usage| DeviceGauge::Vulkan(Box::new(usage)))
    }

    fn read(&self) -> Option<u64> {
        match self {
            DeviceGauge::Nobody => None,
            DeviceGauge::Kernel(source) => Some(source.process_gpu(std::process::id()).total()),
            DeviceGauge::Vulkan(usage) => Some(usage.read()),
        }
    }
}
