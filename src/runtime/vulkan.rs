//! What Vulkan itself says about the adapters: names, drivers and limits that ONNX Runtime does not pass on.

use std::{
    borrow::Cow,
    ffi::{CStr, c_char},
};

use ash::{Entry, Instance, vk};

use super::DeviceKind;

/// A physical device as its Vulkan driver describes it.
#[derive(Clone, Debug)]
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
    /// Bytes of all heaps that are local to the device.
    pub local_memory: u64,
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
    let mut properties =
        vk::PhysicalDeviceProperties2::default().push_next(&mut subgroup).push_next(&mut driver);
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
