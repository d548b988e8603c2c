//! An autoencoder's graph as the stages that the authored path makes: up to the middle attention, the attention over a
//! chunk of query rows, and what follows it, with stages of their own for up blocks.
//!
//! Before: one graph of convolutions with one attention over all pixels in the middle. After:
//! - `vae_pre`: `latents` -> `vae_mid_res0` [1,C,h,w], and f32 `q` (scaled) and `v` [1,h,w,C], `kt` [1,C,h,w];
//! - `vae_attention`: `q_chunk` [1,rows,C], `kt` [1,C,h*w], `v` [1,h*w,C] -> `attn_chunk` [1,rows,C], all f32;
//! - `vae_post0`: `vae_mid_res0` and f32 `attn` [1,h,w,C] -> `vae_up0_res`, ..., up to `image_raw` in f32. A stage ends before
//!   the upsampling of its last up block, with which the next one begins: what is handed over is four times smaller so.
//!
//! The attention is MatMul, Softmax, MatMul or com.microsoft MultiHeadAttention with one head. The scores over all pixels
//! never exist together. An encoder has the same stages; its input and output keep their names.
//!
//! Refused: graphs with no attention or several, several heads, a mask or anything else between scores and Softmax, rows
//! that are not the pixels of what the attention is added to, and graphs of which more crosses the attention or a cut; a budget that no cuts keep. It counts what WebGPU is predicted to
//! take for a stage after the attention.

use std::collections::{HashMap, HashSet};

use super::{
    Outcome, Part, Parts, Pass, PassError, Refusal, Settings, Split, Splitting, View, apply,
    budget::check_sizes,
    drop_dead,
    part::{ancestors, parts},
    pass,
    pixel_attention::{Prepared, prepared},
    sequence,
    split_at::{cut_behind, live},
};
use crate::{
    device::{DeviceProfile, Provider},
    memory::{PENDING_DISPATCHES, analyse},
    onnx::{Attribute, Builder, DType, Dim, Graph, Model, Node, NodeId, ValueId, ValueType},
    shapes::{Shapes, Sizes, infer},
};

pub const SPLIT: Split = Split {
    name: "split_vae",
    what: "an autoencoder -> vae_pre, vae_attention (a chunk of rows), vae_post0, ... (--cuts, --max-bytes)",
    why: "its attention holds a score for each pair of pixels, and its largest activations lie side by side",
    run,
};

const CROSSING: &str = "more than the attention and what it is added to goes on behind it";
const NO_LEVEL: &str = "it has no such up block to cut before";
const TOO_LARGE: &str = "no cuts behind up blocks keep it to the budget";
const TWICE: &str = "more than one value goes on behind an up block";

/// Stages after the attention are this and a number from 0.
const POST_STAGE: &str = "vae_post";

/// Up blocks among which cuts are looked for.
const MAX_LEVELS: usize = 6;

fn run(model: &Model, settings: &Settings) -> Parts {
    let mut outcome = Outcome::default();
    if settings.split.max_bytes.is_some() {
        check_sizes(&model.graph, &settings.split.sizes)?;
    }
    let mut model = model.clone();
    tidy(&mut model)?;
    let stages = match prepared(&model) {
        Ok(prepared) => stages(&prepared, &settings.split)?,
        Err(refusal) => Err(refusal),
    };
    match stages {
        Ok(parts) => {
            outcome.applied = parts.len() - 1;
            Ok((parts, outcome))
        }
        Err(refusal) => {
            outcome.refused.push(refusal);
            Ok((Vec::new(), outcome))
        }
    }
}

fn whole(graph: &Graph, why: &'static str) -> Refusal {
    Refusal { place: graph.name.clone(), why: why.into() }
}

