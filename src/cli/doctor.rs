//! `viaduct doctor`

use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};
use viaduct_export::{
    bytes::ByteSize,
    tuning::{TunedAttention, Tuning},
};

use super::{
    DeviceArguments, ProgressArguments, ProgressStyle, exit::UsageError, printer, progress::Progress,
};
use crate::{
    runtime::{
        Adapter, Device, DeviceKind, Provider, Runtime, RuntimeError, adapters, check_tuning_folder,
        keep_tuning,
        memory::{GpuMemory, HostMemory, MemorySource, Pool},
    },
    tune::{AttentionTime, HeadNormTime, LinearRate, Measured, tune},
};

/// Show adapters, drivers, limits, memory and runtime versions, and what to install if something is missing.
#[derive(Args)]
pub struct Arguments {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Test the device, measure which forms of graphs are fastest there, and keep that for later runs
    #[arg(long)]
    tune: bool,
    #[command(flatten)]
    device: DeviceArguments,
    #[command(flatten)]
    progress: ProgressArguments,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let vulkan = adapters();
    // The report itself says what was chosen.
    let mut started = arguments.device.start(&mut |_| ());
    let measured = match (&mut started, arguments.tune) {
        (Ok(runtime), true) => Some(measure(runtime, arguments.progress.progress)?),
        _ => None,
    };
    if arguments.json {
        let mut report = report(&vulkan, &started);
        if let Some(measured) = measured {
            report["measured"] = serde_json::to_value(measured)?;
        }
        printer::print(&format!("{report}\n"))?;
    } else {
        if let Some(measured) = &measured {
            print_measured(measured);
        }
        print(&vulkan, &started);
    }
    started.map(drop)?;
    Ok(())
}

/// Tunes for the device and keeps what was found.
fn measure(runtime: &mut Runtime, style: ProgressStyle) -> anyhow::Result<Measured> {
    if runtime.device().provider == Provider::Cpu {
        let why = runtime.device().note.clone().unwrap_or_else(|| "--ep cpu was asked for".to_owned());
        let hint = "; --ep webgpu tunes for a software adapter, too";
        bail!(UsageError(format!(
            "nothing is tuned for the CPU provider, which would run here ({why}){hint}"
        )));
    }
    check_tuning_folder()?;
    let mut progress = Progress::new(style);
    let measured = tune(runtime, &mut progress)?;
    drop(progress);
    runtime.set_tuning(measured.tuning.clone());
    let file = keep_tuning(runtime.device(), &measured.tuning)?;
    eprintln!("kept in {}", file.display());
    Ok(measured)
}

/// Memory of the machine and of its GPUs; nothing where the kernel does not tell.
struct Memory {
    host: Option<HostMemory>,
    gpus: Vec<GpuMemory>,
}

impl Memory {
    fn read() -> Memory {
        let source = MemorySource::system();
        Memory { host: source.host(), gpus: source.gpus() }
    }

    /// What to do about a GPU that may have less of the machine's memory than there is.
    fn note(&self, adapters: &[Adapter]) -> Option<String> {
        let total = self.host?.machine_total;
        let shares = |gpu: &&GpuMemory| {
            let ids =
                |adapter: &&Adapter| (adapter.vendor_id, adapter.device_id) == (gpu.vendor_id, gpu.device_id);
            adapters.iter().find(ids).is_none_or(|adapter| adapter.kind != DeviceKind::Discrete)
        };
        let ceiling =
            self.gpus.iter().filter(shares).find_map(|gpu| gpu.ttm_ceiling).filter(|c| *c < total)?;
        Some(format!(
            "the kernel lends GPUs {} of the machine's {} and fails a run that needs more; its parameter \
             ttm.pages_limit (in pages) raises that",
            ByteSize(ceiling),
            ByteSize(total)
        ))
    }

    fn json(&self, adapters: &[Adapter]) -> Value {
        let (host, cgroup) = (self.host, self.host.and_then(|host| host.cgroup));
        json!({
            "total": host.map(|host| host.machine_total), "available": host.map(|host| host.available()),
            "swap_total": host.map(|host| host.swap_total), "swap_free": host.map(|host| host.swap_free),
            "cgroup": cgroup.map(|cgroup| json!({ "limit": cgroup.limit, "available": cgroup.available })),
            "gpus": self.gpus.iter().map(gpu_json).collect::<Vec<_>>(),
            "note": self.note(adapters),
        })
    }

