//! The WebGPU provider, where there is an adapter.

use std::sync::{Mutex, MutexGuard, PoisonError};

use viaduct::runtime::{Provider, Runtime, RuntimeOptions};

/// One WebGPU test at a time: they share the adapter, and a software adapter uses every core.
pub struct WebGpu {
    pub runtime: Runtime,
    _alone: MutexGuard<'static, ()>,
}

/// The WebGPU runtime; none, loudly, where there is no adapter. On CI a missing adapter is a failure.
pub fn webgpu() -> Option<WebGpu> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Mesa's software adapter calls exp2f from f16 shaders, finds it only where the program has loaded it, and crashes
    // otherwise: not every test would.
    std::hint::black_box(std::hint::black_box(1f32).exp2());
    match Runtime::start(&RuntimeOptions { provider: Provider::WebGpu, ..RuntimeOptions::default() }) {
        Ok(runtime) => Some(WebGpu { runtime, _alone: alone }),
        Err(e) if std::env::var("CI").is_ok_and(|v| v == "true") => panic!("{e}"),
        Err(e) => {
            eprintln!("\n*** NOT TESTED: {e}\n");
            None
        }
    }
}
