//! The weights: a counter-based generator and the centre and spread of each tensor.
//!
//! All integers are unsigned 64-bit and wrap around:
//!
//! ```text
//! mix(z)  = z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
//! key     = mix(mix(seed) ^ FNV-1a-64(tensor name, UTF-8))
//! bits(i) = mix(key + (i + 1) * 0x9E3779B97F4A7C15) >> 40            24 bits; i = row-major element index
//! t(i)    = (bits(i) - 2^23) * 2^-23                                 [-1, 1), exact in f32
//! w(i)    = f32(f32(t(i) * spread) + centre)                         one multiply, one add, no fused form
//! ```
//!
//! `spread` is computed in f64 and rounded once to f32: `std * sqrt(3)` (a uniform distribution of that standard
//! deviation), with `std = gain / sqrt(fan_in)` for matrices and convolutions. f16 and bf16 round w(i) to nearest
//! even.

use half::{bf16, f16};

use crate::spec::Dtype;

/// 2^-23.
const UNIT: f32 = 1.0 / (1 << 23) as f32;
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const FNV_OFFSET: u64 = 0xCBF2_9CE4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01B3;

/// The splitmix64 finaliser.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a, 64 bit, over bytes that may arrive in pieces.
#[derive(Clone, Copy, Debug)]
pub struct Fnv(u64);

impl Fnv {
    pub fn new() -> Self {
        Fnv(FNV_OFFSET)
    }

    pub fn with(self, bytes: &[u8]) -> Self {
        Fnv(bytes.iter().fold(self.0, |h, &b| (h ^ u64::from(b)).wrapping_mul(FNV_PRIME)))
    }

    pub fn finish(self) -> u64 {
        self.0
    }
}

impl Default for Fnv {
    fn default() -> Self {
        Fnv::new()
    }
}

/// Centre and spread of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rule {
    centre: f32,
    spread: f32,
}

/// How a tensor is filled: norms near 1, gates of order 1, nothing degenerate, so that every block moves the
/// result. `None`: an int64 tensor of zeros.
fn rule(name: &str, shape: &[usize]) -> Option<Rule> {
    let sqrt3 = 3f64.sqrt();
    let (centre, spread) = if name.ends_with("num_batches_tracked") {
        return None;
    } else if name.ends_with("running_var") {
        (2.0, 0.5)
    } else if name.ends_with("running_mean") {
        (0.0, 0.1 * sqrt3)
    } else if shape.len() == 1 {
        if name.ends_with("weight") { (1.0, 0.2 * sqrt3) } else { (0.0, 0.05 * sqrt3) }
    } else if name.ends_with("embed_tokens.weight") {
        (0.0, sqrt3)
    } else {
        let gain = if name.contains("modulation") || name.starts_with("norm_out") { 2.0 } else { 1.0 };
        let fan_in: usize = shape[1..].iter().product();
        (0.0, gain / (fan_in as f64).sqrt() * sqrt3)
    };
    Some(Rule { centre, spread: spread as f32 })
}

