//! Sums of products of two tensors' elements, of which their cosine and their relative distance follow.

/// Of elements `a` and those of a reference, `b`, in f64. What is not a number makes every result NaN.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    pub aa: f64,
    pub bb: f64,
    pub ab: f64,
    /// Of (a - b)^2.
    pub difference: f64,
}

impl Sums {
    /// Of as many elements as the shorter side has.
    pub fn of(a: &[f32], b: &[f32]) -> Sums {
        let mut sums = Sums::default();
        a.iter().zip(b).for_each(|(a, b)| sums.add(f64::from(*a), f64::from(*b)));
        sums
    }

    pub fn add(&mut self, a: f64, b: f64) {
        self.aa += a * a;
        self.bb += b * b;
        self.ab += a * b;
        self.difference += (a - b) * (a - b);
    }

    pub fn include(&mut self, other: &Sums) {
        self.aa += other.aa;
        self.bb += other.bb;
        self.ab += other.ab;
        self.difference += other.difference;
    }

    /// |a-b| / |b|; infinite for something against nothing.
    pub fn relative_l2(&self) -> f64 {
        if self.difference == 0.0 { 0.0 } else { (self.difference / self.bb).sqrt() }
    }

    /// 1 for nothing against nothing, 0 for something against nothing.
    pub fn cosine(&self) -> f64 {
        match (self.aa == 0.0, self.bb == 0.0) {
            (true, true) => 1.0,
            (false, false) => self.ab / (self.aa.sqrt() * self.bb.sqrt()),
            // NaN against nothing is NaN.
            _ => 0.0 * (self.aa + self.bb),
        }
    }

    /// 1 - cos, and 0 where rounding would make it less.
    pub fn cosine_error(&self) -> f64 {
        let error = 1.0 - self.cosine();
        if error < 0.0 { 0.0 } else { error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosines_are_those_of_the_definition() {
        let sums = Sums::of(&[3.0, 5.0], &[3.0, 4.0]);
        assert!((sums.cosine() - 29.0 / (34f64.sqrt() * 5.0)).abs() < 1e-15);
        assert!((sums.relative_l2() - 0.2).abs() < 1e-15);
        let [nothing, something] = [[0.0; 2], [1.0; 2]];
        assert_eq!(Sums::of(&nothing, &nothing).cosine_error(), 0.0);
        assert_eq!(Sums::of(&something, &nothing).cosine_error(), 1.0);
        assert!((Sums::of(&something, &[-1.0; 2]).cosine_error() - 2.0).abs() < 1e-15);
    }

    #[test]
    fn f32_values_of_any_size_lose_nothing() {
        for size in [1e-30, 1.0, 1e30] {
            let a: Vec<f32> = (1..=1000).map(|i| size * i as f32).collect();
            assert!(Sums::of(&a, &a).cosine_error() < 1e-15);
        }
    }

    #[test]
    fn what_is_no_number_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY] {
            for other in [1.0, 0.0] {
                assert!(Sums::of(&[bad, 1.0], &[other; 2]).cosine_error().is_nan(), "{bad} {other}");
                assert!(Sums::of(&[other; 2], &[bad, 1.0]).cosine_error().is_nan(), "{bad} {other}");
            }
        }
    }
}
