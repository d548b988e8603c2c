//! Compares every boundary of a run with the reference's tensor and lets the run go on with the latter.

use std::collections::BTreeSet;

use super::{
    Oracle, VerifyError,
    judge::{DECODED, DRAWN, Judge, MASK},
    row::Row,
};
use crate::{
    pipeline::{image::to_unit, probe::Probe},
    tensor::{HostTensor, Values},
};

/// The picture as the decoder leaves it, in -1..1.
const RAW: &str = "image_raw";

/// The probe of the first run: what it finds is in `rows`.
pub struct Comparer<'a> {
    oracle: &'a Oracle,
    pub judge: Judge<'a>,
    rows: Vec<Row>,
    seen: BTreeSet<String>,
    /// A probe cannot stop a run: a reference file that could not be read is reported at the end.
    failed: Option<VerifyError>,
}

impl<'a> Comparer<'a> {
    pub fn new(oracle: &'a Oracle, judge: Judge<'a>) -> Comparer<'a> {
        Comparer { oracle, judge, rows: Vec::new(), seen: BTreeSet::new(), failed: None }
    }

    /// The rows, and the names of reference tensors that nothing was compared with.
    pub fn finish(self) -> Result<(Vec<Row>, Vec<String>), VerifyError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        if !self.seen.iter().any(|name| is_computed(name)) {
            let problem =
                "no tensor of the model is among the reference tensors, so nothing was verified; keep prompt_embeds.npy or pred_step0.npy of the reference run, for example".to_owned();
            return Err(VerifyError::Oracle { path: self.oracle.folder().to_owned(), problem });
        }
        let unseen = self.oracle.names.iter().filter(|name| !self.seen.contains(*name));
        Ok((self.rows, unseen.cloned().collect()))
    }

    /// Compares what the first run drew, where the reference did not keep it as the decoder left it.
    pub fn decoded(&mut self, image: &HostTensor) -> Result<(), VerifyError> {
        if self.oracle.names.contains(RAW) {
            return Ok(());
        }
        let image = to_unit(image);
        if let Some(reference) = self.oracle.tensor(DRAWN)? {
            self.rows.extend(self.judge.rows(DECODED, &image, &reference));
        }
        self.rows.extend(self.judge.decoded(&image));
        Ok(())
    }

    /// Compares the picture (0..1) of a free run.
    pub fn drawn(&mut self, image: &HostTensor) {
        if let Some(row) = self.judge.drawn(image) {
            self.seen.insert(DRAWN.to_owned());
            self.rows.push(row);
        }
    }

    /// Compares noise drawn from the oracle's seed.
    pub fn noise(&mut self, drawn: &HostTensor, reference: &HostTensor) {
        self.rows.push(self.judge.noise(drawn, reference));
    }
}

impl Probe for Comparer<'_> {
    fn internals(&self) -> bool {
        true
    }

    fn boundary(&mut self, name: &str, tensor: HostTensor) -> HostTensor {
        let reference = match self.oracle.tensor(name) {
            Ok(reference) => reference,
            Err(error) => {
                self.failed.get_or_insert(error);
                None
            }
        };
        if let Some(reference) = &reference {
            self.seen.insert(name.to_owned());
            self.rows.extend(self.judge.rows(name, &tensor, reference));
            if name == RAW {
                self.rows.extend(self.judge.decoded(&to_unit(&tensor)));
            }
        }
        let tensor = forced(tensor, reference);
        if name == MASK {
            self.judge.see_mask(&tensor);
        }
        tensor
    }
}

/// Whether a boundary is computed by a graph, and not by the host.
fn is_computed(name: &str) -> bool {
    let graphs = ["enc_hidden_full", "prompt_embeds", "dit_", "pred_step", "vae_", "image_"];
    graphs.iter().any(|graph| name.starts_with(graph))
}

/// The reference in the tensor's element type, where there is one that fits.
pub fn forced(tensor: HostTensor, reference: Option<HostTensor>) -> HostTensor {
    let is_whole = |tensor: &HostTensor| matches!(tensor.values, Values::I64(_) | Values::U8(_));
    match reference {
        Some(reference) if reference.shape == tensor.shape && is_whole(&reference) == is_whole(&tensor) => {
            reference.as_type(tensor.values.dtype())
        }
        _ => tensor,
    }
}
