//! Where runs are kept, and what makes two of them the same.

use std::{collections::BTreeMap, env, path::PathBuf, thread};

use sha2::{Digest, Sha256};
use sysinfo::System;
use viaduct_export::bundle::Bundle;

use super::exit::UsageError;
use crate::{
    npy,
    pipeline::{
        flux2::{Noise, Request},
        run_folder::{Identity, NoiseIdentity},
        runs::Runs,
    },
    runtime::Device,
};

/// The folder of all runs.
const ROOT: &str = "VIADUCT_RUNS";
/// Bytes of all runs; 0 keeps nothing.
const LIMIT: &str = "VIADUCT_RUNS_LIMIT";
const DEFAULT_LIMIT: u64 = 2 << 30;

/// `$VIADUCT_RUNS`, else `viaduct/runs` in the user's cache; none where the environment names no home.
pub fn runs() -> Result<Option<Runs>, UsageError> {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // A relative $XDG_CACHE_HOME counts as unset, says the XDG base directory specification.
    let cache = || named("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let cache = || cache().or_else(|| Some(named("HOME")?.join(".cache")));
    let Some(root) = named(ROOT).or_else(|| Some(cache()?.join("viaduct/runs"))) else { return Ok(None) };
    let limit = match env::var(LIMIT) {
        Ok(text) => {
            text.trim().parse().map_err(|_| UsageError(format!("{LIMIT}={text}: write a number of bytes")))?
        }
        Err(_) => DEFAULT_LIMIT,
    };
    Ok(Some(Runs { root, limit }))
}

/// What decides the picture. `seed_drawn`: the command names neither seed nor noise.
pub fn identity(request: &Request, seed_drawn: bool, bundle: &Bundle, device: &Device) -> Identity {
    let manifest = serde_json::to_vec(&bundle.manifest).expect("a manifest was read from JSON");
    Identity {
        viaduct: env!("CARGO_PKG_VERSION").to_owned(),
        bundle: format!("{} {}", bundle.manifest.name, bundle.manifest.profile),
        manifest: sha256(&manifest),
        prompt: request.prompt.clone(),
        width: request.size.width(),
        height: request.size.height(),
        steps: request.steps,
        noise: match &request.noise {
            Noise::Seed(_) if seed_drawn => NoiseIdentity::Drawn,
            Noise::Seed(seed) => NoiseIdentity::Seed(*seed),
            Noise::Given(noise) => NoiseIdentity::Given(sha256(&npy::to_bytes(noise))),
        },
        device: device_identity(device),
    }
}

/// The processor counts for every provider: it runs the CPU's kernels, software adapters and the host's arithmetic.
fn device_identity(device: &Device) -> BTreeMap<String, String> {
    let threads = thread::available_parallelism().map_or(0, usize::from);
    let pairs = [
        ("provider", device.provider.to_string()),
        ("name", device.name.clone()),
        ("vendor and device id", format!("{:x}:{:x}", device.vendor_id, device.device_id)),
        ("driver", device.driver.clone()),
        ("fused attention", device.fused_attention.to_string()),
        ("ONNX Runtime", device.ort_version.clone()),
        ("WebGPU plugin", device.plugin_version.clone().unwrap_or_default()),
        ("processor", format!("{}, {threads} threads", processor())),
    ];
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn processor() -> String {
    let Ok(mut system) = System::new() else { return String::new() };
    system.refresh_cpu_all();
    system.cpus().first().map_or(String::new(), |cpu| cpu.brand().trim().to_owned())
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
