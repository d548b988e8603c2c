//! Search: each block takes the scale and zero point that make its weighted squared error smallest. The weights are the mean
//! squares of the inputs, where they are known, and else all the same.

use super::{
    LANES,
    row::FittedRow,
    scale::{Place, best_scale, nearest_scale},
};
use crate::{
    onnx::Tensor,
    quant::{
        Gram, QuantError,
        nbits::{BlockFormat, Quantized, RowsMut, encode, in_tasks, read_matrix, widen_row},
    },
};

pub(super) fn search(
    weights: &Tensor,
    format: &BlockFormat,
    gram: Option<&Gram>,
) -> Result<Quantized, QuantError> {
    let ([n, k], bytes) = read_matrix(weights)?;
    let padded = format.blocks(k) * format.block;
    let mut counts = match gram {
        Some(gram) => {
            gram.check(k)?;
            gram.diagonal()?
        }
        None => vec![1.0; k],
    };
    // What pads the last block is never multiplied.
    counts.resize(padded, 0.0);
    let task = |first: usize, mut rows: RowsMut<'_>| {
        let mut values = vec![0.0; padded];
        let mut row = FittedRow::new(format, k);
        for (lane, number) in (first..n.min(first + LANES)).enumerate() {
            widen_row(weights.dtype, &bytes, number, &mut values[..k]);
            let blocks = values.chunks_exact(format.block).zip(counts.chunks_exact(format.block));
            for (block, (values, counts)) in blocks.enumerate() {
                let place = Place { row: number, block };
                let scale = best_scale(values, counts, nearest_scale(values, place, format)?, format);
                row.scales[block] = scale;
                let codes = &mut row.codes[block * format.block..][..format.block];
                encode(values, scale.step, scale.zero_point, format.max(), codes);
            }
            row.store(&mut rows, lane);
        }
        Ok(())
    };
    Ok(in_tasks([n, k], format, LANES, task)?.0)
}