    fn print(&self, adapters: &[Adapter]) {
        match &self.host {
            Some(host) => print_host(host),
            None => println!("memory    unknown: the kernel does not tell"),
        }
        for gpu in &self.gpus {
            let [own, own_used, shared, shared_used] =
                [gpu.vram.total, gpu.vram.used, gpu.shared_ceiling(), gpu.gtt.used].map(ByteSize);
            println!(
                "          {}: {own} of its own, {own_used} used; up to {shared} of the machine's, {shared_used} used",
                gpu.card
            );
        }
        if let Some(note) = self.note(adapters) {
            println!("note      {note}");
        }
    }
}

fn gpu_json(gpu: &GpuMemory) -> Value {
    let pool = |pool: Pool| json!({ "total": pool.total, "used": pool.used });
    json!({
        "card": gpu.card, "vendor_id": gpu.vendor_id, "device_id": gpu.device_id, "vram": pool(gpu.vram),
        "gtt": pool(gpu.gtt), "ttm_ceiling": gpu.ttm_ceiling, "shared_ceiling": gpu.shared_ceiling(),
    })
}

fn print_host(host: &HostMemory) {
    let [total, available, swap, swap_free] =
        [host.machine_total, host.machine_available, host.swap_total, host.swap_free].map(ByteSize);
    let swap = if swap.0 == 0 { "no swap".to_owned() } else { format!("swap {swap}, {swap_free} free") };
    println!("memory    {total} in all, {available} available; {swap}");
    // A limit above the machine's memory limits nothing.
    if let Some(cgroup) = host.cgroup.filter(|cgroup| cgroup.limit < host.machine_total) {
        let [limit, available] = [cgroup.limit, cgroup.available].map(ByteSize);
        println!("          limited to {limit} by a control group (cgroup), {available} available");
    }
}

fn report(vulkan: &Result<Vec<Adapter>, String>, started: &Result<Runtime, RuntimeError>) -> Value {
    let adapters = vulkan.as_deref().unwrap_or_default();
    json!({
        "viaduct": env!("CARGO_PKG_VERSION"),
        "memory": Memory::read().json(adapters),
        "vulkan": adapters.iter().map(adapter_json).collect::<Vec<_>>(),
        "vulkan_problem": vulkan.as_ref().err(),
        "device": started.as_ref().ok().map(|runtime| device_json(runtime.device())),
        "profile": started.as_ref().ok().map(|runtime| runtime.device().profile()),
        "problem": started.as_ref().err().map(ToString::to_string),
    })
}

fn adapter_json(adapter: &Adapter) -> Value {
    let (major, minor, patch) = adapter.api_version;
    json!({
        "name": adapter.name, "kind": adapter.kind.to_string(), "driver": adapter.driver,
        "vendor_id": adapter.vendor_id, "device_id": adapter.device_id,
        "api_version": format!("{major}.{minor}.{patch}"), "f16": adapter.f16,
        "subgroup_size": adapter.subgroup_size, "max_storage_buffer_range": adapter.max_storage_buffer_range,
        "max_storage_buffers": adapter.max_storage_buffers, "max_buffer": adapter.max_buffer, "local_memory": adapter.local_memory,
        "driver_fault": adapter.driver_fault(),
    })
}

fn device_json(device: &Device) -> Value {
    json!({
        "ep": device.provider.to_string(), "name": device.name, "kind": device.kind.to_string(),
        "vendor": device.vendor, "driver": device.driver, "f16": device.f16,
        "subgroup_size": device.subgroup_size, "tuning": device.tuning, "tuned": device.tuned,
        "onnxruntime": device.ort_version, "webgpu_plugin": device.plugin_version, "note": device.note,
    })
}

