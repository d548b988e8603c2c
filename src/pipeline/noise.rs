//! The starting noise, equal to PyTorch's bit for bit, and the order of latents.
//!
//! A picture is its seed: whoever moves here from diffusers must get the same picture, so this follows
//! `torch.randn` on a CPU generator, with its three habits that no other library shares:
//!
//! - from 16 values on, a uniform has 24 bits, and Box-Muller runs on blocks of 16 (eight radii, then eight angles);
//! - a last incomplete block is not filled up: the *last 16 values* are drawn again, over the end of the block before;
//! - below 16 values each uniform has 53 bits, and the arithmetic is in f64.
//!
//! The f32 logarithm, sine and cosine are Cephes' polynomials with fused multiply-adds where PyTorch's AVX2 build
//! (used with AVX-512, too) has them; every x86-64 machine of the last ten years gives these bits. A PyTorch without
//! AVX2 differs by up to 2e-6.

use std::f64::consts::TAU;

use crate::tensor::{HostTensor, Values};

/// Why latents cannot be packed or unpacked.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LatentError {
    #[error("latents to pack have shape {0:?}, not [1, channels, height, width]")]
    NotPlanar(Vec<usize>),
    #[error("packed latents have shape {shape:?}, not [1, {tokens}, channels] as {height} x {width} needs")]
    NotPacked { shape: Vec<usize>, tokens: usize, height: usize, width: usize },
}

/// `torch.randn(count, generator=torch.Generator("cpu").manual_seed(seed))`, float32.
pub fn torch_randn(seed: u64, count: usize) -> Vec<f32> {
    let mut twister = Mt19937::new(seed);
    if count < BLOCK {
        return small_randn(&mut twister, count);
    }
    let mut values: Vec<f32> = (0..count).map(|_| twister.uniform_f32()).collect();
    for block in values.chunks_exact_mut(BLOCK) {
        box_muller(block);
    }
    if !count.is_multiple_of(BLOCK) {
        let last = &mut values[count - BLOCK..];
        last.fill_with(|| twister.uniform_f32());
        box_muller(last);
    }
    values
}

/// Initial latents `[1, channels, height, width]`, drawn in this order as diffusers does (packing comes after).
pub fn draw_latents(seed: u64, channels: usize, height: usize, width: usize) -> HostTensor {
    HostTensor::f32(&[1, channels, height, width], torch_randn(seed, channels * height * width))
}

/// `[1, C, h, w]` to tokens `[1, h*w, C]`; token `row * w + column`.
pub fn pack_latents(planar: &HostTensor) -> Result<HostTensor, LatentError> {
    let [1, channels, height, width] = planar.shape[..] else {
        return Err(LatentError::NotPlanar(planar.shape.clone()));
    };
    let tokens = height * width;
    Ok(HostTensor::new(&[1, tokens, channels], transposed(&planar.values, channels, tokens)))
}

/// Tokens `[1, h*w, C]` back to `[1, C, h, w]`.
pub fn unpack_latents(packed: &HostTensor, height: usize, width: usize) -> Result<HostTensor, LatentError> {
    let tokens = height * width;
    match packed.shape[..] {
        [1, n, channels] if n == tokens => {
            Ok(HostTensor::new(&[1, channels, height, width], transposed(&packed.values, tokens, channels)))
        }
        _ => Err(LatentError::NotPacked { shape: packed.shape.clone(), tokens, height, width }),
    }
}

/// A row-major `[rows, columns]` matrix as `[columns, rows]`.
fn transposed(values: &Values, rows: usize, columns: usize) -> Values {
    fn flip<T: Copy>(v: &[T], rows: usize, columns: usize) -> Vec<T> {
        (0..columns).flat_map(|c| (0..rows).map(move |r| v[r * columns + c])).collect()
    }
    match values {
        Values::F32(v) => Values::F32(flip(v, rows, columns).into()),
        Values::F16(v) => Values::F16(flip(v, rows, columns).into()),
        Values::I64(v) => Values::I64(flip(v, rows, columns).into()),
        Values::U8(v) => Values::U8(flip(v, rows, columns).into()),
    }
}

/// PyTorch's Box-Muller works on this many values at once.
const BLOCK: usize = 16;

