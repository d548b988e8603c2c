//! What Vulkan itself says about the adapters: names, drivers and limits that ONNX Runtime does not pass on.

use std::{
    borrow::Cow,
    ffi::{CStr, c_char},
};

use ash::{Entry, Instance, ext, vk};
use serde::{Deserialize, Serialize};
use viaduct_export::{
    device::{DAWN_STORAGE_BUFFERS, DeviceProfile, NVIDIA_BINDING, Provider},
    tuning::Tuning,
};

use super::DeviceKind;

const NVIDIA: u32 = 0x10de;
/// The largest buffer that Vulkan promises on every device.
const PROMISED_BUFFER: u64 = 1 << 30;

/// A physical device as its Vulkan driver describes it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Adapter {
    pub name: String,
    pub vendor_id: u32,
    pub device_id: u32,
    pub kind: DeviceKind,
    /// Name and version as the driver states them, for example `llvmpipe Mesa 25.0.7`.
    pub driver: String,
    /// Major, minor and patch of the Vulkan version.
    pub api_version: (u32, u32, u32),
    pub f16: bool,
    pub subgroup_size: u32,
    /// The largest range of a buffer that one binding of a shader may cover, in bytes.
    pub max_storage_buffer_range: u64,
    pub max_storage_buffers: u32,
    /// Bytes of the largest buffer.
    pub max_buffer: u64,
    /// Bytes of all heaps that are local to the device.
    pub local_memory: u64,
}

impl Adapter {
    /// The adapter as graphs and plans see it: its limits as Dawn passes them on.
    pub fn profile(&self, tuning: Tuning) -> DeviceProfile {
        let driver = if self.vendor_id == NVIDIA { NVIDIA_BINDING } else { u64::MAX };
        let max_binding = self.max_storage_buffer_range.min(self.max_buffer).min(driver);
        DeviceProfile {
            name: self.name.clone(),
            provider: Provider::WebGpu,
            unified_memory: matches!(self.kind, DeviceKind::Integrated | DeviceKind::Software),
            memory: self.local_memory,
            f16: self.f16,
            subgroup_size: self.subgroup_size,
            // Ranges are bound in multiples of 4 bytes.
            max_binding: max_binding & !3,
            max_buffer: self.max_buffer,
            max_storage_buffers: self.max_storage_buffers.min(DAWN_STORAGE_BUFFERS),
            tuning,
        }
    }
}

/// The adapters of this machine in the order in which the loader lists them, or why there are none.
pub fn adapters() -> Result<Vec<Adapter>, String> {
    let Loaded { instance, .. } = &Loaded::new()?;
    // SAFETY: the instance is live.
    let found = unsafe { instance.enumerate_physical_devices() }.map(|devices| {
        devices.into_iter().map(|device| unsafe { describe(instance, device) }).collect::<Vec<_>>()
    });
    match found {
        Ok(list) if list.is_empty() => Err("no Vulkan driver lists a device".to_owned()),
        Ok(list) => Ok(list),
        Err(e) => Err(format!("Vulkan could not list its devices ({e})")),
    }
}

/// A Vulkan instance and the library that it comes from.
struct Loaded {
    instance: Instance,
    _entry: Entry,
}

impl Loaded {
    fn new() -> Result<Loaded, String> {
        // SAFETY: loading the Vulkan loader runs its initialisers, which is what every Vulkan program does.
        let entry =
            unsafe { Entry::load() }.map_err(|e| format!("the Vulkan loader could not be loaded ({e})"))?;
        let app =
            vk::ApplicationInfo::default().application_name(c"viaduct").api_version(vk::API_VERSION_1_1);
        let info = vk::InstanceCreateInfo::default().application_info(&app);
        // SAFETY: the create info and what it points to live until the call returns.
        let instance = unsafe { entry.create_instance(&info, None) }
            .map_err(|e| format!("the Vulkan loader found no usable driver ({e})"))?;
        Ok(Loaded { instance, _entry: entry })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: the instance is live, destroyed once, and not used after this.
        unsafe { self.instance.destroy_instance(None) };
    }
}

/// What this process holds of an adapter's own memory, as the driver tells (VK_EXT_memory_budget).
pub(super) struct HeapUsage {
    vulkan: Loaded,
    device: vk::PhysicalDevice,
}

