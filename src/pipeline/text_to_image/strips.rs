//! A decoder's stage in strips of rows. Where all that it computes of a pixel are pixels near by, a strip with some rows around
//! it has all that its own rows depend on: the picture is the same, and the memory a strip's.

use std::ops::Range;

use crate::tensor::{HostTensor, Values};

/// How a stage is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strips {
    /// Rows of the stage's input that it takes at a time.
    pub rows: usize,
    /// Rows on either side of a strip that its result depends on.
    pub halo: usize,
    /// Rows of the output per row of the input.
    pub growth: usize,
}

/// One strip: which rows the stage takes, and which of its output's rows are right.
#[derive(Debug, PartialEq, Eq)]
pub struct Strip {
    pub taken: Range<usize>,
    pub right: Range<usize>,
}

impl Strips {
    /// Strips that cover `height` rows: one where they are all taken at once. All have the same number of rows.
    pub fn cover(&self, height: usize) -> Vec<Strip> {
        let Strips { rows, halo, growth } = *self;
        if rows >= height || rows <= 2 * halo {
            return vec![Strip { taken: 0..height, right: 0..height * growth }];
        }
        let own = rows - 2 * halo;
        let strip = |first: usize| {
            let last = (first + own).min(height);
            let start = first.saturating_sub(halo).min(height - rows);
            let right = (first - start) * growth..(last - start) * growth;
            Strip { taken: start..start + rows, right }
        };
        (0..height).step_by(own).map(strip).collect()
    }
}

/// Some rows of [1, C, H, W].
pub fn rows_of(tensor: &HostTensor, rows: &Range<usize>) -> HostTensor {
    let [_, channels, height, width] = planar(tensor);
    let mut shape = tensor.shape.clone();
    shape[2] = rows.len();
    let of_channel = |channel: usize| {
        let start = (channel * height + rows.start) * width;
        start..start + rows.len() * width
    };
    let values = match &tensor.values {
        Values::F32(v) => Values::F32(gathered(v, (0..channels).map(of_channel))),
        Values::F16(v) => Values::F16(gathered(v, (0..channels).map(of_channel))),
        Values::I64(v) => Values::I64(gathered(v, (0..channels).map(of_channel))),
        Values::U8(v) => Values::U8(gathered(v, (0..channels).map(of_channel))),
    };
    HostTensor::new(&shape, values)
}

/// Tensors [1, C, h, W] below each other, as f32 if there are several.
pub fn stacked(parts: Vec<HostTensor>) -> HostTensor {
    let mut parts = parts;
    if parts.len() == 1 {
        return parts.remove(0);
    }
    let [_, channels, _, width] = planar(&parts[0]);
    let height = parts.iter().map(|part| part.shape[2]).sum::<usize>();
    let mut values = vec![0.0; channels * height * width];
    let mut top = 0;
    for part in &parts {
        let (rows, part) = (part.shape[2], part.to_f32());
        for channel in 0..channels {
            let to = (channel * height + top) * width;
            let from = channel * rows * width;
            values[to..to + rows * width].copy_from_slice(&part[from..from + rows * width]);
        }
        top += rows;
    }
    HostTensor::f32(&[1, channels, height, width], values)
}

fn gathered<T: Copy, B: FromIterator<T>>(values: &[T], ranges: impl Iterator<Item = Range<usize>>) -> B {
    ranges.flat_map(|range| values[range].iter().copied()).collect()
}

/// The shape of a tensor of four axes; others have no rows.
fn planar(tensor: &HostTensor) -> [usize; 4] {
    <[usize; 4]>::try_from(&tensor.shape[..]).unwrap_or([1, 0, 0, 0])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(height: usize) -> HostTensor {
        HostTensor::f32(&[1, 2, height, 3], (0..2 * height * 3).map(|x| x as f32).collect())
    }

    #[test]
    fn strips_cover_every_row_once() {
        for (height, rows, halo) in [(16, 10, 2), (17, 10, 2), (64, 9, 4), (10, 10, 3), (5, 6, 2), (9, 7, 3)]
        {
            let strips = Strips { rows, halo, growth: 2 }.cover(height);
            let mut next = 0;
            for Strip { taken, right } in &strips {
                assert_eq!(taken.len(), rows.min(height), "{height}, {rows}, {halo}");
                assert!(taken.end <= height);
                let own = right.start / 2 + taken.start..right.end / 2 + taken.start;
                assert_eq!(own.start, next);
                next = own.end;
                // All that the rows depend on is there, or is beyond the picture.
                assert!(own.start - taken.start >= halo.min(own.start));
                assert!(taken.end - own.end >= halo.min(height - own.end));
            }
            assert_eq!(next, height);
        }
    }

    #[test]
    fn rows_are_taken_and_put_back() {
        let whole = picture(5);
        let parts = [0..2, 2..3, 3..5].map(|rows| rows_of(&whole, &rows));
        assert_eq!(parts[1].to_f32(), [6.0, 7.0, 8.0, 21.0, 22.0, 23.0]);
        assert_eq!(stacked(parts.to_vec()), whole);
    }
}
