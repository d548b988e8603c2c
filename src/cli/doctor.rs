//! `viaduct doctor`

use clap::Args;
use serde_json::{Value, json};
use sysinfo::System;

use super::DeviceArguments;
use crate::runtime::{Adapter, Device, Runtime, RuntimeError, adapters};

/// Show adapters, drivers, limits, memory and runtime versions, and what to install if something is missing.
#[derive(Args)]
pub struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let vulkan = adapters();
    // The report itself says what was chosen.
    let started = arguments.device.start(&mut |_| ());
    if arguments.json {
        println!("{}", report(&vulkan, &started));
    } else {
        print(&vulkan, &started);
    }
    started.map(drop)?;
    Ok(())
}

/// Total and available memory of the machine, bytes; zero where the system does not tell.
fn memory() -> [u64; 2] {
    let Ok(mut system) = System::new() else { return [0; 2] };
    system.refresh_memory();
    [system.total_memory(), system.available_memory()]
}

fn report(vulkan: &Result<Vec<Adapter>, String>, started: &Result<Runtime, RuntimeError>) -> Value {
    let [total, available] = memory();
    let adapters = vulkan.as_deref().unwrap_or_default();
    json!({
        "viaduct": env!("CARGO_PKG_VERSION"),
        "memory": { "total": total, "available": available },
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
    })
}

fn device_json(device: &Device) -> Value {
    json!({
        "ep": device.provider.to_string(), "name": device.name, "kind": device.kind.to_string(),
        "vendor": device.vendor, "driver": device.driver, "f16": device.f16,
        "subgroup_size": device.subgroup_size, "fused_attention": device.fused_attention,
        "onnxruntime": device.ort_version, "webgpu_plugin": device.plugin_version, "note": device.note,
    })
}

fn print(vulkan: &Result<Vec<Adapter>, String>, started: &Result<Runtime, RuntimeError>) {
    let gib = |bytes: u64| match bytes {
        0..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
    };
    let [total, available] = memory();
    println!("viaduct   {}", env!("CARGO_PKG_VERSION"));
    println!("memory    {} in all, {} available", gib(total), gib(available));
    match vulkan {
        Ok(adapters) => adapters.iter().for_each(|adapter| print_adapter(adapter, &gib)),
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

fn print_adapter(adapter: &Adapter, gib: &dyn Fn(u64) -> String) {
    let (major, minor, patch) = adapter.api_version;
    println!("vulkan    {} ({})", adapter.name, adapter.kind);
    println!("          driver {}, Vulkan {major}.{minor}.{patch}", adapter.driver);
    println!(
        "          f16 {}, subgroups of {}, bindings up to {}, {} storage buffers per stage, {} of its own memory",
        if adapter.f16 { "yes" } else { "no" },
        adapter.subgroup_size,
        gib(adapter.max_storage_buffer_range),
        adapter.max_storage_buffers,
        gib(adapter.local_memory)
    );
}

fn print_device(device: &Device) {
    let plugin = device.plugin_version.as_deref().map_or(String::new(), |v| format!(", WebGPU plugin {v}"));
    println!("runtime   ONNX Runtime {}{plugin}", device.ort_version);
    println!("device    {device}");
    let attention = match device.fused_attention {
        true => "the fused operator is right here and used",
        false => "written out in query chunks (the fused operator is wrong or unproven here)",
    };
    println!("attention {attention}");
    if let Some(note) = &device.note {
        println!("note      {note}");
    }
}
