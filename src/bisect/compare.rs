//! How far two tensors are apart, and whether that is near enough.

use serde::Serialize;

use crate::tensor::{HostTensor, Sums, Values};

/// Relative L2 below which two tensors agree, where everything before them was computed in f32.
const F32_TOLERANCE: f64 = 1e-4;
/// The same behind f16, bf16 and quantised arithmetic.
const COARSE_TOLERANCE: f64 = 2e-2;
/// A row counts by itself if it differs by more than this share of the tolerance, relative to the largest row: what is
/// below is the noise of rows that are next to nothing.
const ROW_NOISE: f64 = 1e-2;
/// A cosine that is closer to 1 is not worth saying of a row.
const SHOWN_COSINE: f64 = 0.999_999;
/// The direction of a shorter row says nothing.
const SHORTEST_ROW: usize = 8;

/// How near two tensors must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// By how exactly the tensors were computed.
    Default,
    /// Relative L2, whatever computed them.
    Fixed(f64),
}

impl Tolerance {
    /// The largest relative L2. `coarse` says that less than f32 was computed in on the way.
    pub fn of(self, coarse: bool) -> f64 {
        match self {
            Tolerance::Fixed(tolerance) => tolerance,
            Tolerance::Default if coarse => COARSE_TOLERANCE,
            Tolerance::Default => F32_TOLERANCE,
        }
    }
}

/// Why two tensors do not agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parting {
    /// Their shapes differ.
    Shape,
    /// They are not finite in the same places.
    NotFinite,
    /// Integers or truth values differ.
    Exact,
    /// Relative L2 is above the tolerance.
    RelativeL2,
    /// One row points elsewhere, and hides behind larger ones.
    Row,
}

/// The numbers of one comparison. Sums are over elements that are finite on both sides.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    pub parting: Option<Parting>,
    /// Elements that could be compared: all but those that are NaN on both sides.
    pub elements: usize,
    /// |a-b| / |b|
    pub relative_l2: f64,
    pub cosine: f64,
    pub max_abs: f64,
    /// The smallest cosine of a row (along the last axis) that counts, and which row that is.
    pub row_cosine: f64,
    pub row: Option<usize>,
    /// Elements that differ; none for floats, which differ by more or less.
    pub differing: Option<usize>,
    /// NaNs of both sides.
    pub nan: [usize; 2],
    /// Infinities of both sides.
    pub infinite: [usize; 2],
    pub tolerance: f64,
}

impl Difference {
    /// Compares `a` with the reference `b`.
    pub fn between(a: &HostTensor, b: &HostTensor, tolerance: f64) -> Difference {
        let mut difference = Difference {
            parting: None,
            elements: 0,
            relative_l2: 0.0,
            cosine: 1.0,
            max_abs: 0.0,
            row_cosine: 1.0,
            row: None,
            differing: None,
            nan: [0; 2],
            infinite: [0; 2],
            tolerance,
        };
        if a.shape != b.shape {
            difference.parting = Some(Parting::Shape);
        } else if let Some(differing) = exact(&a.values, &b.values) {
            difference.elements = a.values.len();
            difference.differing = Some(differing);
            difference.parting = (differing > 0).then_some(Parting::Exact);
        } else {
            difference.measure(a, b);
        }
        difference
    }

    pub fn agrees(&self) -> bool {
        self.parting.is_none()
    }

    /// The numbers as one reads them.
    pub fn in_words(&self) -> String {
        let Difference { relative_l2, cosine, max_abs, row_cosine, .. } = self;
        match (self.parting, self.differing) {
            (Some(Parting::Shape), _) => return "the shapes differ".to_owned(),
            (_, Some(0)) => return "equal".to_owned(),
            (_, Some(differing)) => return format!("{differing} elements differ"),
            _ => {}
        }
        let mut words = format!("relative L2 {relative_l2:.2e}, cosine {cosine:.6}, max-abs {max_abs:.2e}");
        if let Some(row) = self.row.filter(|_| *row_cosine < SHOWN_COSINE) {
            words.push_str(&format!(", worst row {row} with cosine {row_cosine:.6}"));
        }
        for (what, [a, b]) in [("NaN", self.nan), ("Inf", self.infinite)] {
            if a + b > 0 {
                words.push_str(&format!(", {what} {a} against {b}"));
            }
        }
        words
    }

    fn measure(&mut self, a: &HostTensor, b: &HostTensor) {
        let width = b.shape.last().copied().unwrap_or(1).max(1);
        let count = b.values.len();
        let (mut total, mut same_places) = (Sums::default(), true);
        let mut rows = Vec::new();
        for start in (0..count).step_by(width) {
            let mut row = Sums::default();
            for index in start..(start + width).min(count) {
                let (x, y) = (a.values.f32_at(index), b.values.f32_at(index));
                self.count(x, y);
                if x.is_finite() && y.is_finite() {
                    row.add(f64::from(x), f64::from(y));
                    self.max_abs = self.max_abs.max((f64::from(x) - f64::from(y)).abs());
                } else {
                    same_places &= (x.is_nan() && y.is_nan()) || x == y;
                }
            }
            total.include(&row);
            rows.push(row);
        }
        self.relative_l2 = total.relative_l2();
        self.cosine = total.cosine();
        let parted_row = width >= SHORTEST_ROW && rows.len() > 1 && self.worst_row(&rows);
        // Written so that NaN parts.
        let near = self.relative_l2 <= self.tolerance && self.cosine >= 1.0 - self.tolerance.max(1e-6);
        self.parting = match (same_places, near, parted_row) {
            (false, ..) => Some(Parting::NotFinite),
            (_, false, _) => Some(Parting::RelativeL2),
            (.., true) => Some(Parting::Row),
            _ => None,
        };
    }

