//! How image decoders are laid out in stages: everything before the middle attention, the attention over a chunk of query
//! rows, and the up blocks behind it.

use std::ops::Range;

use crate::{
    arch::author::Author,
    onnx::{Attribute, DType, Dim, Model},
};

/// The component of all stages of an image decoder.
pub const COMPONENT: &str = "vae_decoder";
/// Name of the middle attention's stage, if there is one.
pub const ATTENTION_STAGE: &str = "vae_attention";
/// Names of the stages after it are this and a number from 0.
pub const POST_STAGE: &str = "vae_post";

/// Dimensions of one feature map: [1, channels, height, width].
pub fn map(channels: usize, [height, width]: [&str; 2]) -> [Dim; 4] {
    let symbol = |name: &str| Dim::Symbol(name.to_owned());
    [Dim::Fixed(1), Dim::Fixed(channels), symbol(height), symbol(width)]
}

/// Rows of the attention: [1, name, channels].
fn sequence(name: &str, channels: usize) -> [Dim; 3] {
    [Dim::Fixed(1), Dim::Symbol(name.to_owned()), Dim::Fixed(channels)]
}

/// The middle attention over a chunk of query rows. Inputs: `q_chunk` [1,rows,C], scaled, `kt` [1,C,T], `v` [1,T,C]. Output:
/// `attn_chunk` [1,rows,C]. All f32.
pub fn attention(mut a: Author<'_>, channels: usize) -> Model {
    let q = a.graph.input("q_chunk", DType::F32, &sequence("chunk_rows", channels));
    let [one, rows, width] = sequence("kv_rows", channels);
    let kt = a.graph.input("kt", DType::F32, &[one, width, rows]);
    let v = a.graph.input("v", DType::F32, &sequence("kv_rows", channels));
    let scores = a.graph.matmul(q, kt);
    let weights = a.graph.op("Softmax", &[scores], &[("axis", Attribute::Int(-1))]);
    let y = a.graph.matmul(weights, v);
    a.graph.output(y, "attn_chunk", &sequence("chunk_rows", channels));
    a.finish()
}

/// The up blocks of each stage behind the middle block, of `levels` in all: a new stage begins before each block in `cuts`.
/// Cuts before blocks that are not there are left out.
pub fn blocks_of_stages(levels: usize, cuts: &[usize]) -> Vec<Range<usize>> {
    let mut starts: Vec<usize> = cuts.iter().copied().filter(|cut| (1..levels).contains(cut)).collect();
    starts.insert(0, 0);
    starts.sort_unstable();
    starts.dedup();
    let ends = starts.iter().skip(1).copied().chain([levels]);
    starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
}
