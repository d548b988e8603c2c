//! Memory of GPUs, as amdgpu tells it; other drivers do not.

use std::fs;

use super::{
    MemorySource,
    kernel_file::{bytes, number},
};

/// Bytes of one kind of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    pub total: u64,
    pub used: u64,
}

impl Pool {
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.used)
    }
}

/// Memory that a GPU has and may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// The kernel's name, `card0`.
    pub card: String,
    /// PCI numbers, which Vulkan tells too.
    pub vendor_id: u32,
    pub device_id: u32,
    /// The GPU's own: soldered to the card, or cut out of the machine's by its firmware and no part of `MemTotal`.
    pub vram: Pool,
    /// Pages of the machine's memory that the driver lends to the GPU; each that is used is gone from `MemAvailable`.
    pub gtt: Pool,
    /// What the kernel's memory manager lends to all GPUs at most, `ttm.pages_limit`: it may be below `gtt.total`, and
    /// allocations beyond it fail in the middle of a run (<https://github.com/akandr/bc250>).
    pub ttm_ceiling: Option<u64>,
}

impl GpuMemory {
    /// What the GPU may have of the machine's memory in all, whoever uses how much of it now.
    pub fn shared_ceiling(&self) -> u64 {
        self.ttm_ceiling.map_or(self.gtt.total, |ceiling| ceiling.min(self.gtt.total))
    }

    /// What the GPU can still have of the machine's memory, if the machine has it.
    pub fn shared_free(&self) -> u64 {
        self.shared_ceiling().saturating_sub(self.gtt.used)
    }
}

pub(super) fn read_all(source: &MemorySource) -> Vec<GpuMemory> {
    let names = fs::read_dir(source.path("/sys/class/drm")).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    // Connectors are listed beside their cards: card0-HDMI-A-1.
    let mut cards: Vec<u32> = names.filter_map(|name| name.strip_prefix("card")?.parse().ok()).collect();
    cards.sort_unstable();
    cards.into_iter().filter_map(|card| read(source, card)).collect()
}

fn read(source: &MemorySource, card: u32) -> Option<GpuMemory> {
    let card = format!("card{card}");
    let text = |name: &str| fs::read(source.path(format!("/sys/class/drm/{card}/device/{name}"))).ok();
    let amount = |name: &str| bytes(&text(name)?);
    let pool = |name: &str| {
        let [total, used] = ["total", "used"].map(|part| amount(&format!("mem_info_{name}_{part}")));
        Some(Pool { total: total?, used: used.unwrap_or(0) })
    };
    Some(GpuMemory {
        vram: pool("vram")?,
        gtt: pool("gtt").unwrap_or_default(),
        vendor_id: text("vendor").and_then(|text| hexadecimal(&text)).unwrap_or(0),
        device_id: text("device").and_then(|text| hexadecimal(&text)).unwrap_or(0),
        ttm_ceiling: ttm_ceiling(source),
        card,
    })
}

fn ttm_ceiling(source: &MemorySource) -> Option<u64> {
    let pages = number(&fs::read(source.path("/sys/module/ttm/parameters/pages_limit")).ok()?)?;
    // SAFETY: asks for a constant of the system.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    pages.checked_mul(page)
}

fn hexadecimal(text: &[u8]) -> Option<u32> {
    u32::from_str_radix(std::str::from_utf8(text).ok()?.trim().strip_prefix("0x")?, 16).ok()
}
