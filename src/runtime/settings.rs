//! How a stage is set, where speed and memory are traded for each other.

use serde::{Deserialize, Serialize};
use viaduct_export::{
    device::{DeviceProfile, Provider},
    memory::PENDING_DISPATCHES,
    tuning::{AttentionForm, PROMISED_BINDING},
};

/// Values that a kernel loads at once.
const VECTOR: usize = 4;

/// Every dispatch is submitted alone, so that what it frees can be taken again by the one after the next. It costs up to
/// 4 % (docs/performance.md) and saves most, so that it is tried before smaller chunks.
const FEWEST_DISPATCHES: u32 = 1;
/// Halvings of the chunks that are tried. Smaller ones than an eighth cost much time and save little.
const HALVINGS: u32 = 3;

/// How one stage is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Dispatches that WebGPU records before it submits them. Freed buffers are held until then.
    pub pending_dispatches: u32,
    /// Times that the chunks of attention are halved: those that the host drives, and the score tensors of one that is
    /// written out.
    pub halvings: u32,
    /// Attention without a mask is the fused operator, whatever is faster.
    pub fused: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { pending_dispatches: PENDING_DISPATCHES, halvings: 0, fused: false }
    }
}

impl Settings {
    /// All settings that make sense on a device, the fastest first.
    pub fn all(device: &DeviceProfile) -> impl Iterator<Item = Settings> + use<> {
        let fewest = match device.provider {
            Provider::WebGpu => FEWEST_DISPATCHES,
            Provider::Cpu => PENDING_DISPATCHES,
        };
        let fastest = device.tuning.pending_dispatches;
        let dispatches = [fastest, fastest.min(PENDING_DISPATCHES)];
        let whole =
            dispatches.map(|pending_dispatches| Settings { pending_dispatches, ..Settings::default() });
        let smaller = move |halvings| Settings { pending_dispatches: fewest, halvings, fused: false };
        let fused = Settings { fused: true, ..smaller(HALVINGS) };
        let last = device.tuning.fused_attention.then_some(fused);
        whole.into_iter().chain((0..=HALVINGS).map(smaller)).chain(last)
    }

    /// Whether speed is given up for memory.
    pub fn saves_memory(&self) -> bool {
        self.pending_dispatches < PENDING_DISPATCHES || self.halvings > 0 || self.fused
    }

    /// Whether attention without a mask over so many rows is the fused operator. Where their number is no multiple of
    /// [`VECTOR`], products over them take scalars: on an H200 a step over 4118 rows then takes 1.37 s written out, 1.07 fused,
    /// and 0.75 over 4128. The tuning's lengths are multiples.
    pub fn fuses(&self, device: &DeviceProfile, rows: usize) -> bool {
        let scalar = device.tuning.fused_attention && !rows.is_multiple_of(VECTOR);
        self.fused || scalar || device.tuning.attention_at(rows) == AttentionForm::Fused
    }

    /// The fewest rows for which the norm of heads is written out, if it is: that takes f32 copies of the heads.
    pub fn written_head_norms(&self, device: &DeviceProfile) -> Option<usize> {
        device.tuning.written_head_norms.filter(|_| !self.saves_memory())
    }

    /// Bytes of the largest score tensor of an attention over so many rows that is written out. The first halving takes
    /// what every device can bind, instead of what is fastest.
    pub fn score_bytes(&self, device: &DeviceProfile, rows: usize) -> u64 {
        let fastest = device.tuning.attention_at(rows).score_bytes();
        let bytes = match self.halvings {
            0 => fastest,
            halvings => fastest.min(PROMISED_BINDING) >> (halvings - 1),
        };
        bytes.min(device.max_binding)
    }
}

#[cfg(test)]
mod tests {
    use viaduct_export::tuning::Tuning;

    use super::*;

    fn device(tuning: Tuning) -> DeviceProfile {
        DeviceProfile { tuning, ..DeviceProfile::preset("bc250").unwrap() }
    }

    #[test]
    fn speed_is_given_up_step_by_step() {
        const WHOLE: u64 = 1 << 30;
        let device =
            device(Tuning { fused_attention: true, pending_dispatches: 16, ..Tuning::written(WHOLE) });
        let tried = Settings::all(&device).map(|settings| {
            let bytes = settings.score_bytes(&device, 4608);
            (settings.pending_dispatches, settings.fuses(&device, 4608), bytes / (1 << 20))
        });
        let few = [(1, false, 1024), (1, false, 128), (1, false, 64), (1, false, 32), (1, true, 32)];
        let expected: Vec<_> = [(16, false, 1024), (4, false, 1024)].into_iter().chain(few).collect();
        assert_eq!(tried.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn attention_over_rows_that_no_vector_divides_is_fused_where_that_is_right() {
        let fuses = |right, rows| {
            let device = device(Tuning { fused_attention: right, ..Tuning::written(1 << 30) });
            Settings::default().fuses(&device, rows)
        };
        assert_eq!([4118, 4119, 4128, 4608].map(|rows| fuses(true, rows)), [true, true, false, false]);
        assert!(!fuses(false, 4118));
    }

    #[test]
    fn fused_attention_that_is_not_right_is_no_way_out() {
        let device = device(Tuning::default());
        assert!(Settings::all(&device).all(|settings| !settings.fuses(&device, 4608)));
    }

    #[test]
    fn only_what_gives_up_speed_saves_memory() {
        let device = device(Tuning { pending_dispatches: 64, ..Tuning::default() });
        let saves: Vec<bool> = Settings::all(&device).map(|settings| settings.saves_memory()).collect();
        assert_eq!(saves, [false, false, true, true, true, true]);
    }
}
