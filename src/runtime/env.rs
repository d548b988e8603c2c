//! Finds and loads ONNX Runtime and its WebGPU plugin, once per process.

use std::{
    ffi::CStr,
    path::PathBuf,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use ort::{AsPointer, environment::Environment, logging::LogLevel};

use super::RuntimeError;

/// Names the directory of the libraries.
const DIRECTORY_VARIABLE: &str = "VIADUCT_RUNTIME";
/// Lets the plugin offer adapters that render in software; its real adapters still come first.
const SOFTWARE_VARIABLE: &str = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER";
pub(super) const WEBGPU: &str = "WebGpuExecutionProvider";
pub(super) const CPU: &str = "CPUExecutionProvider";

const LIBRARY: &str = "libonnxruntime.so";
const PLUGIN: &str = "libonnxruntime_providers_webgpu.so";

/// The loaded libraries.
pub(super) struct Env {
    pub ort: Environment,
    pub version: String,
    directory: PathBuf,
    plugin: OnceLock<Result<String, PluginError>>,
}

/// Why the WebGPU plugin is not available; the CPU provider works without it.
#[derive(Clone)]
enum PluginError {
    Missing(Vec<PathBuf>),
    Unusable(PathBuf, String),
}

impl Env {
    /// The version of the WebGPU plugin, which is registered at the first call.
    pub fn plugin(&self) -> Result<&str, RuntimeError> {
        let outcome = self.plugin.get_or_init(|| {
            let path = self.directory.join(PLUGIN);
            if !path.is_file() {
                return Err(PluginError::Missing(vec![self.directory.clone()]));
            }
            match self.ort.register_ep_library("webgpu", &path) {
                Ok(()) => Ok(self.provider_version(WEBGPU)),
                Err(e) => Err(PluginError::Unusable(path, e.message().to_owned())),
            }
        });
        match outcome {
            Ok(version) => Ok(version),
            Err(PluginError::Missing(looked_in)) => {
                Err(RuntimeError::LibraryMissing { file: PLUGIN, looked_in: looked_in.clone() })
            }
            Err(PluginError::Unusable(path, reason)) => {
                Err(RuntimeError::LibraryUnusable { path: path.clone(), reason: reason.clone() })
            }
        }
    }

    fn provider_version(&self, provider: &str) -> String {
        let device = self.ort.devices().find(|d| d.ep().is_ok_and(|name| name == provider));
        let version = device.and_then(|d| {
            // SAFETY: the device outlives the call; the pairs and their texts live as long as the environment.
            unsafe {
                let api = ort::api();
                let pairs = (api.EpDevice_EpMetadata)(d.ptr());
                let value = (api.GetKeyValue)(pairs, c"version".as_ptr());
                (!value.is_null()).then(|| CStr::from_ptr(value).to_string_lossy().into_owned())
            }
        });
        version.unwrap_or_else(|| "unknown".to_owned())
    }
}

/// Loads the libraries at the first call. ONNX Runtime allows one environment per process, and one that is released
/// cannot be made again, so it stays until the process ends.
pub(super) fn env() -> Result<&'static Env, RuntimeError> {
    static ENV: Mutex<Option<&'static Env>> = Mutex::new(None);
    let mut env = ENV.lock().unwrap_or_else(PoisonError::into_inner);
    match *env {
        Some(loaded) => Ok(loaded),
        None => Ok(*env.insert(Box::leak(Box::new(load()?)))),
    }
}

fn load() -> Result<Env, RuntimeError> {
    let directory = find()?;
    let path = directory.join(LIBRARY);
    let unusable = |reason: String| RuntimeError::LibraryUnusable { path: path.clone(), reason };
    prepare_variables().map_err(|e| unusable(e.to_string()))?;
    return_freed_memory();
    let builder = ort::init_from(&path).map_err(|e| unusable(e.to_string()))?;
    let ort = builder.with_name("viaduct").with_telemetry(false).with_logger(Arc::new(log)).build();
    let ort = ort.map_err(|e| unusable(e.message().to_owned()))?;
    ort.set_log_level(LogLevel::Warning);
    let mut env = Env { ort, version: String::new(), directory, plugin: OnceLock::new() };
    env.version = env.provider_version(CPU);
    Ok(env)
}

/// ONNX Runtime's own messages. What it calls an error is returned as one too, so that none needs to be shown.
fn log(_: LogLevel, category: &str, id: &str, location: &str, message: &str) {
    tracing::debug!(target: "onnxruntime", category, id, location, "{message}");
}

/// The directory that `VIADUCT_RUNTIME` names; else the nearest `runtime/` beside the executable or above it; else
/// `./runtime`.
fn find() -> Result<PathBuf, RuntimeError> {
    let looked_in: Vec<PathBuf> = match std::env::var_os(DIRECTORY_VARIABLE) {
        Some(directory) => vec![directory.into()],
        None => {
            let executable = std::env::current_exe().unwrap_or_default();
            let above = executable.ancestors().skip(1).filter(|d| !d.as_os_str().is_empty());
            above.map(|d| d.join("runtime")).chain([PathBuf::from("runtime")]).collect()
        }
    };
    match looked_in.iter().find(|d| d.join(LIBRARY).is_file()) {
        // Absolute, because libraries name each other relative to folders of their own.
        Some(directory) => Ok(std::path::absolute(directory).unwrap_or_else(|_| directory.clone())),
        None => Err(RuntimeError::LibraryMissing { file: LIBRARY, looked_in }),
    }
}

/// Sets the variables that the libraries and the Vulkan drivers read when they are loaded, unless the user has.
fn prepare_variables() -> std::io::Result<()> {
    if std::env::var_os(SOFTWARE_VARIABLE).is_none() {
        // SAFETY: no library that reads the environment behind Rust's lock is loaded yet.
        unsafe { std::env::set_var(SOFTWARE_VARIABLE, "1") };
    }
    Ok(())
}

/// Keeps every block of 128 KiB and more in a mapping of its own, which goes back to the system when it is freed. Left
/// alone, glibc raises that bound to 32 MiB as blocks are freed, and the CPU provider's tensors end up in a heap full of
/// gaps: 385 MB at the peak of a decoder block with 84 MB of live tensors, and another figure in every run; so 116.
fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets one number of the allocator, which may be changed at any time.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
    }
}
