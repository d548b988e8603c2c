//! The image decoder: stages that the host drives one after the other, its middle attention a chunk of rows at a time.

use viaduct_export::{arch::parameters::ChunkedAttention, shapes::Sizes};

use super::{
    Opened, PipelineError, TextToImage, misshapen, shaped,
    strips::{Strip, Strips, rows_of, stacked},
};
use crate::{
    pipeline::{
        image::{check_finite, check_varied},
        noise::unpack_latents,
        run::Run,
        size::Size,
    },
    runtime::{Placement, Tensor},
    tensor::{HostTensor, Values},
};

/// The stage of the attention, which runs once per chunk of query rows.
pub const ATTENTION: &str = "vae_attention";
/// Outputs of the first stage that the attention takes.
const ATTENTION_INPUTS: [&str; 3] = ["q", "kt", "v"];

/// The picture half decoded: what the decoder's remaining stages need.
pub(super) struct Decoding {
    /// How many of the stages after the middle block are done.
    done: usize,
    /// [1,C,h,w]; what the next stage calls it is the name of the last stage's output.
    x: Tensor,
    /// The attention's result [1,h,w,C], until the first stage has added it.
    attended: Option<HostTensor>,
}

impl TextToImage<'_> {
    /// The decoder's stages after the middle block: to the picture [1, 3 or 4, H, W] in -1..1.
    pub(super) fn decode(
        &self,
        decoding: Decoding,
        (size, sizes): (Size, &Sizes),
        run: &mut Run<'_>,
    ) -> Result<HostTensor, PipelineError> {
        let Decoding { done, mut x, mut attended } = decoding;
        let stages = self.family.post_stages();
        let mut input = match done {
            0 => self.family.decoder().first[1].to_owned(),
            _ => self.output_of(stages[done - 1])?,
        };
        for (index, name) in stages.iter().enumerate().skip(done) {
            let is_last = index + 1 == stages.len();
            let placement = if is_last { Placement::Host } else { run.between_stages() };
            let mut stage = self.stage(name, sizes, run.executor, run.plan, &mut run.watch)?;
            let exposed = stage.exposed();
            let output = stage.session.outputs().into_iter().next().unwrap_or_default();
            let strips = self.family.strips(name, sizes);
            let is_cut = |strips: &Strips| matches!(x.shape(), [1, _, height, _] if strips.rows < *height);
            let drawn = match strips.filter(is_cut) {
                Some(strips) => {
                    Tensor::Host(in_strips(&mut stage, strips, (&input, &x.into_host()?), &output)?)
                }
                None => {
                    let mut inputs = vec![(input.as_str(), x.view())];
                    inputs.extend(attended.as_ref().map(|attended| ("attn", attended.into())));
                    stage.run_and_probe(&inputs, (&output, placement), &exposed, &mut run.watch)?
                }
            };
            stage.close(run.plan, &mut run.watch)?;
            x = match drawn {
                Tensor::Host(drawn) => {
                    check_finite(name, None, &drawn)?;
                    if !is_last {
                        run.keep(&[(*name, &drawn)], &[]);
                    }
                    Tensor::Host(run.watch.boundary(&output, drawn))
                }
                // Not looked at. What is not finite reaches the picture, which is checked: every norm on the way spreads it
                // over a group as NaN, and nothing makes a number of NaN again.
                unseen => unseen,
            };
            attended = None;
            input = output;
        }
        let x = x.into_host()?;
        if x.shape.get(2..) != Some(&[size.height(), size.width()]) {
            return Err(PipelineError::Picture { found: x.shape, size });
        }
        let x = x.widened();
        check_varied("vae", None, &x)?;
        if let Some(last) = stages.last() {
            run.keep(&[(*last, &x)], &[]);
        }
        Ok(x)
    }

    /// The name that the manifest gives a stage's output, which is the next one's input.
    fn output_of(&self, stage: &str) -> Result<String, PipelineError> {
        let outputs = &self.bundle.stage(stage)?.outputs;
        Ok(outputs.first().map(|port| port.name.clone()).unwrap_or_default())
    }

    /// The furthest state of the decoder that an earlier attempt kept.
    pub(super) fn kept_decoding(
        &self,
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<Option<Decoding>, PipelineError> {
        for (index, name) in self.family.post_stages().iter().enumerate().rev() {
            if let Some(x) = run.kept(name) {
                run.resume((*name).to_owned());
                return Ok(Some(Decoding { done: index + 1, x: Tensor::Host(x), attended: None }));
            }
        }
        let chain = self.family.decoder();
        let [first, state] = chain.first;
        let Some(x) = run.kept(state).map(Tensor::Host) else { return Ok(None) };
        let Some(attention) = chain.attention else {
            run.resume(first.to_owned());
            return Ok(Some(Decoding { done: 0, x, attended: None }));
        };
        if let Some(attended) = run.kept(ATTENTION) {
            run.resume(ATTENTION.to_owned());
            return Ok(Some(Decoding { done: 0, x, attended: Some(attended) }));
        }
        let [Some(q), Some(kt), Some(v)] = ATTENTION_INPUTS.map(|name| run.kept(name)) else {
            return Ok(None);
        };
        run.resume(first.to_owned());
        let attended = self.attend([q, kt, v], attention, sizes, run)?;
        Ok(Some(Decoding { done: 0, x, attended: Some(attended) }))
    }

    /// Everything before the first up block, from latents [1, tokens, channels]; the whole decoder where it is one stage.
    pub(super) fn decode_middle(
        &self,
        latents: &HostTensor,
        (size, sizes): (Size, &Sizes),
        run: &mut Run<'_>,
    ) -> Result<Decoding, PipelineError> {
        let [rows, columns] = size.grid();
        let latents = unpack_latents(latents, rows, columns)?;
        let chain = self.family.decoder();
        let [first, state] = chain.first;
        // Without stages behind it this one draws the picture.
        let is_last = self.family.post_stages().is_empty();
        let placement = if is_last { Placement::Host } else { run.between_stages() };
        let mut stage = self.stage(first, sizes, run.executor, run.plan, &mut run.watch)?;
        let exposed = stage.exposed();
        let mut outputs = vec![(state, placement)];
        if chain.attention.is_some() {
            outputs.extend(ATTENTION_INPUTS.map(|name| (name, Placement::Host)));
        }
        let own = outputs.len();
        outputs.extend(exposed.iter().map(|name| (name.as_str(), Placement::Host)));
        let mut tensors = stage.run_placed(&[("latents", (&latents).into())], &outputs)?;
        stage.close(run.plan, &mut run.watch)?;
        for (name, tensor) in exposed.iter().zip(tensors.split_off(own)) {
            run.watch.probe.shown(name, tensor.into_host()?);
        }
        let x = match tensors.remove(0) {
            Tensor::Host(x) => Tensor::Host(run.watch.boundary(state, x)),
            unseen => unseen,
        };
        let tensors = tensors.into_iter().map(Tensor::into_host).collect::<Result<Vec<_>, _>>()?;
        let mut kept: Vec<_> = ATTENTION_INPUTS.into_iter().zip(&tensors).collect();
        if let Tensor::Host(x) = &x {
            kept.insert(0, (state, x));
        }
        for (_, tensor) in &kept {
            check_finite(first, None, tensor)?;
        }
        run.keep(&kept, &[]);
        let attended = match (chain.attention, <[HostTensor; 3]>::try_from(tensors)) {
            (Some(attention), Ok(inputs)) => Some(self.attend(inputs, attention, sizes, run)?),
            _ => None,
        };
        Ok(Decoding { done: 0, x, attended })
    }

    /// The middle block's attention, a chunk of query rows at a time. `q` and `v` are [.., C], `kt` [.., C, ..]; all axes but
    /// C's are pixels, or 1. The result has q's shape.
    fn attend(
        &self,
        [q, kt, v]: [HostTensor; 3],
        attention: ChunkedAttention,
        sizes: &Sizes,
        run: &mut Run<'_>,
    ) -> Result<HostTensor, PipelineError> {
        let [first, state] = self.family.decoder().first;
        let shape = q.shape.clone();
        let (Some(&channels), false) = (shape.last(), shape.contains(&0)) else {
            return Err(misshapen(first, "q", "[1, height, width, channels]".to_owned(), &q));
        };
        let rows = shape.iter().product::<usize>() / channels;
        let is_transposed =
            kt.shape.iter().find(|size| **size != 1).is_none_or(|size| *size == channels || channels == 1);
        if !is_transposed || kt.shape.iter().product::<usize>() != channels * rows {
            return Err(misshapen(first, "kt", format!("[1, {channels}, {rows}]"), &kt));
        }
        let v = shaped(first, "v", v, &shape)?;
        let mut stage = self.stage(ATTENTION, sizes, run.executor, run.plan, &mut run.watch)?;
        let rank = stage.input("q_chunk").map_or(3, |port| port.dims.len()).max(2);
        let matrix = |rows, columns| [vec![1; rank - 2], vec![rows, columns]].concat();
        stage.bind("kt", &kt.reshaped(&matrix(channels, rows)))?;
        stage.bind("v", &v.reshaped(&matrix(rows, channels)))?;
        let chunk = match sizes.get("chunk_rows") {
            Some(planned) if !attention.fixed => *planned,
            _ => attention.rows,
        };
        let mut attended = Vec::with_capacity(q.values.len());
        for first in (0..rows).step_by(chunk.max(1)) {
            let own = chunk.min(rows - first) * channels;
            let mut part = q.values.slice(first * channels..first * channels + own);
            if attention.fixed || attention.q_factor != 1.0 {
                part = Values::F32(prepared(&part, &attention, chunk * channels).into());
            }
            let part = HostTensor::new(&matrix(part.len() / channels, channels), part);
            let result = stage.run(&[("q_chunk", &part)], &["attn_chunk"])?.remove(0);
            let result = shaped(ATTENTION, "attn_chunk", result, &part.shape)?;
            attended.extend_from_slice(&result.to_f32()[..own]);
        }
        stage.close(run.plan, &mut run.watch)?;
        let attended = HostTensor::f32(&shape, attended);
        check_finite(ATTENTION, None, &attended)?;
        run.keep(&[(ATTENTION, &attended)], &[state]);
        Ok(attended)
    }
}