fn print(vulkan: &Result<Vec<Adapter>, String>, started: &Result<Runtime, RuntimeError>) {
    println!("viaduct   {}", env!("CARGO_PKG_VERSION"));
    Memory::read().print(vulkan.as_deref().unwrap_or_default());
    match vulkan {
        Ok(adapters) => adapters.iter().for_each(print_adapter),
        Err(problem) => {
            println!("vulkan    none: {problem}");
            println!(
                "          install your GPU's Vulkan driver (Mesa: package mesa-vulkan-drivers; NVIDIA: its driver)"
            );
            println!(
                "          and the loader (libvulkan1); without a GPU `make software-vulkan` installs a software device"
            );
        }
    }
    match started {
        Ok(runtime) => print_device(runtime.device()),
        Err(problem) => println!("runtime   {problem}"),
    }
}

fn print_adapter(adapter: &Adapter) {
    let (major, minor, patch) = adapter.api_version;
    println!("vulkan    {} ({})", adapter.name, adapter.kind);
    println!("          driver {}, Vulkan {major}.{minor}.{patch}", adapter.driver);
    println!(
        "          f16 {}, subgroups of {}, bindings up to {}, {} storage buffers per stage, {} of its own memory",
        if adapter.f16 { "yes" } else { "no" },
        adapter.subgroup_size,
        ByteSize(adapter.max_storage_buffer_range),
        adapter.max_storage_buffers,
        ByteSize(adapter.local_memory)
    );
    if let Some(fault) = adapter.driver_fault() {
        println!("          warning: {fault}");
    }
}

fn print_device(device: &Device) {
    let plugin = device.plugin_version.as_deref().map_or(String::new(), |v| format!(", WebGPU plugin {v}"));
    println!("runtime   ONNX Runtime {}{plugin}", device.ort_version);
    println!("device    {device}");
    if device.tuned {
        print_tuning(&device.tuning);
    } else {
        println!("tuning    none; `viaduct doctor --tune` measures what is fastest here, in about a minute");
    }
    if let Some(note) = &device.note {
        println!("note      {note}");
    }
}

fn print_tuning(tuning: &Tuning) {
    let fused = if tuning.fused_attention { "right" } else { "wrong or not tried, never used" };
    println!("tuning    fused attention: {fused}");
    for TunedAttention { rows, form } in &tuning.attention {
        println!("          attention over about {rows} rows: {form}");
    }
    println!("          {} dispatches per submission", tuning.pending_dispatches);
    match tuning.written_head_norms {
        Some(rows) => println!("          norms of heads: written out from {rows} rows on"),
        None => println!("          norms of heads: as operators"),
    }
}

fn print_measured(measured: &Measured) {
    for test in &measured.tests {
        let verdict = match (test.passed, test.error) {
            (true, _) => "passed".to_owned(),
            (false, Some(error)) => format!("failed, off by {error:.0e}: {}", test.otherwise),
            (false, None) => format!("not tried on such an adapter: {}", test.otherwise),
        };
        println!("test      {}: {verdict}", test.name);
    }
    for time in &measured.attention {
        let AttentionTime { rows, form, seconds, rate } = time;
        let (form, ms, rate) = (form, seconds * 1e3, rate_in_words(*rate));
        println!("measured  attention over {rows} rows, {form}: {ms:.3} ms, {rate}");
    }
    for (count, seconds) in &measured.dispatches {
        println!("measured  {count} dispatches per submission: {:.3} ms", seconds * 1e3);
    }
    for HeadNormTime { rows, operator, written } in &measured.head_norms {
        let [operator, written] = [operator, written].map(|seconds| seconds * 1e3);
        println!(
            "measured  norms of heads over {rows} rows: {operator:.3} ms as an operator, {written:.3} ms written out"
        );
    }
    for linear in &measured.linears {
        let LinearRate { bits, block, accuracy_level, rate } = linear;
        let rate = rate_in_words(*rate);
        println!(
            "measured  {bits}-bit weights in blocks of {block}, accuracy level {accuracy_level}: {rate}"
        );
    }
}

/// Floating-point operations in a second.
fn rate_in_words(rate: f64) -> String {
    if rate < 1e12 { format!("{:.1} GFLOP/s", rate / 1e9) } else { format!("{:.1} TFLOP/s", rate / 1e12) }
}
