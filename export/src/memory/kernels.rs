//! What ONNX Runtime's kernels take besides their outputs. Facts about version 1.31, read in its sources and measured.

use super::scratch;
use crate::{
    device::Provider,
    onnx::{DType, Node},
    shapes::Fact,
};

/// How a kernel wants its first input and its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Plain,
    /// In another order of the axes, made by kernels before and after it. WebGPU's convolutions want channels last
    /// (core/optimizer/layout_transformation); those of the CPU provider want blocks of channels
    /// (core/optimizer/nchwc_transformer.cc).
    Own,
}

/// Bytes of scratch memory, from the inputs' shapes.
type Scratch = fn(&Node, &[Option<Vec<usize>>]) -> u64;

/// One kernel of a provider.
pub(super) struct Kernel {
    pub layout: Layout,
    /// Whether the output is the first input's buffer under another shape.
    pub view: bool,
    /// Inputs that the output may be written over, when nothing needs them afterwards.
    pub in_place: &'static [usize],
    pub dispatches: u32,
    pub temporary: Scratch,
}

const VIEWS: &[&str] = &["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"];
const RANDOM: &[&str] =
    &["RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"];

/// Kernels of the CPU provider that may write over an input, and which (`MayInplace` of their registrations in
/// core/providers/cpu). Those of the WebGPU provider never do.
const IN_PLACE: &[(&str, &[usize])] = &[
    ("Add", &[0, 1]),
    ("Sub", &[0, 1]),
    ("Mul", &[0, 1]),
    ("Div", &[0, 1]),
    ("Softmax", &[0]),
    ("Sigmoid", &[0]),
    ("Tanh", &[0]),
    ("Relu", &[0]),
    ("Exp", &[0]),
    ("Neg", &[0]),
    ("Abs", &[0]),
    ("Sqrt", &[0]),
    ("Clip", &[0]),
];

/// Operators of the WebGPU provider that take more than one dispatch: statistics first, or a quantised copy of the input.
const DISPATCHES: &[(&str, u32)] = &[("InstanceNormalization", 2), ("MatMulNBits", 2)];

/// Kernels that take much scratch memory: provider, domain, operator. Measured on graphs of one node.
const SCRATCH: &[(Provider, &str, &str, Scratch)] = &[
    (Provider::WebGpu, "com.microsoft", "MatMulNBits", quantised_input),
    (Provider::WebGpu, "", "Attention", scratch::scores),
    (Provider::Cpu, "", "Attention", scratch::scores),
    (Provider::Cpu, "", "ConvTranspose", scratch::columns),
    (Provider::Cpu, "", "Einsum", scratch::products),
    (Provider::Cpu, "", "LSTM", scratch::gates),
    (Provider::Cpu, "", "GRU", scratch::gates),
    (Provider::Cpu, "", "RNN", scratch::gates),
];
/// Those of the CPU provider whose scratch memory grows with their inputs in ways that are not followed.
const UNKNOWN_SCRATCH: &[(&str, &str)] = &[
    ("", "ConvInteger"),
    ("", "DFT"),
    ("", "DeformConv"),
    ("", "QLinearConv"),
    ("", "STFT"),
    ("", "Unique"),
    ("com.microsoft", "Attention"),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"),
    ("com.microsoft", "GroupQueryAttention"),
    ("com.microsoft", "QAttention"),
    ("com.microsoft", "SparseAttention"),
];

/// Channels per block where the CPU provider convolves in blocks, with 512-bit vectors. Narrower vectors have blocks of 8.
const CHANNEL_BLOCK: usize = 16;

pub(super) fn of(provider: Provider, node: &Node) -> Kernel {
    let domain = domain(node);
    let standard = domain.is_empty();
    let count = DISPATCHES.iter().find(|row| row.0 == node.op_type).map_or(1, |row| row.1);
    Kernel {
        layout: if standard && node.op_type == "Conv" { Layout::Own } else { Layout::Plain },
        view: standard && VIEWS.contains(&node.op_type.as_str()),
        in_place: match provider {
            Provider::Cpu if standard => {
                IN_PLACE.iter().find(|row| row.0 == node.op_type).map_or(&[], |row| row.1)
            }
            _ => &[],
        },
        dispatches: count,
        temporary: SCRATCH
            .iter()
            .find(|row| row.0 == provider && row.1 == domain && row.2 == node.op_type)
            .map_or(|_, _| 0, |row| row.3),
    }
}

/// Whether the kernel takes scratch memory by rules that are not known here.
pub(super) fn has_unknown_scratch(provider: Provider, node: &Node) -> bool {
    provider == Provider::Cpu
        && UNKNOWN_SCRATCH.iter().any(|row| row.0 == domain(node) && row.1 == node.op_type)
}

/// The standard operators' domain has two names.
fn domain(node: &Node) -> &str {
    if node.domain == "ai.onnx" { "" } else { &node.domain }
}

pub(super) fn is_random(node: &Node) -> bool {
    RANDOM.contains(&node.op_type.as_str())
}

/// With accuracy level 4 the input is quantised first: a byte per element and a scale per block of 128
/// (contrib_ops/webgpu/quantization/dp4a_matmul_nbits.cc).
fn quantised_input(node: &Node, shapes: &[Option<Vec<usize>>]) -> u64 {
    let (Some(Some(shape)), Some(4)) = (shapes.first(), node.int("accuracy_level")) else { return 0 };
    let elements = shape.iter().fold(1u64, |n, dim| n.saturating_mul(*dim as u64));
    elements.saturating_add(elements / 128 * 4)
}

/// Bytes that a provider holds for a value. The CPU provider has next to no f16 kernels and computes in f32
/// (core/optimizer/insert_cast_transformer.cc).
pub(super) fn held_bytes(provider: Provider, fact: &Fact) -> Option<u64> {
    let bytes = fact.footprint()?;
    match (provider, fact.dtype) {
        (Provider::Cpu, Some(DType::F16)) => Some(bytes.saturating_mul(2)),
        _ => Some(bytes),
    }
}

/// Bytes of a [1,C,H,W] value in the provider's own layout: blocks of channels are filled up.
pub(super) fn laid_out_bytes(provider: Provider, bytes: u64, shape: &[usize]) -> u64 {
    match (provider, shape.get(1)) {
        (Provider::Cpu, Some(channels)) if *channels > 0 => {
            let filled = channels.next_multiple_of(CHANNEL_BLOCK) as u64;
            (bytes / *channels as u64).saturating_mul(filled)
        }
        _ => bytes,
    }
}