/// Runs a stage on one strip of its input [1, C, H, W] after the other, and lays what is right of the results below each
/// other.
fn in_strips(
    stage: &mut Opened<'_>,
    strips: Strips,
    (input, x): (&str, &HostTensor),
    output: &str,
) -> Result<HostTensor, PipelineError> {
    let mut parts: Vec<HostTensor> = Vec::new();
    for Strip { taken, right } in strips.cover(x.shape[2]) {
        let part = stage.run(&[(input, &rows_of(x, &taken))], &[output])?.remove(0);
        let rows = taken.len() * strips.growth;
        let [channels, width] = match parts.first() {
            Some(first) => [1, 3].map(|axis| Some(first.shape[axis])),
            None => [None; 2],
        };
        let fits = |size: usize, known: Option<usize>| known.is_none_or(|known| known == size);
        match part.shape[..] {
            [1, c, h, w] if h == rows && fits(c, channels) && fits(w, width) => {}
            _ => return Err(misshapen(&stage.described.name, output, format!("[1, C, {rows}, W]"), &part)),
        }
        parts.push(rows_of(&part, &right));
    }
    Ok(stacked(parts))
}

/// Query rows as a graph of others takes them: scaled by what it leaves to the host, and filled up with zeros where its
/// chunks have a fixed number of rows.
fn prepared(part: &Values, attention: &ChunkedAttention, full: usize) -> Vec<f32> {
    let mut rows: Vec<f32> = (0..part.len()).map(|index| part.f32_at(index) * attention.q_factor).collect();
    if attention.fixed {
        rows.resize(full, 0.0);
    }
    rows
}
