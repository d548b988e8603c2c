//! The statistics of the latents that the autoencoder's batch norm holds.

use std::sync::Arc;

use crate::onnx::{Bytes, Compute, ComputeError, DType, Tensor};

#[derive(Debug, thiserror::Error)]
#[error("vae: the batch norm's {name} is no vector of finite f32 values; the checkpoint is damaged")]
struct Damaged {
    name: &'static str,
}

/// Mean and standard deviation, f32 [channels, 1, 1], of mean and variance, f32 [channels], when they are written.
pub fn channel_statistics(mean: Tensor, variance: Tensor, eps: f64) -> [Tensor; 2] {
    let (shape, len) = (vec![mean.elements(), 1, 1], mean.bytes.len());
    let source: Arc<dyn Compute> = Arc::new(ChannelStatistics { mean, variance, eps });
    [0, 1].map(|part| {
        let bytes = Bytes::Computed { source: Arc::clone(&source), part, len };
        Tensor { dtype: DType::F32, shape: shape.clone(), bytes }
    })
}

struct ChannelStatistics {
    mean: Tensor,
    variance: Tensor,
    eps: f64,
}

impl Compute for ChannelStatistics {
    fn operands(&self) -> Vec<&Tensor> {
        vec![&self.mean, &self.variance]
    }

    fn compute(&self) -> Result<Vec<Vec<u8>>, ComputeError> {
        let mean = self.mean.to_f32()?.unwrap_or_default();
        let variance = self.variance.to_f32()?.unwrap_or_default();
        let deviation = variance.iter().map(|v| (f64::from(*v) + self.eps).sqrt() as f32).collect();
        let parts = [("running_mean", mean), ("running_var", deviation)];
        let bytes = parts.map(|(name, values): (_, Vec<f32>)| match values.iter().all(|v| v.is_finite()) {
            true => Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            false => Err(Damaged { name }.into()),
        });
        bytes.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn computed(mean: [f32; 2], variance: [f32; 2]) -> Result<[Vec<f32>; 2], String> {
        let [mean, variance] = [mean, variance].map(|values| Tensor::from_f32(&[2], &values));
        let statistics = channel_statistics(mean, variance, 0.25);
        assert!(statistics.iter().all(|tensor| tensor.shape == [2, 1, 1] && tensor.bytes.len() == 8));
        let [mean, deviation] = statistics.map(|tensor| tensor.to_f32().map_err(|e| e.to_string()));
        Ok([mean?, deviation?].map(Option::unwrap))
    }

    #[test]
    fn deviations_are_roots_of_variances() {
        assert_eq!(computed([0.5, -1.0], [2.0, 6.0]).unwrap(), [vec![0.5, -1.0], vec![1.5, 2.5]]);
    }

    #[test]
    fn damaged_statistics_are_named() {
        assert!(computed([f32::NAN, 0.0], [1.0, 1.0]).unwrap_err().contains("running_mean"));
        for variance in [f32::INFINITY, -1.0, f32::NAN] {
            assert!(computed([0.0, 0.0], [1.0, variance]).unwrap_err().contains("running_var"));
        }
    }
}
