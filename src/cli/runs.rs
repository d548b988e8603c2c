//! Where runs are kept, and what makes two of them the same.

use std::{
    collections::BTreeMap,
    env,
    ffi::CString,
    fs::{self, DirBuilder},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    thread,
};

use anyhow::Context;
use sha2::{Digest, Sha256};
use sysinfo::System;
use viaduct_export::{
    bundle::{Bundle, Manifest},
    bytes::ByteSize,
    files::hex,
    locked_folder::{LockedFolder, remove_abandoned},
};

use super::exit::UsageError;
use crate::{
    npy,
    pipeline::{
        run_folder::{Identity, NoiseIdentity},
        runs::Runs,
        text_to_image::{Noise, Request},
    },
    plan::{Plan, Settings},
    runtime::Device,
    user_cache::{named, user_cache},
};

/// The folder of all runs.
const ROOT: &str = "VIADUCT_RUNS";
/// Bytes of all runs; 0 keeps nothing.
const LIMIT: &str = "VIADUCT_RUNS_LIMIT";
const DEFAULT_LIMIT: u64 = 2 << 30;

/// `$VIADUCT_RUNS`, else `viaduct/runs` in the user's cache; none where the environment names no home.
pub fn runs() -> Result<Option<Runs>, UsageError> {
    let Some(root) = named(ROOT).or_else(|| Some(user_cache()?.join("runs"))) else { return Ok(None) };
    let limit = match env::var(LIMIT) {
        Ok(text) => {
            let size: ByteSize = text.trim().parse().map_err(|e| UsageError(format!("{LIMIT}: {e}")))?;
            size.0
        }
        Err(_) => DEFAULT_LIMIT,
    };
    Ok(Some(Runs { root, limit }))
}

/// Begins the name of a folder for tensors that pass between processes; random letters end it.
const EXCHANGE: &str = "exchange-";
/// Bytes that must be free where that folder lies.
const LEAST_ROOM: u64 = 256 << 20;

/// A folder for the tensors of this process and its workers. It goes when it is dropped, or with a later run if the
/// process dies.
pub struct Exchange {
    folder: LockedFolder,
}

impl Exchange {
    /// Beside the kept runs, which are on a disk: temporary folders often lie in memory. A disk that is nearly full is
    /// passed over.
    pub fn create(runs: Option<&Runs>) -> anyhow::Result<Exchange> {
        let kept = runs.map(|runs| runs.root.clone());
        let made = |root: &PathBuf| fs::create_dir_all(root);
        let mut places: Vec<(PathBuf, io::Result<()>)> =
            kept.into_iter().map(|root| (root.clone(), made(&root))).collect();
        let private = env::temp_dir().join(format!("viaduct-{}", own_id()));
        places.push((private.clone(), make_private(&private)));
        let mut last = None;
        for (root, made) in places {
            match made.and_then(|()| Exchange::create_in(&root)) {
                Ok(exchange) => return Ok(exchange),
                Err(e) => last = Some((root, e)),
            }
        }
        let (root, error) = last.expect("there is at least one place");
        Err(error).with_context(|| format!("no folder for the workers' tensors in {}", root.display()))
    }

