//! Chooses the provider and the adapter, and says what is known about them.

use std::{cmp::Reverse, fmt, str::FromStr};

use ort::{device::Device as OrtDevice, memory::DeviceType};
use serde::{Deserialize, Serialize};
use viaduct_export::{device::DeviceProfile, tuning::Tuning};

use super::{
    Adapter, RuntimeError,
    env::{self, Env},
    memory::MemorySource,
    tuned::{MeasuredOn, tuning_of_adapter, tuning_on},
    vulkan,
};

/// Which execution provider runs the graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Provider {
    /// WebGPU on a GPU, else the CPU with a note that says why.
    #[default]
    Auto,
    /// WebGPU or an error; software adapters count.
    WebGpu,
    Cpu,
}

impl FromStr for Provider {
    type Err = String;
    fn from_str(text: &str) -> Result<Provider, String> {
        match text {
            "auto" => Ok(Provider::Auto),
            "webgpu" => Ok(Provider::WebGpu),
            "cpu" => Ok(Provider::Cpu),
            other => Err(format!("{other:?} is none of auto, webgpu, cpu")),
        }
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Provider::Auto => "auto",
            Provider::WebGpu => "webgpu",
            Provider::Cpu => "cpu",
        })
    }
}

/// The kind of hardware behind a device, in the order in which one is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DeviceKind {
    Discrete,
    Integrated,
    /// A GPU that a hypervisor passes on.
    Virtual,
    /// A Vulkan driver that computes on the CPU, such as llvmpipe.
    Software,
    /// The CPU provider; no Vulkan at all.
    Cpu,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceKind::Discrete => "discrete",
            DeviceKind::Integrated => "integrated",
            DeviceKind::Virtual => "virtual",
            DeviceKind::Software => "software",
            DeviceKind::Cpu => "cpu",
        })
    }
}

/// What runs the graphs, as far as it can be known before the first session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Device {
    /// The provider in use: never [`Provider::Auto`].
    pub provider: Provider,
    pub kind: DeviceKind,
    pub name: String,
    pub vendor: String,
    pub vendor_id: u32,
    pub device_id: u32,
    /// The Vulkan driver and its version; empty for the CPU provider.
    pub driver: String,
    /// Whether shaders may compute in f16. The CPU provider has few f16 kernels and casts for the rest.
    pub f16: bool,
    pub subgroup_size: Option<u32>,
    /// What Vulkan says about the adapter, limits included; none for the CPU provider.
    pub adapter: Option<Adapter>,
    /// Which forms of a graph are fastest here.
    pub tuning: Tuning,
    /// Whether that was measured on this device.
    pub tuned: bool,
    pub ort_version: String,
    pub plugin_version: Option<String>,
    /// Why [`Provider::Auto`] chose the CPU.
    pub note: Option<String>,
}

impl Device {
    /// What graphs and plans need to know of the device.
    pub fn profile(&self) -> DeviceProfile {
        match &self.adapter {
            Some(adapter) => adapter.profile(self.tuning.clone()),
            None => this_cpu(),
        }
    }
}

/// The CPU provider on this machine.
fn this_cpu() -> DeviceProfile {
    DeviceProfile::cpu(machine_memory())
}

/// Bytes of this machine's memory; 1 where the system does not tell, so that a plan asks for a budget.
fn machine_memory() -> u64 {
    MemorySource::system().host().map_or(1, |host| host.machine_total.max(1))
}

/// The device that this machine would run graphs on, found out without ONNX Runtime, by the rules of [`Runtime::start`]:
/// the adapter that Dawn would take, or the CPU provider where there is none or only one in software. Its tuning is the latest that was measured with the adapter.
pub fn expected_profile(provider: Provider) -> Result<DeviceProfile, RuntimeError> {
    if provider == Provider::Cpu {
        return Ok(this_cpu());
    }
    match vulkan::adapters() {
        Ok(mut adapters) => {
            adapters.sort_by_key(|adapter| adapter.kind);
            let adapter = adapters.swap_remove(0);
            if provider == Provider::Auto && adapter.kind == DeviceKind::Software {
                return Ok(this_cpu());
            }
            let tuning = tuning_of_adapter(&adapter).unwrap_or_default();
            Ok(adapter.profile(tuning))
        }
        Err(reason) if provider == Provider::WebGpu => Err(RuntimeError::NoAdapter { reason }),
        Err(_) => Ok(this_cpu()),
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.provider {
            Provider::Cpu => write!(f, "CPU provider of ONNX Runtime {}", self.ort_version),
            _ => write!(f, "{} ({}, {}), WebGPU provider", self.name, self.kind, self.driver),
        }
    }
}

/// What to start.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RuntimeOptions {
    pub provider: Provider,
    /// A part of the name of the Vulkan adapter to use, in any case.
    pub adapter: Option<String>,
    /// What the device is taken to be best at, instead of what was measured there.
    pub tuning: Option<Tuning>,
}

/// ONNX Runtime on one device; makes sessions, one at a time.
pub struct Runtime {
    pub(super) env: &'static Env,
    pub(super) device: Device,
}

