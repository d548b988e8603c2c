//! Looking into a run: every boundary tensor passes a probe, which may keep it, compare it or put another in its place.

use crate::tensor::HostTensor;

/// Sees the tensors at the boundaries of a run, under the names of the reference files (`prompt_embeds`, `pred_step0`,
/// `vae_up1`, ...).
pub trait Probe {
    /// Whether it looks at boundaries. Where not, tensors between stages may stay on the device and pass unseen.
    fn looks(&self) -> bool {
        true
    }

    /// Whether values inside the graphs are wanted too.
    fn internals(&self) -> bool {
        false
    }

    /// Sees one tensor. What it returns goes on through the run; it must have the same shape.
    fn boundary(&mut self, _name: &str, tensor: HostTensor) -> HostTensor {
        tensor
    }

    /// Sees a tensor of which the run goes on with its own, whatever the probe makes of it.
    fn shown(&mut self, name: &str, tensor: HostTensor) {
        self.boundary(name, tensor);
    }
}

/// Looks at nothing.
pub struct NoProbe;

impl Probe for NoProbe {
    fn looks(&self) -> bool {
        false
    }
}
