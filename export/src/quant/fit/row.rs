//! Rows that are being fitted.

use super::scale::Scale;
use crate::quant::{
    nbits::{BlockFormat, RowsMut, store_scale},
    pack::pack,
};

/// A row that is being fitted.
pub(super) struct FittedRow<'f> {
    format: &'f BlockFormat,
    columns: usize,
    /// Of whole blocks.
    pub codes: Vec<u8>,
    pub scales: Vec<Scale>,
}

impl<'f> FittedRow<'f> {
    pub fn new(format: &'f BlockFormat, columns: usize) -> FittedRow<'f> {
        let blocks = format.blocks(columns);
        let scales = vec![Scale { step: 0.0, zero_point: format.mid() }; blocks];
        FittedRow { format, columns, codes: vec![0; blocks * format.block], scales }
    }

    /// Packs the row into its place among the rows of a task.
    pub fn store(&self, rows: &mut RowsMut<'_>, index: usize) {
        let FittedRow { format, columns: k, .. } = *self;
        let mut codes = self.codes.clone();
        codes[k..].fill(0);
        pack(&codes, format.bits, &mut rows.codes[index * format.row_bytes(k)..][..format.row_bytes(k)]);
        let scales = &mut rows.scales[index * format.scales_len(1, k)..][..format.scales_len(1, k)];
        for (scale, bytes) in self.scales.iter().zip(scales.chunks_exact_mut(format.scale_bytes())) {
            store_scale(scale.step, format.scale, bytes);
        }
        if !format.symmetric {
            let mut zero_points: Vec<u8> = self.scales.iter().map(|scale| scale.zero_point).collect();
            zero_points.resize(self.scales.len().next_multiple_of(format.per_byte()), format.mid());
            let bytes = zero_points.len() / format.per_byte();
            pack(&zero_points, format.bits, &mut rows.zero_points[index * bytes..][..bytes]);
        }
    }
}
