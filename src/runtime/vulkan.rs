//! What Vulkan itself says about the adapters: names, drivers and limits that ONNX Runtime does not pass on.

use std::{
    borrow::Cow,
    ffi::{CStr, c_char},
};

use ash::{Entry, Instance, vk};
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
    // SAFETY: loading the Vulkan loader runs its initialisers, which is what every Vulkan program does.
    let entry =
        unsafe { Entry::load() }.map_err(|e| format!("the Vulkan loader could not be loaded ({e})"))?;
    let app = vk::ApplicationInfo::default().application_name(c"viaduct").api_version(vk::API_VERSION_1_1);
    let info = vk::InstanceCreateInfo::default().application_info(&app);
    // SAFETY: the create info and what it points to live until the call returns.
    let instance = unsafe { entry.create_instance(&info, None) }
        .map_err(|e| format!("the Vulkan loader found no usable driver ({e})"))?;
    // SAFETY: the instance is live, and destroyed once, after its last use.
    let found = unsafe { instance.enumerate_physical_devices() }.map(|devices| {
        devices.into_iter().map(|device| unsafe { describe(&instance, device) }).collect::<Vec<_>>()
    });
    unsafe { instance.destroy_instance(None) };
    match found {
        Ok(list) if list.is_empty() => Err("no Vulkan driver lists a device".to_owned()),
        Ok(list) => Ok(list),
        Err(e) => Err(format!("Vulkan could not list its devices ({e})")),
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