/// Turns 16 uniforms into 16 normals: radii from the first eight, angles from the last eight, cosines first.
fn box_muller(block: &mut [f32]) {
    let (radii, angles) = block.split_at_mut(BLOCK / 2);
    for (a, b) in radii.iter_mut().zip(angles) {
        let radius = (-2.0 * cephes_ln(1.0 - *a)).sqrt();
        let (sin, cos) = cephes_sin_cos(TAU as f32 * *b);
        // Adding the mean of 0 turns -0 into 0, as there.
        *a = radius * cos + 0.0;
        *b = radius * sin + 0.0;
    }
}

/// Fewer than 16 values: f64 throughout, the sine of each pair kept for the next value.
fn small_randn(twister: &mut Mt19937, count: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        let angle = TAU * twister.uniform_f64();
        let radius = (-2.0 * (-twister.uniform_f64()).ln_1p()).sqrt();
        values.extend([(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
    }
    values.truncate(count);
    values
}

/// Cephes `logf` for 0 < x <= 1, rounded as PyTorch's AVX2 build rounds it.
fn cephes_ln(x: f32) -> f32 {
    const P: [f32; 9] = [
        7.037_683_6e-2,
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ];
    // ln 2 as the sum of a short number and a small rest.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;

    // x = m * 2^e, m in [sqrt(1/2), sqrt(2)).
    let bits = x.to_bits();
    let mut m = f32::from_bits(bits & 0x007f_ffff | 0x3f00_0000);
    let mut e = (bits >> 23) as f32 - 126.0;
    if m < std::f32::consts::FRAC_1_SQRT_2 {
        m += m;
        e -= 1.0;
    }
    m -= 1.0;
    let z = m * m;
    let y = P[1..].iter().fold(P[0], |y, p| y.mul_add(m, *p)) * m;
    let y = (-z).mul_add(0.5, y.mul_add(z, e * LN2_LOW));
    e.mul_add(LN2_HIGH, m + y)
}

/// Cephes `sinf` and `cosf` for 0 <= x < 2 pi, rounded as PyTorch's AVX2 build rounds them.
fn cephes_sin_cos(x: f32) -> (f32, f32) {
    // pi / 4 in three parts, so that the reduction is exact.
    const PI_4: [f32; 3] = [0.785_156_25, 2.418_756_5e-4, 3.774_895e-8];
    const SIN: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
    const COS: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];

    let octant = ((x * (4.0 / std::f32::consts::PI)) as i32 + 1) & !1;
    let y = octant as f32;
    let x = PI_4.iter().fold(x, |x, part| (-y).mul_add(*part, x));
    let z = x * x;
    let sin = (SIN[0].mul_add(z, SIN[1]).mul_add(z, SIN[2]) * z).mul_add(x, x);
    let cos = (COS[0].mul_add(z, COS[1]).mul_add(z, COS[2]) * z).mul_add(z, -(z * 0.5)) + 1.0;
    match octant & 6 {
        0 => (sin, cos),
        2 => (cos, -sin),
        4 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

/// The Mersenne Twister of 32 bits, seeded as PyTorch does: with the low half of the seed.
struct Mt19937 {
    state: [u32; Mt19937::N],
    next: usize,
}

impl Mt19937 {
    const N: usize = 624;
    const M: usize = 397;

    fn new(seed: u64) -> Mt19937 {
        let mut state = [seed as u32; Mt19937::N];
        for i in 1..Mt19937::N {
            let previous = state[i - 1];
            state[i] = (previous ^ (previous >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Mt19937 { state, next: Mt19937::N }
    }

    fn twist(&mut self) {
        for i in 0..Mt19937::N {
            let y = self.state[i] & 0x8000_0000 | self.state[(i + 1) % Mt19937::N] & 0x7fff_ffff;
            let mask = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + Mt19937::M) % Mt19937::N] ^ (y >> 1) ^ mask;
        }
        self.next = 0;
    }

    fn next_u32(&mut self) -> u32 {
        if self.next == Mt19937::N {
            self.twist();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// Uniform in [0, 1) with 24 bits.
    fn uniform_f32(&mut self) -> f32 {
        (self.next_u32() & 0x00ff_ffff) as f32 * (1.0 / (1 << 24) as f32)
    }

    /// Uniform in [0, 1) with 53 bits, the first draw above the second.
    fn uniform_f64(&mut self) -> f64 {
        let bits = u64::from(self.next_u32()) << 32 | u64::from(self.next_u32());
        (bits & ((1 << 53) - 1)) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::*;

    /// The last value of each draw, from PyTorch 2.15; `tests/host_numbers.rs` compares whole draws.
    #[test]
    fn draws_of_every_kind_end_as_in_torch() {
        const SIZES: [usize; 8] = [1, 5, 15, 16, 17, 31, 33, 100];
        #[rustfmt::skip]
        const LAST: [(u64, [u32; 8]); 3] = [
            (0, [0x3fc53f5c, 0xbf8ad1a1, 0xbf891cab, 0xbe7d367c, 0x3f6e8c30, 0xbfbc04b7, 0x3f9a033c, 0x3e6e8222]),
            (1000, [0xbf9605b5, 0x3f6d61e1, 0x3e0e5151, 0x3eab88b6, 0xbf4ae797, 0xbef9ed99, 0xbf4e38c7, 0xbf2a94d3]),
            ((1 << 32) + 5, [0xbef93b54, 0xbe4a272f, 0x3f2f44b6, 0xbf48471d, 0x3f3ea9b4, 0xbf06a4bd, 0xbf84aaf4, 0xbf8c4888]),
        ];
        for (seed, last) in LAST {
            for (size, last) in SIZES.into_iter().zip(last) {
                let values = torch_randn(seed, size);
                assert_eq!(values.len(), size);
                assert_eq!(values[size - 1].to_bits(), last, "seed {seed}, size {size}");
            }
        }
        assert!(torch_randn(0, 0).is_empty());
    }

    #[test]
    fn only_the_low_half_of_a_seed_counts() {
        assert_eq!(torch_randn(5, 40), torch_randn((1 << 32) + 5, 40));
        assert_ne!(torch_randn(5, 40), torch_randn(6, 40));
    }

    #[test]
    fn polynomials_are_the_functions() {
        for i in 1..=4096 {
            let x = i as f32 / 4096.0;
            assert!((f64::from(cephes_ln(x)) - f64::from(x).ln()).abs() < 5e-7, "ln {x}");
            let angle = TAU as f32 * (i - 1) as f32 / 4096.0;
            let (sin, cos) = cephes_sin_cos(angle);
            assert!((f64::from(sin) - f64::from(angle).sin()).abs() < 2e-7, "sin {angle}");
            assert!((f64::from(cos) - f64::from(angle).cos()).abs() < 2e-7, "cos {angle}");
        }
    }

    #[test]
    fn tokens_go_row_by_row() {
        let planar = HostTensor::f32(&[1, 2, 2, 3], (0..12).map(|x| x as f32).collect());
        let packed = pack_latents(&planar).unwrap();
        assert_eq!(packed.shape, [1, 6, 2]);
        assert_eq!(packed.to_f32()[..6], [0.0, 6.0, 1.0, 7.0, 2.0, 8.0]);
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let flat = HostTensor::f32(&[1, 6, 2], vec![0.0; 12]);
        assert_eq!(pack_latents(&flat), Err(LatentError::NotPlanar(vec![1, 6, 2])));
        let error = unpack_latents(&flat, 2, 2).unwrap_err();
        assert_eq!(
            error.to_string(),
            "packed latents have shape [1, 6, 2], not [1, 4, channels] as 2 x 2 needs"
        );
        let batch = HostTensor::f32(&[2, 3, 2, 1], vec![0.0; 12]);
        assert!(pack_latents(&batch).is_err());
    }

    proptest! {
        #[test]
        fn unpacking_undoes_packing(channels in 0usize..6, height in 0usize..6, width in 0usize..6, half in any::<bool>()) {
            let count = channels * height * width;
            let values = match half {
                true => Values::F16((0..count).map(|x| f16::from_f32(x as f32)).collect()),
                false => Values::F32((0..count).map(|x| x as f32).collect()),
            };
            let planar = HostTensor::new(&[1, channels, height, width], values);
            let packed = pack_latents(&planar).unwrap();
            prop_assert_eq!(&packed.shape, &[1, height * width, channels]);
            prop_assert_eq!(unpack_latents(&packed, height, width).unwrap(), planar);
        }
    }
}