    fn count(&mut self, x: f32, y: f32) {
        self.elements += usize::from(!(x.is_nan() && y.is_nan()));
        for (side, value) in [x, y].into_iter().enumerate() {
            self.nan[side] += usize::from(value.is_nan());
            self.infinite[side] += usize::from(value.is_infinite());
        }
    }

    /// Finds the row with the smallest cosine among those that are more than noise, and says whether it parts.
    fn worst_row(&mut self, rows: &[Sums]) -> bool {
        let largest = rows.iter().map(|row| row.aa.max(row.bb)).fold(0.0, f64::max).sqrt();
        let noise = ROW_NOISE * self.tolerance * largest;
        for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.difference.sqrt() > noise) {
            let cosine = row.cosine();
            if self.row.is_none() || cosine < self.row_cosine {
                (self.row, self.row_cosine) = (Some(index), cosine);
            }
        }
        self.row_cosine < 1.0 - self.tolerance
    }
}

/// Elements that differ, of integers and truth values; `None` if either side is of floats.
fn exact(a: &Values, b: &Values) -> Option<usize> {
    fn count<T: PartialEq>(a: &[T], b: &[T]) -> usize {
        a.iter().zip(b).filter(|(a, b)| a != b).count()
    }
    match (a, b) {
        (Values::I64(a), Values::I64(b)) => Some(count(a, b)),
        (Values::U8(a), Values::U8(b)) => Some(count(a, b)),
        (Values::I64(a), Values::U8(b)) | (Values::U8(b), Values::I64(a)) => {
            Some(a.iter().zip(b.iter()).filter(|(a, b)| **a != i64::from(**b)).count())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use viaduct_export::onnx::DType;

    use super::*;

    fn of(shape: &[usize], values: &[f32]) -> HostTensor {
        HostTensor::f32(shape, values.to_vec())
    }

    fn parting(a: &HostTensor, b: &HostTensor) -> Option<Parting> {
        Difference::between(a, b, 1e-4).parting
    }

    #[test]
    fn numbers_are_those_of_the_definitions() {
        let difference = Difference::between(&of(&[2], &[3.0, 5.0]), &of(&[2], &[3.0, 4.0]), 1e-4);
        assert!((difference.relative_l2 - 0.2).abs() < 1e-12, "{difference:?}");
        assert!((difference.cosine - 29.0 / (34f64.sqrt() * 5.0)).abs() < 1e-12);
        assert_eq!((difference.max_abs, difference.parting), (1.0, Some(Parting::RelativeL2)));
    }

    #[test]
    fn what_is_not_finite_must_be_so_on_both_sides() {
        let finite = of(&[3], &[1.0, 2.0, 3.0]);
        let nan = of(&[3], &[1.0, f32::NAN, 3.0]);
        let [up, down] = [f32::INFINITY, f32::NEG_INFINITY].map(|x| of(&[3], &[1.0, x, 3.0]));
        assert_eq!(parting(&nan, &finite), Some(Parting::NotFinite));
        assert_eq!(parting(&finite, &nan), Some(Parting::NotFinite));
        assert_eq!(parting(&up, &down), Some(Parting::NotFinite));
        assert_eq!(parting(&nan, &up), Some(Parting::NotFinite));
        assert_eq!((parting(&nan, &nan), parting(&up, &up)), (None, None));
        assert_eq!(Difference::between(&nan, &up, 1e-4).nan, [1, 0]);
        assert_eq!(Difference::between(&nan, &nan, 1e-4).elements, 2);
        assert_eq!(Difference::between(&up, &up, 1e-4).elements, 3);
    }

    #[test]
    fn a_small_row_does_not_hide_behind_a_large_one() {
        let row = |size: f32| (1..=8).map(move |i| size * i as f32);
        let good: Vec<f32> = row(1000.0).chain(row(0.01)).collect();
        let mut bad = good.clone();
        bad[8..].fill(0.0);
        let difference = Difference::between(&of(&[2, 8], &bad), &of(&[2, 8], &good), 1e-4);
        assert!(difference.relative_l2 < 1e-4);
        assert_eq!((difference.parting, difference.row), (Some(Parting::Row), Some(1)));
        // What is a millionth of a millionth of the rest is noise.
        let noisy: Vec<f32> = row(1000.0).chain(row(1e-9)).collect();
        bad[8..].fill(0.0);
        assert_eq!(parting(&of(&[2, 8], &bad), &of(&[2, 8], &noisy)), None);
    }

    #[test]
    fn nothing_agrees_with_nothing_and_with_nothing_else() {
        assert_eq!(parting(&of(&[0, 4], &[]), &of(&[0, 4], &[])), None);
        assert_eq!(parting(&of(&[0, 4], &[]), &of(&[4, 0], &[])), Some(Parting::Shape));
        assert_eq!(parting(&of(&[2], &[0.0; 2]), &of(&[2], &[0.0; 2])), None);
        assert_eq!(parting(&of(&[2], &[1.0; 2]), &of(&[2], &[0.0; 2])), Some(Parting::RelativeL2));
        assert_eq!(parting(&of(&[], &[1.0]), &of(&[], &[1.0])), None);
    }

    #[test]
    fn integers_are_exact() {
        let [a, b] = [vec![1 << 60, 2], vec![(1 << 60) + 1, 2]].map(|v| HostTensor::i64(&[2], v));
        assert_eq!(parting(&a, &a), None);
        assert_eq!(parting(&a, &b), Some(Parting::Exact));
    }

    #[test]
    fn other_types_are_compared_as_numbers() {
        let b = of(&[2], &[1.0, 1000.0]);
        let a = b.as_type(DType::F16);
        assert_eq!((a.values.dtype(), parting(&a, &b)), (DType::F16, None));
    }
}