impl Runtime {
    /// Loads the libraries and settles on a device. No session is made.
    pub fn start(options: &RuntimeOptions) -> Result<Runtime, RuntimeError> {
        let env = env::env()?;
        let device = match options.provider {
            Provider::Cpu => cpu(env, None),
            Provider::WebGpu => webgpu(env, options.adapter.as_deref())?,
            Provider::Auto => match webgpu(env, options.adapter.as_deref()) {
                Ok(device) if device.kind == DeviceKind::Software && options.adapter.is_none() => cpu(
                    env,
                    Some(format!("{} is a software adapter, slower than the CPU provider", device.name)),
                ),
                Ok(device) => device,
                // Who names an adapter wants that one.
                Err(e) if options.adapter.is_some() => return Err(e),
                Err(RuntimeError::NoAdapter { reason }) => {
                    cpu(env, Some(format!("no adapter for WebGPU: {reason}")))
                }
                Err(e) => cpu(env, Some(e.to_string())),
            },
        };
        let device = tuned(device, options.tuning.as_ref());
        if let Some(note) = &device.note {
            tracing::warn!("running on the CPU: {note}");
        }
        Ok(Runtime { env, device })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Goes on with a tuning that was just measured.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        self.device.tuning = tuning;
        self.device.tuned = true;
    }

    /// ONNX Runtime's handle of the device that sessions run on; none for the CPU provider.
    pub(super) fn ort_device(&self) -> Option<OrtDevice<'static>> {
        (self.device.provider == Provider::WebGpu).then(|| webgpu_device(self.env)).flatten()
    }
}

/// The device with the tuning that is asked for, or that was measured there.
fn tuned(mut device: Device, wanted: Option<&Tuning>) -> Device {
    let known = match device.provider {
        Provider::Cpu => None,
        _ => tuning_on(&MeasuredOn::of(&device)),
    };
    device.tuned |= known.is_some();
    if let Some(tuning) = wanted.cloned().or(known) {
        device.tuning = tuning;
    }
    device
}

fn cpu(env: &Env, note: Option<String>) -> Device {
    Device {
        provider: Provider::Cpu,
        kind: DeviceKind::Cpu,
        name: "CPU".to_owned(),
        vendor: String::new(),
        vendor_id: 0,
        device_id: 0,
        driver: String::new(),
        f16: true,
        subgroup_size: None,
        adapter: None,
        tuning: Tuning::fused(),
        tuned: true,
        ort_version: env.version.clone(),
        plugin_version: None,
        note,
    }
}

fn webgpu(env: &'static Env, wanted: Option<&str>) -> Result<Device, RuntimeError> {
    let plugin = env.plugin()?.to_owned();
    let no_adapter = |reason| RuntimeError::NoAdapter { reason };
    let adapter = choose(vulkan::adapters().map_err(no_adapter)?, wanted).map_err(no_adapter)?;
    if webgpu_device(env).is_none() {
        return Err(no_adapter(format!("Vulkan lists {}, but the plugin offers no device", adapter.name)));
    }
    Ok(Device {
        provider: Provider::WebGpu,
        kind: adapter.kind,
        name: adapter.name.clone(),
        vendor: vendor(adapter.vendor_id).to_owned(),
        vendor_id: adapter.vendor_id,
        device_id: adapter.device_id,
        driver: adapter.driver.clone(),
        f16: adapter.f16,
        subgroup_size: Some(adapter.subgroup_size),
        adapter: Some(adapter),
        tuning: Tuning::default(),
        tuned: false,
        ort_version: env.version.clone(),
        plugin_version: Some(plugin),
        note: None,
    })
}

/// The plugin's device. It offers one per GPU that ONNX Runtime discovered, and one on the CPU for adapters that it did
/// not see; whichever is chosen, Dawn takes the best Vulkan adapter.
pub(super) fn webgpu_device(env: &'static Env) -> Option<OrtDevice<'static>> {
    let devices = env.ort.devices().filter(|d| d.ep().is_ok_and(|name| name == env::WEBGPU));
    devices.max_by_key(|d| Reverse(d.hardware_device().ty() != DeviceType::GPU))
}

/// The adapter that Dawn will take: the best kind, and among equals the first that the loader lists. One of another
/// name is put in front through Mesa's device-selection layer, and the outcome is looked at.
fn choose(mut adapters: Vec<Adapter>, wanted: Option<&str>) -> Result<Adapter, String> {
    adapters.sort_by_key(|a| a.kind);
    let names = adapters.iter().map(|a| a.name.as_str()).collect::<Vec<_>>().join(", ");
    let is_wanted = |a: &Adapter, name: &str| a.name.to_lowercase().contains(&name.to_lowercase());
    let Some(name) = wanted else { return Ok(adapters.swap_remove(0)) };
    let Some(adapter) = adapters.iter().find(|a| is_wanted(a, name)) else {
        return Err(format!("none is named {name:?}; Vulkan lists {names}"));
    };
    if is_wanted(&adapters[0], name) {
        return Ok(adapters.swap_remove(0));
    }
    let selection = format!("{:x}:{:x}!", adapter.vendor_id, adapter.device_id);
    // SAFETY: read by Vulkan's loader when an instance is made; none is being made while this runs.
    unsafe { std::env::set_var("MESA_VK_DEVICE_SELECT", &selection) };
    let mut seen = vulkan::adapters()?;
    seen.sort_by_key(|a| a.kind);
    if is_wanted(&seen[0], name) {
        return Ok(seen.swap_remove(0));
    }
    Err(format!("{name:?} is behind {}; point VK_DRIVER_FILES at its driver's manifest alone", seen[0].name))
}

fn vendor(id: u32) -> &'static str {
    match id {
        0x1002 => "AMD",
        0x10de => "NVIDIA",
        0x8086 => "Intel",
        0x10005 => "Mesa",
        0x1ae0 => "Google",
        0x13b5 => "ARM",
        0x5143 => "Qualcomm",
        0x106b => "Apple",
        _ => "unknown",
    }
}
