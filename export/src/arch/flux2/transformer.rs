//! The FLUX.2 transformer: blocks with two streams, then blocks with one. Source: diffusers' Flux2Transformer2DModel.

use super::{Constants, Flux2Error, config::TransformerConfig};
use crate::{
    arch::{
        author::Author,
        blocks::{
            attention::joint_attention,
            mlp::swiglu,
            norm::{adaptive_layer_norm, rms_norm},
            rope::rotate,
            stream::{add_branch, carry},
        },
    },
    onnx::{DType, Dim, Model, ValueId},
    recipe::Precision,
    weights::Checkpoint,
};

/// Name of the joint sequence's length.
const JOINT: &str = "joint_seq";

/// Values that every block reads.
struct Shared<'c> {
    config: &'c TransformerConfig,
    constants: &'c Constants,
    cos: ValueId,
    sin: ValueId,
    text_rows: i64,
}

/// Shift, scale (1 added) and gate of one branch.
#[derive(Clone, Copy)]
struct Modulation {
    shift: ValueId,
    scale: ValueId,
    gate: ValueId,
}

/// Inputs, f32: `latents` [1,image_seq,channels], `prompt_embeds` [1,L,joint_dim], `rope_cos`, `rope_sin`
/// [joint_seq, head_dim/2] (text rows first), and one step's rows of the modulation outputs. Output: `pred`, the
/// velocity, [1,image_seq,channels].
pub fn author(
    config: &TransformerConfig,
    text_length: usize,
    weights: &Checkpoint,
    precision: &Precision,
    constants: &Constants,
) -> Result<Model, Flux2Error> {
    let mut a = Author::new("transformer", weights, precision);
    let (width, channels) = (config.width(), config.in_channels);
    let image = |channels| [Dim::Fixed(1), Dim::Symbol("image_seq".to_owned()), Dim::Fixed(channels)];
    let latents = a.graph.input("latents", DType::F32, &image(channels));
    let text_dims = [Dim::Fixed(1), Dim::Fixed(text_length), Dim::Fixed(config.joint_attention_dim)];
    let text = a.graph.input("prompt_embeds", DType::F32, &text_dims);
    let table = [Dim::Symbol(JOINT.to_owned()), Dim::Fixed(config.attention_head_dim / 2)];
    let [cos, sin] = ["rope_cos", "rope_sin"].map(|name| a.graph.input(name, DType::F32, &table));
    let img_mod = modulation(&mut a, "mod_img", 6, width);
    let txt_mod = modulation(&mut a, "mod_txt", 6, width);
    let single_mod = modulation(&mut a, "mod_single", 3, width);
    let out_mod = rows(&mut a, "mod_out", 2, width);
    let (cos, sin) = (a.graph.cast(cos, a.compute()), a.graph.cast(sin, a.compute()));
    let shared = Shared { config, constants, cos, sin, text_rows: text_length as i64 };

    let mut img = embed(&mut a, latents, ["x_embedder.weight", "dit_x_in"], channels, width)?;
    let mut txt =
        embed(&mut a, text, ["context_embedder.weight", "dit_ctx_in"], config.joint_attention_dim, width)?;
    for block in 0..config.num_layers {
        [img, txt] = double_block(&mut a, &shared, block, [img, txt], [&img_mod, &txt_mod])?;
        a.graph.label(img, &format!("dit_double{block}_img"));
        a.graph.label(txt, &format!("dit_double{block}_txt"));
    }
    let mut joint = a.graph.concat(&[txt, img], 1);
    for block in 0..config.num_single_layers {
        joint = single_block(&mut a, &shared, block, joint, single_mod[0])?;
        a.graph.label(joint, &format!("dit_single{block}"));
    }
    let img = a.graph.slice(joint, 1, shared.text_rows, i64::MAX);
    let img = a.to_f32(img);
    let y = adaptive_layer_norm(&mut a, img, out_mod[1], Some(out_mod[0]), config.eps);
    a.graph.label(y, "dit_norm_out");
    let y = a.to_compute(y);
    let outputs = config.outputs();
    let y = a.project(y, "proj_out.weight", width, outputs)?;
    let pred = a.to_f32(y);
    a.graph.output(pred, "pred", &image(outputs));
    Ok(a.finish())
}

/// The joint sequence: text rows, then image rows.
fn joint_rows(width: usize) -> [Dim; 3] {
    [Dim::Fixed(1), Dim::Symbol(JOINT.to_owned()), Dim::Fixed(width)]
}

/// The rows of a [count, width] input as vectors.
fn rows(a: &mut Author<'_>, name: &str, count: usize, width: usize) -> Vec<ValueId> {
    let input = a.graph.input(name, DType::F32, &[Dim::Fixed(count), Dim::Fixed(width)]);
    (0..count as i64).map(|i| a.graph.row(input, i)).collect()
}

/// The branches' modulations of a [3 * branches, width] input.
fn modulation(a: &mut Author<'_>, name: &str, count: usize, width: usize) -> Vec<Modulation> {
    let rows = rows(a, name, count, width);
    rows.chunks_exact(3).map(|r| Modulation { shift: r[0], scale: r[1], gate: r[2] }).collect()
}

fn embed(
    a: &mut Author<'_>,
    x: ValueId,
    [weight, label]: [&str; 2],
    inputs: usize,
    outputs: usize,
) -> Result<ValueId, Flux2Error> {
    let x = a.to_compute(x);
    let y = a.project(x, weight, inputs, outputs)?;
    let y = carry(a, y);
    a.graph.label(y, label);
    Ok(y)
}

/// LayerNorm, modulated, in the compute type.
fn modulated(a: &mut Author<'_>, x: ValueId, m: Modulation, eps: f32) -> ValueId {
    let x = a.to_f32(x);
    let y = adaptive_layer_norm(a, x, m.scale, Some(m.shift), eps);
    a.to_compute(y)
}

