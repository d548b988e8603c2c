//! Finds out by short runs which of several right forms of a graph is the fastest on the device, and what cannot be
//! trusted there: `viaduct doctor --tune`.

mod attention;
mod head_norm;
mod linear;
mod micro_run;
mod selftest;

use serde::Serialize;
use viaduct_export::tuning::{TunedAttention, Tuning};

use self::selftest::About;
pub use self::{
    attention::{AttentionTime, DISPATCHES},
    head_norm::HeadNormTime,
    linear::{LinearRate, ceiling},
    selftest::{SelfTest, all as self_tests},
};
use crate::{
    pipeline::event::{Event, Listener},
    runtime::{DeviceKind, Runtime, RuntimeError},
};

/// Of forms that are so nearly as fast as the fastest, the one that takes the least memory is chosen.
const AS_FAST: f64 = 1.01;

/// Everything that was measured, and what follows from it.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    pub tests: Vec<SelfTest>,
    pub attention: Vec<AttentionTime>,
    /// Seconds of the same graph by dispatches per submission.
    pub dispatches: Vec<(u32, f64)>,
    pub head_norms: Vec<HeadNormTime>,
    pub linears: Vec<LinearRate>,
    pub tuning: Tuning,
}

/// How large the graphs are that are timed.
#[derive(Clone, Copy, Debug)]
struct Scale {
    /// Rows of the sequences over which attention is timed: FLUX.2 Klein at 512x512 and 1024x1024.
    rows: &'static [usize],
    heads: usize,
    head_size: usize,
    /// Rows and width of a linear layer.
    linear: [usize; 2],
}

impl Scale {
    fn of(kind: DeviceKind) -> Scale {
        match kind {
            // A software adapter is a thousand times slower, and runs models that are as much smaller.
            DeviceKind::Software | DeviceKind::Cpu => {
                Scale { rows: &[128, 512], heads: 4, head_size: 32, linear: [128, 256] }
            }
            _ => Scale { rows: &[1536, 4608], heads: 24, head_size: 128, linear: [2048, 3072] },
        }
    }
}

/// Measures the device. The runtime must run WebGPU; it takes up to a minute on a GPU.
pub fn tune(runtime: &mut Runtime, listener: &mut dyn Listener) -> Result<Measured, RuntimeError> {
    const PARTS: usize = 5;
    let mut part = |index, name: &str| {
        listener.on_event(Event::Stage { name: name.to_owned(), index, count: PARTS });
    };
    let scale = Scale::of(runtime.device().kind);
    part(1, "self-tests");
    let tests = selftest::all(runtime)?;
    let passed = |about| tests.iter().filter(|test| test.about == about).all(|test| test.passed);
    let fused_attention = passed(About::FusedAttention);
    part(2, "attention");
    let (attention, mut forms) = (attention::times(runtime, &scale, fused_attention)?, Vec::new());
    for rows in scale.rows {
        let timed: Vec<_> = attention.iter().filter(|time| time.rows == *rows).collect();
        if let Some(best) = thriftiest(&timed, |time| time.seconds) {
            forms.push(TunedAttention { rows: *rows, form: best.form });
        }
    }
    part(3, "dispatches");
    let dispatches = attention::dispatch_times(runtime, &scale, &forms)?;
    part(4, "norms of heads");
    let head_norms = head_norm::times(runtime, &scale)?;
    let written_head_norms = head_norm::least_rows(&head_norms).filter(|_| passed(About::WrittenHeadNorms));
    part(5, "linear layers");
    let linears = linear::rates(runtime, &scale)?;
    let default = Tuning::default();
    let pending_dispatches =
        thriftiest(&dispatches, |time| time.1).map_or(default.pending_dispatches, |t| t.0);
    let tuning = Tuning { fused_attention, attention: forms, pending_dispatches, written_head_norms };
    Ok(Measured { tests, attention, dispatches, head_norms, linears, tuning })
}

/// The first that is about as fast as the fastest; `sorted` begins with what takes the least memory.
fn thriftiest<T>(sorted: &[T], seconds: impl Fn(&T) -> f64) -> Option<&T> {
    let fastest = sorted.iter().map(&seconds).min_by(f64::total_cmp)?;
    sorted.iter().find(|candidate| seconds(candidate) <= fastest * AS_FAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thriftiest_of_the_fast_is_taken() {
        let taken = |times: &[(u32, f64)]| thriftiest(times, |time| time.1).map(|time| time.0);
        assert_eq!(taken(&[(1, 2.0), (2, 1.005), (3, 1.0)]), Some(2));
        assert_eq!(taken(&[(1, 1.0), (2, 1.0)]), Some(1));
        assert_eq!(taken(&[]), None);
    }
}
