//! What a device can do, as far as graphs and plans depend on it. Data: measured by `doctor`, or a preset.

use serde::{Deserialize, Serialize};

use crate::tuning::Tuning;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Which of ONNX Runtime's providers runs the graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provider {
    WebGpu,
    Cpu,
}

/// A device's limits. Sizes are bytes; a limit that a device does not have is the largest number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    pub name: String,
    pub provider: Provider,
    /// Whether CPU and device share one memory: integrated GPUs, software adapters, the CPU provider.
    pub unified_memory: bool,
    /// Memory of the device's own; with unified memory, what it may take of the shared one.
    pub memory: u64,
    /// Whether shaders compute in f16.
    pub f16: bool,
    pub subgroup_size: u32,
    /// The largest range that one binding of a shader may cover.
    pub max_binding: u64,
    /// The largest buffer.
    pub max_buffer: u64,
    /// Storage buffers that one shader may use: operands and results of a node.
    pub max_storage_buffers: u32,
    /// Which forms of a graph are fastest.
    pub tuning: Tuning,
}

/// The most storage buffers per shader that Dawn passes on, whatever the driver offers.
pub const DAWN_STORAGE_BUFFERS: u32 = 16;

/// Why a device profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("no device is called {name:?}; known are {}, and a .json file may be named", DeviceProfile::preset_names().join(", "))]
    UnknownPreset { name: String },
    #[error("not a device profile: {0}")]
    Syntax(#[from] serde_json::Error),
    #[error("not a device profile: doctor found no device to describe{}", .0.as_deref().map(|problem| format!(" ({problem})")).unwrap_or_default())]
    NoDevice(Option<String>),
    #[error("device profile: tuning: {0}")]
    Tuning(&'static str),
    #[error("device profile: {field} is {value}; {expected}")]
    Value { field: &'static str, value: u64, expected: &'static str },
}

/// Name on the command line, and the device.
type Preset = (&'static str, fn() -> DeviceProfile);

/// Devices that one can plan for without having them.
const PRESETS: &[Preset] = &[("bc250", bc250), ("h200", h200), ("llvmpipe", llvmpipe), ("cpu", cpu)];

impl DeviceProfile {
    /// The preset of that name, in any case.
    pub fn preset(name: &str) -> Result<DeviceProfile, ProfileError> {
        let preset = PRESETS.iter().find(|preset| preset.0.eq_ignore_ascii_case(name));
        preset.map(|preset| preset.1()).ok_or_else(|| ProfileError::UnknownPreset { name: name.to_owned() })
    }

    pub fn preset_names() -> Vec<&'static str> {
        PRESETS.iter().map(|preset| preset.0).collect()
    }

    /// Reads a profile, bare or as the `profile` of what `viaduct doctor --json` prints, and checks its values.
    pub fn from_json(text: &[u8]) -> Result<DeviceProfile, ProfileError> {
        let value: serde_json::Value = serde_json::from_slice(text)?;
        let profile = match value.get("profile") {
            Some(serde_json::Value::Null) => {
                let problem = value.get("problem").and_then(|problem| problem.as_str());
                return Err(ProfileError::NoDevice(problem.map(str::to_owned)));
            }
            Some(profile) => profile.clone(),
            None => value,
        };
        let profile: DeviceProfile = serde_json::from_value(profile)?;
        profile.check()?;
        Ok(profile)
    }

    /// Whether no device could be like this. A file need not come from `doctor`.
    fn check(&self) -> Result<(), ProfileError> {
        const ANY: &str = "it must be at least 1";
        // What WebGPU promises everywhere.
        const BINDING: &str = "no WebGPU device offers less than 134217728";
        const BUFFERS: &str = "no WebGPU device offers less than 4";
        let gpu = self.provider == Provider::WebGpu;
        let rows = [
            ("memory", self.memory, 1, ANY),
            ("subgroup_size", u64::from(self.subgroup_size), 1, ANY),
            ("max_binding", self.max_binding, if gpu { 128 * MIB } else { 1 }, BINDING),
            ("max_buffer", self.max_buffer, if gpu { 128 * MIB } else { 1 }, BINDING),
            ("max_storage_buffers", u64::from(self.max_storage_buffers), if gpu { 4 } else { 1 }, BUFFERS),
        ];
        self.tuning.check().map_err(ProfileError::Tuning)?;
        match rows.into_iter().find(|(_, value, least, _)| value < least) {
            Some((field, value, _, expected)) => Err(ProfileError::Value { field, value, expected }),
            None => Ok(()),
        }
    }
}

/// AMD BC-250: RDNA2 (gfx1013), 16 GiB of GDDR6 for CPU and GPU, of which the system sees about 14.8 GiB.
fn bc250() -> DeviceProfile {
    DeviceProfile {
        name: "AMD BC-250 (RADV GFX1013)".to_owned(),
        provider: Provider::WebGpu,
        unified_memory: true,
        // Linux lends a GPU half of the memory. Raised with ttm.pages_limit (3145728 pages are 12 GiB) there is more,
        // but a plan must hold on a machine that nobody has tuned: <https://github.com/akandr/bc250>.
        memory: 7578 * MIB,
        f16: true,
        subgroup_size: 64,
        // RADV's largest allocation; Dawn passes ranges on in multiples of 4 bytes.
        max_binding: 4 * GIB - 4,
        max_buffer: 4 * GIB - 4,
        max_storage_buffers: DAWN_STORAGE_BUFFERS,
        tuning: Tuning::default(),
    }
}

/// NVIDIA H200 (driver 580).
fn h200() -> DeviceProfile {
    DeviceProfile {
        name: "NVIDIA H200".to_owned(),
        provider: Provider::WebGpu,
        unified_memory: false,
        memory: 139 * GIB,
        f16: true,
        subgroup_size: 32,
        max_binding: NVIDIA_BINDING,
        max_buffer: 4 * GIB - 4,
        max_storage_buffers: DAWN_STORAGE_BUFFERS,
        // Scores as a whole, as far as a binding covers them, take half the time of the fused operator, which is right
        // there, at every length (docs/performance.md).
        tuning: Tuning { fused_attention: true, ..Tuning::written(NVIDIA_BINDING) },
    }
}

/// The largest binding that Dawn allows on NVIDIA's driver, which takes longer ones for empty:
/// <https://issues.chromium.org/issues/435684920>.
pub const NVIDIA_BINDING: u64 = 2 * GIB - 4;

/// Mesa's software device (25.0), on a machine with 16 GiB.
fn llvmpipe() -> DeviceProfile {
    DeviceProfile {
        name: "llvmpipe".to_owned(),
        provider: Provider::WebGpu,
        unified_memory: true,
        memory: 16 * GIB,
        f16: true,
        subgroup_size: 8,
        max_binding: 128 * MIB,
        max_buffer: 4 * GIB - 1,
        max_storage_buffers: DAWN_STORAGE_BUFFERS,
        tuning: Tuning::default(),
    }
}

/// The CPU provider on a machine with 16 GiB.
fn cpu() -> DeviceProfile {
    DeviceProfile::cpu(16 * GIB)
}

impl DeviceProfile {
    /// The CPU provider of a machine with so many bytes of memory. It knows no bindings.
    pub fn cpu(memory: u64) -> DeviceProfile {
        DeviceProfile {
            name: "CPU".to_owned(),
            provider: Provider::Cpu,
            unified_memory: true,
            memory,
            f16: true,
            subgroup_size: 1,
            max_binding: u64::MAX,
            max_buffer: u64::MAX,
            max_storage_buffers: u32::MAX,
            tuning: Tuning::fused(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_sound_and_survive_json() {
        for name in DeviceProfile::preset_names() {
            let preset = DeviceProfile::preset(&name.to_uppercase()).unwrap();
            let text = serde_json::to_vec(&preset).unwrap();
            assert_eq!(DeviceProfile::from_json(&text).unwrap(), preset);
            let doctor = serde_json::json!({ "viaduct": "0", "profile": preset });
            assert_eq!(DeviceProfile::from_json(doctor.to_string().as_bytes()).unwrap(), preset);
        }
        let unknown = DeviceProfile::preset("voodoo").unwrap_err().to_string();
        assert!(DeviceProfile::preset_names().iter().all(|name| unknown.contains(name)), "{unknown}");
    }

    #[test]
    fn impossible_profiles_are_refused() {
        let preset = serde_json::to_value(llvmpipe()).unwrap();
        for (key, value, told) in [
            ("memory", serde_json::json!(0), "memory is 0"),
            ("memory", serde_json::json!(-1), "not a device profile"),
            ("memory", serde_json::json!(1e30), "not a device profile"),
            ("max_binding", serde_json::json!(1), "max_binding is 1"),
            ("max_storage_buffers", serde_json::json!(0), "max_storage_buffers is 0"),
            ("provider", serde_json::json!("cuda"), "not a device profile"),
            ("frequency", serde_json::json!(1), "unknown field `frequency`"),
        ] {
            let mut changed = preset.clone();
            changed[key] = value;
            let error = DeviceProfile::from_json(changed.to_string().as_bytes()).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let nothing = br#"{"profile": null, "problem": "no adapter"}"#;
        let error = DeviceProfile::from_json(nothing).unwrap_err().to_string();
        assert!(error.contains("no adapter"), "{error}");
        assert!(DeviceProfile::from_json(b"[]").is_err() && DeviceProfile::from_json(b"").is_err());
    }
}