    fn create_in(root: &Path) -> io::Result<Exchange> {
        remove_abandoned(root, |name| name.starts_with(EXCHANGE))?;
        has_room(root)?;
        Ok(Exchange { folder: LockedFolder::create_in(root, EXCHANGE)? })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn own_id() -> u32 {
    // SAFETY: reads a number of this process.
    unsafe { libc::geteuid() }
}

/// A folder in a place where everyone may make one: it must be this user's, and closed to others.
fn make_private(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let found = fs::symlink_metadata(folder)?;
    match found.is_dir() && found.uid() == own_id() && found.mode() & 0o077 == 0 {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not this user's alone")),
    }
}

/// Refuses a disk on which the tensors between two stages of a large picture find no room.
fn has_room(folder: &Path) -> io::Result<()> {
    let path = CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: all zeros are a value of the plain structure, which the call fills; the path ends with a zero.
    let disk = unsafe {
        let mut disk: libc::statvfs = std::mem::zeroed();
        if libc::statvfs(path.as_ptr(), &mut disk) != 0 {
            return Err(io::Error::last_os_error());
        }
        disk
    };
    match disk.f_bavail.saturating_mul(disk.f_frsize) {
        0..LEAST_ROOM => Err(io::ErrorKind::StorageFull.into()),
        _ => Ok(()),
    }
}

/// What decides the picture. `seed_drawn`: the command names neither seed nor noise.
pub fn identity(
    request: &Request,
    seed_drawn: bool,
    bundle: &Bundle,
    device: &Device,
    plan: &Plan,
) -> Identity {
    // What `verify` found decides nothing.
    let manifest = Manifest { verified: Vec::new(), ..bundle.manifest.clone() };
    let manifest = serde_json::to_vec(&manifest).expect("a manifest was read from JSON");
    Identity {
        viaduct: env!("CARGO_PKG_VERSION").to_owned(),
        bundle: format!("{} {}", bundle.manifest.name, bundle.manifest.profile),
        manifest: sha256(&[manifest, files_state(bundle)].concat()),
        prompt: request.prompt.clone(),
        negative: request.negative.clone(),
        width: request.size.width(),
        height: request.size.height(),
        steps: request.steps,
        noise: match &request.noise {
            Noise::Seed(_) if seed_drawn => NoiseIdentity::Drawn,
            Noise::Seed(seed) => NoiseIdentity::Seed(*seed),
            Noise::Given(noise) => NoiseIdentity::Given(sha256(&npy::to_bytes(noise))),
        },
        device: device_identity(device, plan),
    }
}

/// Sizes of a bundle's files, and when they were last written: a file that was replaced since makes another picture.
fn files_state(bundle: &Bundle) -> Vec<u8> {
    let paths = bundle.manifest.files.iter().filter_map(|file| bundle.path(&file.path).ok());
    let states = paths.map(|path| match fs::metadata(&path) {
        Ok(file) => format!("{} {}.{}\n", file.len(), file.mtime(), file.mtime_nsec()),
        Err(_) => "absent\n".to_owned(),
    });
    states.collect::<String>().into_bytes()
}

/// The processor counts for every provider: it runs the CPU's kernels, software adapters and the host's arithmetic.
fn device_identity(device: &Device, plan: &Plan) -> BTreeMap<String, String> {
    let threads = thread::available_parallelism().map_or(0, usize::from);
    let pairs = [
        ("provider", device.provider.to_string()),
        ("name", device.name.clone()),
        ("vendor and device id", format!("{:x}:{:x}", device.vendor_id, device.device_id)),
        ("driver", device.driver.clone()),
        ("tuning", serde_json::to_string(&device.tuning).unwrap_or_default()),
        ("ONNX Runtime", device.ort_version.clone()),
        ("WebGPU plugin", device.plugin_version.clone().unwrap_or_default()),
        ("settings", chunks(plan)),
        ("processor", format!("{}, {threads} threads", processor())),
    ];
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The stages whose attention goes in smaller chunks, which add up in another order. The budget that led to them is not
/// told: it differs from one run to the next, and does not change the picture.
fn chunks(plan: &Plan) -> String {
    let changed = plan.stages.iter().filter(|stage| stage.settings.halvings > 0 || stage.settings.fused);
    let changed = changed.map(|stage| {
        let Settings { halvings, fused, .. } = stage.settings;
        format!("{}: chunks 1/{}{}", stage.name, 1u32 << halvings, if fused { ", fused" } else { "" })
    });
    changed.collect::<Vec<_>>().join("; ")
}

fn processor() -> String {
    let Ok(mut system) = System::new() else { return String::new() };
    system.refresh_cpu_all();
    system.cpus().first().map_or(String::new(), |cpu| cpu.brand().trim().to_owned())
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}