/// One block of the two-stream part; both streams attend jointly, text rows first.
fn double_block(
    a: &mut Author<'_>,
    s: &Shared<'_>,
    block: usize,
    [img, txt]: [ValueId; 2],
    [img_mod, txt_mod]: [&[Modulation]; 2],
) -> Result<[ValueId; 2], Flux2Error> {
    let prefix = format!("transformer_blocks.{block}.");
    let (width, eps) = (s.config.width(), s.config.eps);
    let y_img = modulated(a, img, img_mod[0], eps);
    let y_txt = modulated(a, txt, txt_mod[0], eps);
    let project = |a: &mut Author<'_>, x, name: &str| {
        a.project(x, &format!("{prefix}attn.{name}.weight"), width, width)
    };
    let mut joint = |names: [&str; 2], norms: Option<[&str; 2]>| -> Result<ValueId, Flux2Error> {
        let mut parts = [project(a, y_txt, names[0])?, project(a, y_img, names[1])?];
        if let Some(norms) = norms {
            for (part, norm) in parts.iter_mut().zip(norms) {
                *part = head_norm(a, s, *part, &format!("{prefix}attn.{norm}.weight"))?;
            }
        }
        let joined = a.graph.concat(&parts, 1);
        Ok(if norms.is_some() { rotate_heads(a, s, joined) } else { joined })
    };
    let q = joint(["add_q_proj", "to_q"], Some(["norm_added_q", "norm_q"]))?;
    let k = joint(["add_k_proj", "to_k"], Some(["norm_added_k", "norm_k"]))?;
    let v = joint(["add_v_proj", "to_v"], None)?;
    let rows = joint_rows(s.config.width());
    let attended = joint_attention(a, [q, k, v], [&rows; 2], s.config.num_attention_heads);
    let attended_txt = a.graph.slice(attended, 1, 0, s.text_rows);
    let attended_img = a.graph.slice(attended, 1, s.text_rows, i64::MAX);
    let branch = project(a, attended_img, "to_out.0")?;
    let img = add_branch(a, img, branch, Some(img_mod[0].gate));
    let branch = project(a, attended_txt, "to_add_out")?;
    let txt = add_branch(a, txt, branch, Some(txt_mod[0].gate));
    let img = feed_forward(a, s, img, &format!("{prefix}ff."), img_mod[1])?;
    let txt = feed_forward(a, s, txt, &format!("{prefix}ff_context."), txt_mod[1])?;
    Ok([img, txt])
}

fn feed_forward(
    a: &mut Author<'_>,
    s: &Shared<'_>,
    x: ValueId,
    prefix: &str,
    m: Modulation,
) -> Result<ValueId, Flux2Error> {
    let (width, inner) = (s.config.width(), s.config.mlp_width());
    let y = modulated(a, x, m, s.config.eps);
    let y = a.project(y, &format!("{prefix}linear_in.weight"), width, 2 * inner)?;
    let halves = a.graph.split(y, -1, [inner, inner]);
    let y = gated(a, s, halves);
    let y = a.project(y, &format!("{prefix}linear_out.weight"), inner, width)?;
    Ok(add_branch(a, x, y, Some(m.gate)))
}

/// SwiGLU over two halves; the first is the gate.
fn gated(a: &mut Author<'_>, s: &Shared<'_>, [first, second]: [ValueId; 2]) -> ValueId {
    match s.constants.gate_first {
        true => swiglu(a, first, second),
        false => swiglu(a, second, first),
    }
}

/// One block of the one-stream part: attention and feed-forward side by side.
fn single_block(
    a: &mut Author<'_>,
    s: &Shared<'_>,
    block: usize,
    x: ValueId,
    m: Modulation,
) -> Result<ValueId, Flux2Error> {
    let prefix = format!("single_transformer_blocks.{block}.attn.");
    let (width, inner) = (s.config.width(), s.config.mlp_width());
    let y = modulated(a, x, m, s.config.eps);
    let y = a.project(y, &format!("{prefix}to_qkv_mlp_proj.weight"), width, 3 * width + 2 * inner)?;
    let [q, k, v, first, second] = a.graph.split(y, -1, [width, width, width, inner, inner]);
    let q = head_norm(a, s, q, &format!("{prefix}norm_q.weight"))?;
    let q = rotate_heads(a, s, q);
    let k = head_norm(a, s, k, &format!("{prefix}norm_k.weight"))?;
    let k = rotate_heads(a, s, k);
    let rows = joint_rows(s.config.width());
    let attended = joint_attention(a, [q, k, v], [&rows; 2], s.config.num_attention_heads);
    let activated = gated(a, s, [first, second]);
    let columns = [(attended, width), (activated, inner)];
    let y = a.project_both(columns, &format!("{prefix}to_out.weight"), width)?;
    Ok(add_branch(a, x, y, Some(m.gate)))
}

/// RMSNorm of each head of [1, rows, heads*d].
fn head_norm(a: &mut Author<'_>, s: &Shared<'_>, x: ValueId, weight: &str) -> Result<ValueId, Flux2Error> {
    let (heads, d) = (s.config.num_attention_heads, s.config.attention_head_dim);
    let x = a.graph.reshape(x, &[0, 0, heads as i64, d as i64]);
    let x = rms_norm(a, x, weight, d, s.config.eps)?;
    Ok(a.graph.reshape(x, &[0, 0, (heads * d) as i64]))
}

fn rotate_heads(a: &mut Author<'_>, s: &Shared<'_>, x: ValueId) -> ValueId {
    rotate(a, x, s.cos, s.sin, s.config.num_attention_heads, s.constants.rope_pairing)
}