fn stages(prepared: &Prepared, splitting: &Splitting) -> Result<Result<Vec<Part>, Refusal>, PassError> {
    let mut model = prepared.model.clone();
    // Nothing that remains in the graph uses them: they leave it as outputs.
    model.graph.outputs.extend([prepared.kt, prepared.v]);
    let view = View::of(&model);
    let [mut pre, mut post] = match halves(&view, prepared) {
        Ok(halves) => halves,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let middle = Middle::of(&view, prepared);
    for model in [&mut pre, &mut post] {
        forget_symbols(&mut model.graph);
        middle.label(&mut model.graph, prepared);
    }
    pre.graph.outputs = vec![prepared.q, prepared.kt, prepared.v, prepared.residual];
    post.graph.inputs = vec![prepared.residual, prepared.attended];
    if decodes(&view, prepared) {
        input_port(&mut pre, "latents", ["latent_height", "latent_width"]);
        output_port(&mut post, "image_raw", ["image_height", "image_width"]);
    }
    tidy(&mut pre)?;
    tidy(&mut post)?;
    let sizes = middle.sizes(&infer(&model, &splitting.sizes, &Default::default()).shape(prepared.residual));
    let posts = match posts(&post, splitting, &sizes) {
        Ok(posts) => posts,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let part = |name: &str, mut model: Model| {
        name.clone_into(&mut model.graph.name);
        Part { name: name.to_owned(), model }
    };
    let attention = middle.attention(splitting.chunk_rows);
    let mut stages = vec![part("vae_pre", pre), part("vae_attention", attention)];
    stages.extend(posts);
    Ok(Ok(stages))
}

/// The graph before the attention's placeholder and behind it.
fn halves(view: &View<'_>, prepared: &Prepared) -> Result<[Model; 2], Refusal> {
    let wanted = [prepared.q, prepared.kt, prepared.v, prepared.residual];
    let before: HashSet<NodeId> = wanted.into_iter().flat_map(|value| ancestors(view, value)).collect();
    let placeholder = view.producer(prepared.attended).map(|(id, _)| id);
    let place = |id: &NodeId| match before.contains(id) {
        true => 0,
        false => 1 + usize::from(Some(*id) != placeholder),
    };
    let part_of: HashMap<NodeId, usize> = live(view).into_iter().map(|id| (id, place(&id))).collect();
    let names = ["vae_pre", "", "vae_post0"].map(str::to_owned);
    let parts: Vec<Model> = parts(view, &part_of, &names)?.into_iter().map(|part| part.model).collect();
    let [pre, _, post] = <[Model; 3]>::try_from(parts).map_err(|_| whole(view.graph, CROSSING))?;
    let inputs: HashSet<ValueId> = post.graph.inputs.iter().copied().collect();
    let one_way = inputs == HashSet::from([prepared.residual, prepared.attended])
        && pre.graph.inputs.len() == 1
        && post.graph.outputs.len() == 1;
    if one_way { Ok([pre, post]) } else { Err(whole(view.graph, CROSSING)) }
}

/// Whether the picture is larger than what the attention works on at the end rather than at the beginning.
fn decodes(view: &View<'_>, prepared: &Prepared) -> bool {
    let rows = |value: &ValueId| view.facts().sizes(*value, 2);
    let [input, ..] = &view.graph.inputs[..] else { return false };
    match (rows(input), rows(&prepared.residual)) {
        (Some(input), Some(middle)) => input.iter().zip(&middle).all(|(input, middle)| input <= middle),
        _ => false,
    }
}

/// Sizes of what the attention works on: numbers, or the names that the stages use.
struct Middle {
    channels: usize,
    residual_channels: Dim,
    height: Dim,
    width: Dim,
}

impl Middle {
    fn of(view: &View<'_>, prepared: &Prepared) -> Middle {
        let dim = |axis: usize, name: &str| named(view.facts().dim(prepared.residual, axis), name);
        Middle {
            channels: prepared.channels,
            residual_channels: view.facts().dim(prepared.residual, 1),
            height: dim(2, "mid_height"),
            width: dim(3, "mid_width"),
        }
    }

    fn map(&self, channels: Dim) -> Vec<Dim> {
        vec![Dim::Fixed(1), channels, self.height.clone(), self.width.clone()]
    }

    fn rows(&self) -> Vec<Dim> {
        vec![Dim::Fixed(1), self.height.clone(), self.width.clone(), Dim::Fixed(self.channels)]
    }

    /// Gives the stages' ports their names and shapes.
    fn label(&self, graph: &mut Graph, prepared: &Prepared) {
        let ports = [
            (prepared.q, "q", self.rows()),
            (prepared.kt, "kt", self.map(Dim::Fixed(self.channels))),
            (prepared.v, "v", self.rows()),
            (prepared.residual, "vae_mid_res0", self.map(self.residual_channels.clone())),
            (prepared.attended, "attn", self.rows()),
        ];
        for (value, name, dims) in ports {
            label(graph, value, name, dims);
        }
    }

    /// Sizes of the names, where they are open and known.
    fn sizes(&self, residual: &Option<Vec<usize>>) -> Sizes {
        let sides = [(&self.height, 2), (&self.width, 3)].into_iter();
        sides
            .filter_map(|(dim, axis)| match dim {
                Dim::Symbol(name) => Some((name.clone(), *residual.as_ref()?.get(axis)?)),
                _ => None,
            })
            .collect()
    }

    /// `Softmax(q_chunk kt) v`, all f32.
    fn attention(&self, chunk_rows: Option<usize>) -> Model {
        let rows = match (&self.height, &self.width) {
            (Dim::Fixed(height), Dim::Fixed(width)) => height.checked_mul(*width).map(Dim::Fixed),
            _ => None,
        };
        let rows = rows.unwrap_or(Dim::Symbol("kv_rows".to_owned()));
        let chunk = chunk_rows.map_or(Dim::Symbol("chunk_rows".to_owned()), Dim::Fixed);
        let (one, width) = (Dim::Fixed(1), Dim::Fixed(self.channels));
        let mut graph = Builder::new("vae_attention");
        let chunk = [one.clone(), chunk, width.clone()];
        let q = graph.input("q_chunk", DType::F32, &chunk);
        let kt = graph.input("kt", DType::F32, &[one.clone(), width.clone(), rows.clone()]);
        let v = graph.input("v", DType::F32, &[one, rows, width]);
        let scores = graph.matmul(q, kt);
        let weights = graph.op("Softmax", &[scores], &[("axis", Attribute::Int(-1))]);
        let y = graph.matmul(weights, v);
        graph.output(y, "attn_chunk", &chunk);
        graph.finish()
    }
}

/// A size, by that name if it is open.
fn named(dim: Dim, name: &str) -> Dim {
    match dim {
        Dim::Fixed(size) => Dim::Fixed(size),
        _ => Dim::Symbol(name.to_owned()),
    }
}

/// Gives a value a name, which whatever has it loses, and a shape.
fn label(graph: &mut Graph, value: ValueId, name: &str, dims: Vec<Dim>) {
    if let Some(other) = graph.find(name).filter(|other| *other != value) {
        let mut free = format!("{name}.2");
        while graph.find(&free).is_some() {
            free.push_str(".2");
        }
        graph.rename(other, &free);
    }
    graph.rename(value, name);
    let dtype = match graph[value].ty {
        Some(ValueType::Tensor { dtype, .. }) => dtype,
        _ => DType::F32,
    };
    graph[value].ty = Some(ValueType::Tensor { dtype, shape: Some(dims) });
}

/// Drops recorded shapes with open sizes inside the graph: the stages have other names for them.
fn forget_symbols(graph: &mut Graph) {
    let port = |id: &ValueId| graph.inputs.contains(id) || graph.outputs.contains(id);
    let ids: Vec<ValueId> = graph.values().map(|(id, _)| id).filter(|id| !port(id)).collect();
    for id in ids {
        if let Some(ValueType::Tensor { shape, .. }) = &mut graph[id].ty {
            *shape = shape.take().filter(|dims| dims.iter().all(|dim| matches!(dim, Dim::Fixed(_))));
        }
    }
}

/// Names the input and gives it f32 and the names of its sides.
fn input_port(model: &mut Model, name: &str, sides: [&str; 2]) {
    let (Some((dtype, dims)), Some(first)) =
        (port(model, model.graph.inputs.first(), sides), model.graph.nodes().next().map(|(id, _)| id))
    else {
        return;
    };
    let graph = &mut model.graph;
    let old = graph.inputs[0];
    if dtype != DType::F32 {
        let node = graph[first].clone();
        label(graph, old, &format!("{name}_cast"), dims.clone());
        let new = graph.value(name);
        graph.replace_node(first, vec![cast(new, old, dtype), node]);
        graph.inputs[0] = new;
    }
    let input = graph.inputs[0];
    label(graph, input, name, dims);
}

/// Names the output and gives it f32 and the names of its sides.
fn output_port(model: &mut Model, name: &str, sides: [&str; 2]) {
    let Some((dtype, dims)) = port(model, model.graph.outputs.first(), sides) else { return };
    let graph = &mut model.graph;
    let old = graph.outputs[0];
    if dtype != DType::F32 {
        label(graph, old, &format!("{name}_cast"), dims.clone());
        let new = graph.value(name);
        graph.add_node(cast(old, new, DType::F32));
        graph.outputs[0] = new;
    }
    let output = graph.outputs[0];
    label(graph, output, name, dims);
}

fn cast(from: ValueId, to: ValueId, dtype: DType) -> Node {
    Node {
        op_type: "Cast".to_owned(),
        inputs: vec![Some(from)],
        outputs: vec![Some(to)],
        attributes: vec![("to".to_owned(), Attribute::Int(i64::from(dtype.to_onnx())))],
        ..Node::default()
    }
}

/// Type and dimensions of a picture that goes in or out, with names for open sides.
fn port(model: &Model, value: Option<&ValueId>, sides: [&str; 2]) -> Option<(DType, Vec<Dim>)> {
    let (value, view) = (*value?, View::of(model));
    let dims: [Dim; 4] = view.facts().shape(value)?.try_into().ok()?;
    let [batch, channels, height, width] = dims;
    let dims = vec![batch, channels, named(height, sides[0]), named(width, sides[1])];
    Some((view.facts().dtype(value)?, dims))
}

/// Rewrites until no sizes are read at run time, where that can be.
fn tidy(model: &mut Model) -> Result<(), PassError> {
    let mut passes: Vec<&'static Pass> = sequence("lean")?;
    passes.push(pass("keep_rows")?);
    drop_dead::sweep(model);
    apply(model, &passes, &Settings::default()).map(drop)
}

/// What follows the attention, in stages that begin before up blocks.
fn posts(model: &Model, splitting: &Splitting, sizes: &Sizes) -> Result<Vec<Part>, Refusal> {
    let view = View::of(model);
    let ends = up_blocks(&view);
    let levels = levels(&view, &ends, splitting, sizes)?;
    let groups: Vec<HashSet<NodeId>> = levels.iter().map(|level| ancestors(&view, ends[*level])).collect();
    let mut parts = cut_behind(&view, &groups, |index| format!("{POST_STAGE}{index}"))?;
    let single = |(part, level): (&Part, &usize)| part.model.graph.inputs == [ends[*level]];
    if !parts[1..].iter().zip(&levels).all(single) {
        return Err(whole(view.graph, TWICE));
    }
    for (index, level) in levels.iter().enumerate() {
        let channels = view.facts().dim(ends[*level], 1);
        // Named for where this size comes up first.
        let place = level.checked_sub(1).map_or("mid".to_owned(), |before| format!("up{before}"));
        let side = |axis, name: &str| named(view.facts().dim(ends[*level], axis), &format!("{place}_{name}"));
        let dims = vec![Dim::Fixed(1), channels, side(2, "height"), side(3, "width")];
        for part in &mut parts[index..=index + 1] {
            label(&mut part.model.graph, ends[*level], &format!("vae_up{level}_res"), dims.clone());
        }
    }
    Ok(parts)
}

/// What each up block but the last upsamples, with a convolution behind it.
fn up_blocks(view: &View<'_>) -> Vec<ValueId> {
    let larger = view.graph.nodes().filter(|(_, node)| node.is("Resize") || node.is("Upsample"));
    let end = |(_, node): (NodeId, &Node)| {
        let (small, mut value) = (node.input(0)?, node.output(0)?);
        loop {
            let (_, node) = view.sole_use(value)?;
            if node.is("Conv") {
                return (view.facts().rank(small)? == 4).then_some(small);
            }
            value = node.output(0)?;
        }
    };
    larger.filter_map(end).collect()
}

/// Up blocks that a stage ends with, counted from 0.
fn levels(
    view: &View<'_>,
    ends: &[ValueId],
    splitting: &Splitting,
    sizes: &Sizes,
) -> Result<Vec<usize>, Refusal> {
    let mut levels = Vec::new();
    for cut in &splitting.cuts {
        match cut.checked_sub(1).filter(|level| *level < ends.len()) {
            Some(level) => levels.push(level),
            None => {
                return Err(Refusal { place: format!("up block {cut}"), why: NO_LEVEL.into() });
            }
        }
    }
    levels.sort_unstable();
    levels.dedup();
    let Some(budget) = splitting.max_bytes.filter(|_| levels.is_empty()) else { return Ok(levels) };
    let count = ends.len().min(MAX_LEVELS);
    let mut choices: Vec<Vec<usize>> = (0..1usize << count)
        .map(|chosen| (0..count).filter(|level| chosen >> level & 1 == 1).collect())
        .collect();
    choices.sort_by_key(Vec::len);
    let shapes = infer(view.model, sizes, &Default::default());
    for levels in choices {
        if taken(view, ends, &levels, sizes, &shapes)? <= budget {
            return Ok(levels);
        }
    }
    Err(whole(view.graph, TOO_LARGE))
}

/// Bytes that WebGPU is predicted to take for the largest of the parts that these cuts give.
fn taken(
    view: &View<'_>,
    ends: &[ValueId],
    levels: &[usize],
    sizes: &Sizes,
    shapes: &Shapes,
) -> Result<u64, Refusal> {
    let groups: Vec<HashSet<NodeId>> = levels.iter().map(|level| ancestors(view, ends[*level])).collect();
    let device = DeviceProfile { provider: Provider::WebGpu, ..DeviceProfile::cpu(u64::MAX) };
    let mut most = 0;
    for part in cut_behind(view, &groups, |index| format!("{POST_STAGE}{index}"))? {
        let graph = &part.model.graph;
        let mut sizes = sizes.clone();
        for id in &graph.inputs {
            if let (Some(ValueType::Tensor { shape: Some(dims), .. }), Some(shape)) =
                (&graph[*id].ty, shapes.shape(*id))
            {
                let named = dims.iter().zip(shape).filter_map(|(dim, size)| match dim {
                    Dim::Symbol(name) => Some((name.clone(), size)),
                    _ => None,
                });
                sizes.extend(named);
            }
        }
        let (memory, _) = analyse(&part.model, &sizes, &device, PENDING_DISPATCHES);
        most = most.max(memory.predicted.device);
    }
    Ok(most)
}