/// Stored dtype and little-endian bytes of one tensor.
pub fn tensor(seed: u64, dtype: Dtype, name: &str, shape: &[usize]) -> (safetensors::Dtype, Vec<u8>) {
    let count: usize = shape.iter().product();
    let Some(Rule { centre, spread }) = rule(name, shape) else {
        return (safetensors::Dtype::I64, vec![0; 8 * count]);
    };
    let key = mix(mix(seed) ^ Fnv::new().with(name.as_bytes()).finish());
    let weights = (1..=count as u64).map(|i| {
        let bits = mix(key.wrapping_add(i.wrapping_mul(GOLDEN))) >> 40;
        let t = (bits as i32 - (1 << 23)) as f32 * UNIT;
        t * spread + centre
    });
    match dtype {
        Dtype::F32 => (safetensors::Dtype::F32, weights.flat_map(f32::to_le_bytes).collect()),
        Dtype::F16 => {
            (safetensors::Dtype::F16, weights.flat_map(|w| f16::from_f32(w).to_le_bytes()).collect())
        }
        Dtype::Bf16 => {
            (safetensors::Dtype::BF16, weights.flat_map(|w| bf16::from_f32(w).to_le_bytes()).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    //! Every number here was printed by tools/oracle/procedural.py.
    use super::*;

    fn fnv(bytes: &[u8]) -> u64 {
        Fnv::new().with(bytes).finish()
    }

    #[test]
    fn mix_and_fnv_are_the_published_functions() {
        assert_eq!(mix(0), 0);
        assert_eq!(mix(1), 0x5692_161d_100b_05e5);
        assert_eq!(mix(u64::MAX), 0xb4d0_55fc_f2cb_bd7b);
        assert_eq!(fnv(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv(b"model.norm.weight"), 0xd6d6_e5af_d116_04e4);
    }

    /// First three elements, last one, and the hash of all bytes.
    #[track_caller]
    fn assert_tensor(seed: u64, dtype: Dtype, name: &str, shape: &[usize], golden: [u32; 4], hash: u64) {
        let (_, bytes) = tensor(seed, dtype, name, shape);
        let width = if dtype == Dtype::F32 { 4 } else { 2 };
        let element = |i: usize| {
            let mut word = [0; 4];
            word[..width].copy_from_slice(&bytes[i * width..][..width]);
            u32::from_le_bytes(word)
        };
        let last = bytes.len() / width - 1;
        assert_eq!([0, 1, 2, last].map(element), golden);
        assert_eq!(fnv(&bytes), hash);
    }

    #[test]
    fn f32_is_equal_bit_for_bit() {
        let check = |name, shape: &[usize], golden, hash| {
            assert_tensor(20251, Dtype::F32, name, shape, golden, hash);
        };
        let matrix = [0x3ed3_73f2, 0xbe36_f6a9, 0x3eac_8dc7, 0xbe9c_6787];
        check("x_embedder.weight", &[144, 16], matrix, 0x0033_5159_895a_e5f7);
        let norm = [0x3f5d_7134, 0x3f51_b9a3, 0x3f43_aaba, 0x3f32_f28a];
        check("model.norm.weight", &[96], norm, 0x29c1_f7dc_6f31_a6e7);
        let variance = [0x3fff_5174, 0x4018_74d5, 0x3fea_88c4, 0x4014_2e1c];
        check("bn.running_var", &[16], variance, 0xe920_9497_b7f6_66ca);
        let gate = [0x3e50_e5ff, 0x3e00_f091, 0x3e14_16d9, 0xbe32_b61c];
        check("norm_out.linear.weight", &[288, 144], gate, 0x8777_396f_176a_a57c);
    }

    #[test]
    fn half_types_round_to_nearest_even() {
        let name = "model.layers.0.self_attn.q_proj.weight";
        let golden = [0x3dfd, 0xbd82, 0xbe38, 0xbe05];
        assert_tensor(u64::MAX - 58, Dtype::Bf16, name, &[128, 64], golden, 0x0c3f_a92f_603a_4980);
        let golden = [0xa733, 0xac9e, 0x2a38, 0x2bc7];
        assert_tensor(7, Dtype::F16, "decoder.conv_in.bias", &[12], golden, 0xfaa3_7279_76ce_3844);
        let golden = [0x8df2, 0xb414, 0xacd8, 0x2348];
        assert_tensor(7, Dtype::F16, "decoder.conv_in.weight", &[12, 5, 3, 3], golden, 0x598c_54f5_158b_897b);
    }

    #[test]
    fn the_batch_counter_is_one_integer() {
        let (dtype, bytes) = tensor(1, Dtype::Bf16, "bn.num_batches_tracked", &[]);
        assert_eq!((dtype, bytes), (safetensors::Dtype::I64, vec![0; 8]));
    }
}