impl HeapUsage {
    /// None where the driver does not tell.
    pub fn open(vendor_id: u32, device_id: u32) -> Option<HeapUsage> {
        let vulkan = Loaded::new().ok()?;
        let instance = &vulkan.instance;
        // SAFETY: the instance is live, and the devices are its own.
        let device = unsafe {
            let tells = |device: &vk::PhysicalDevice| {
                let properties = instance.get_physical_device_properties(*device);
                let own = (properties.vendor_id, properties.device_id) == (vendor_id, device_id);
                let extensions = instance.enumerate_device_extension_properties(*device).unwrap_or_default();
                let is_budget =
                    |name: &[c_char]| text(name).as_bytes() == ext::memory_budget::NAME.to_bytes();
                own && extensions.iter().any(|extension| is_budget(&extension.extension_name))
            };
            instance.enumerate_physical_devices().ok()?.into_iter().find(tells)?
        };
        Some(HeapUsage { vulkan, device })
    }

    /// Bytes of all heaps that are local to the device.
    pub fn read(&self) -> u64 {
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut memory = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the instance is live, the device is its own and knows the chained structure, which is live, too.
        unsafe { self.vulkan.instance.get_physical_device_memory_properties2(self.device, &mut memory) };
        let memory = memory.memory_properties;
        let heaps = memory.memory_heaps.iter().zip(budget.heap_usage).take(memory.memory_heap_count as usize);
        let local = heaps.filter(|(heap, _)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
        local.map(|(_, usage)| usage).fold(0, u64::saturating_add)
    }
}

/// # Safety
/// `device` must belong to the live `instance`.
unsafe fn describe(instance: &Instance, device: vk::PhysicalDevice) -> Adapter {
    let mut subgroup = vk::PhysicalDeviceSubgroupProperties::default();
    let mut driver = vk::PhysicalDeviceDriverProperties::default();
    let mut allocations = vk::PhysicalDeviceMaintenance3Properties::default();
    let mut buffers = vk::PhysicalDeviceMaintenance4Properties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default()
        .push_next(&mut subgroup)
        .push_next(&mut driver)
        .push_next(&mut allocations)
        .push_next(&mut buffers);
    let mut float16 = vk::PhysicalDeviceShaderFloat16Int8Features::default();
    let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut float16);
    // SAFETY: by the caller's promise; the chained structures are live, and ones unknown to a driver stay zero.
    let (core, memory) = unsafe {
        instance.get_physical_device_properties2(device, &mut properties);
        instance.get_physical_device_features2(device, &mut features);
        (properties.properties, instance.get_physical_device_memory_properties(device))
    };
    let heaps = &memory.memory_heaps[..memory.memory_heap_count as usize];
    let version = core.api_version;
    let largest = [buffers.max_buffer_size, allocations.max_memory_allocation_size, PROMISED_BUFFER];
    Adapter {
        name: text(&core.device_name),
        vendor_id: core.vendor_id,
        device_id: core.device_id,
        kind: match core.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => DeviceKind::Discrete,
            vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceKind::Integrated,
            vk::PhysicalDeviceType::VIRTUAL_GPU => DeviceKind::Virtual,
            _ => DeviceKind::Software,
        },
        driver: format!("{} {}", text(&driver.driver_name), text(&driver.driver_info)).trim().to_owned(),
        api_version: (
            vk::api_version_major(version),
            vk::api_version_minor(version),
            vk::api_version_patch(version),
        ),
        f16: float16.shader_float16 == vk::TRUE,
        subgroup_size: subgroup.subgroup_size,
        max_storage_buffer_range: u64::from(core.limits.max_storage_buffer_range),
        max_storage_buffers: core.limits.max_per_stage_descriptor_storage_buffers,
        max_buffer: largest.into_iter().find(|bytes| *bytes > 0).unwrap_or(PROMISED_BUFFER),
        local_memory: heaps
            .iter()
            .filter(|h| h.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL))
            .map(|h| h.size)
            .sum(),
    }
}

/// A fixed-size, zero-terminated text of a Vulkan structure.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|c| *c as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map_or(Cow::Borrowed(""), CStr::to_string_lossy).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn webgpu_adapters_tell_what_is_taken_or_nothing() {
        for adapter in adapters().unwrap_or_default() {
            let usage = HeapUsage::open(adapter.vendor_id, adapter.device_id).map(|usage| usage.read());
            println!("{}: {usage:?} of {} bytes", adapter.name, adapter.local_memory);
            assert!(usage.unwrap_or(0) <= adapter.local_memory, "{usage:?}");
        }
        assert!(HeapUsage::open(0, 0).is_none());
    }
}
