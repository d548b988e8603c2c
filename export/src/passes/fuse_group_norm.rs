//! Group norm in the form that runs on every provider and needs no Shape.
//!
//! Before: Reshape(x, [0, groups, -1]) -> InstanceNormalization -> Reshape to Shape(x) -> Mul -> Add, as torch exports it;
//! or com.microsoft GroupNorm, for which no provider has a kernel.
//! After: Reshape [0, groups, -1, 0] -> InstanceNormalization -> Reshape [0, channels, -1, 0]: the width keeps its place,
//! so that neither shape has to know the picture's size. In f16 graphs the statistics are f32, between two Casts.
//!
//! Refused: a number of channels that is not constant, values of other ranks than 3 and 4.

use super::{Outcome, Pass, PassError, Replacement, Settings, View};
use crate::onnx::{Attribute, DType, Model, Node, NodeId, ValueId};

/// More groups than any model has; each takes a number in two constants.
const MAX_GROUPS: i64 = 1 << 16;

pub const PASS: Pass = Pass {
    name: "fuse_group_norm",
    what: "InstanceNormalization between Reshapes to Shape(x), com.microsoft GroupNorm -> the form without Shape, in f32",
    why: "the Shape runs on the CPU, GroupNorm runs nowhere, and f16 statistics are wrong",
    run,
};

struct GroupNorm {
    root: NodeId,
    x: ValueId,
    output: ValueId,
    rank: usize,
    channels: i64,
    groups: i64,
    epsilon: f32,
    dtype: DType,
    kind: Kind,
}

enum Kind {
    /// With the operands of the InstanceNormalization.
    Instance { scale: ValueId, bias: ValueId },
    /// With the operands of the GroupNorm.
    Contrib { weight: ValueId, bias: ValueId, channels_last: bool, silu: bool },
}

fn run(model: &mut Model, _: &Settings) -> Result<Outcome, PassError> {
    let mut outcome = Outcome::default();
    let view = View::of(model);
    let instance = view.nodes("InstanceNormalization").filter_map(|(id, node)| instance(&view, id, node));
    let contrib = view.graph.nodes().filter(|(_, node)| node.is_contrib("GroupNorm"));
    let contrib = contrib.filter_map(|(id, node)| self::contrib(&view, id, node));
    let mut found = Vec::new();
    for norm in instance.chain(contrib) {
        match norm {
            Ok(norm) => found.push(norm),
            Err((place, why)) => outcome.refuse(place, why),
        }
    }
    for norm in &found {
        norm.write(Replacement::of(&mut model.graph, norm.root));
        outcome.applied += 1;
    }
    Ok(outcome)
}

type Found = Result<GroupNorm, (String, &'static str)>;

fn instance(view: &View<'_>, id: NodeId, node: &Node) -> Option<Found> {
    let facts = view.facts();
    let (grouped, normed) = (node.input(0)?, node.output(0)?);
    let (_, split) = view.made_by(grouped, "Reshape")?;
    let (root, join) = view.sole_use(normed).filter(|(_, user)| user.is("Reshape"))?;
    let (x, output) = (split.input(0)?, join.output(0)?);
    let dtype = facts.dtype(x).filter(|dtype| matches!(dtype, DType::F32 | DType::F16))?;
    let settled = dtype == DType::F32 && view.ints(join.input(1)?).is_some();
    let same = facts.same_shape(x, output) && facts.sizes(x, 0) == facts.sizes(grouped, 0);
    if settled || !same {
        return None;
    }
    let groups = i64::try_from(facts.fixed_dim(grouped, 1)?).ok()?;
    let (channels, rank) = match checked(view, id, x, 1, groups) {
        Ok(sizes) => sizes,
        Err(refusal) => return Some(Err(refusal)),
    };
    let kind = Kind::Instance { scale: node.input(1)?, bias: node.input(2)? };
    let epsilon = node.float("epsilon").unwrap_or(1e-5);
    Some(Ok(GroupNorm { root, x, output, rank, channels, groups, epsilon, dtype, kind }))
}

fn contrib(view: &View<'_>, root: NodeId, node: &Node) -> Option<Found> {
    let (x, weight, bias) = (node.input(0)?, node.input(1)?, node.input(2)?);
    let output = node.output(0)?;
    let dtype = view.facts().dtype(x).filter(|dtype| matches!(dtype, DType::F32 | DType::F16))?;
    let channels_last = node.int("channels_last").unwrap_or(1) != 0;
    let groups = node.int("groups")?;
    let axis = if channels_last { -1 } else { 1 };
    let (channels, rank) = match checked(view, root, x, axis, groups) {
        Ok((channels, 4)) => (channels, 4),
        Ok(_) => return Some(Err((view.graph.place(root), "its rank is not 3 or 4"))),
        Err(refusal) => return Some(Err(refusal)),
    };
    let silu = node.int("activation").unwrap_or(0) == 1;
    let kind = Kind::Contrib { weight, bias, channels_last, silu };
    let epsilon = node.float("epsilon").unwrap_or(1e-5);
    Some(Ok(GroupNorm { root, x, output, rank, channels, groups, epsilon, dtype, kind }))
}

/// Channels and rank, if a group norm can be written for them.
fn checked(
    view: &View<'_>,
    id: NodeId,
    x: ValueId,
    axis: i64,
    groups: i64,
) -> Result<(i64, usize), (String, &'static str)> {
    let refuse = |why| Err((view.graph.place(id), why));
    let Some(rank @ (3 | 4)) = view.facts().rank(x) else { return refuse("its rank is not 3 or 4") };
    let channels = view.facts().fixed_dim(x, axis).and_then(|channels| i64::try_from(channels).ok());
    match channels {
        Some(channels) if (1..=MAX_GROUPS).contains(&groups) && channels > 0 && channels % groups == 0 => {
            Ok((channels, rank))
        }
        _ => refuse("the channels are not a constant multiple of the groups"),
    }
}

impl GroupNorm {
    fn write(&self, mut new: Replacement<'_>) {
        match self.kind {
            Kind::Instance { scale, bias } => {
                let x = to_f32(&mut new, self.x, self.dtype);
                let scale = to_f32(&mut new, scale, self.dtype);
                let bias = to_f32(&mut new, bias, self.dtype);
                let narrow = (self.dtype != DType::F32).then_some(self.output);
                let y = self.normalise(&mut new, x, scale, bias, narrow.is_none().then_some(self.output));
                if let Some(output) = narrow {
                    new.cast_into(y, self.dtype, output);
                }
            }
            Kind::Contrib { weight, bias, channels_last, silu } => {
                self.write_contrib(&mut new, [weight, bias], channels_last, silu);
            }
        }
        new.finish();
    }

    fn write_contrib(
        &self,
        new: &mut Replacement<'_>,
        affine: [ValueId; 2],
        channels_last: bool,
        silu: bool,
    ) {
        let perm = |axes: [i64; 4]| [("perm", Attribute::Ints(axes.to_vec()))];
        let x = if channels_last { new.op("Transpose", &[self.x], &perm([0, 3, 1, 2])) } else { self.x };
        let x = to_f32(new, x, self.dtype);
        let groups = usize::try_from(self.groups).unwrap_or(0);
        let ones = new.constant(super::fuse_rms_norm::row_of(DType::F32, groups, 1.0));
        let zeros = new.constant(super::fuse_rms_norm::row_of(DType::F32, groups, 0.0));
        let y = self.normalise(new, x, ones, zeros, None);
        let column = new.ints(&[self.channels, 1, 1]);
        let [weight, bias] = affine.map(|row| {
            // The operator takes weights of either type.
            let row = new.cast(row, DType::F32);
            new.op("Reshape", &[row, column], &[])
        });
        let y = new.op("Mul", &[y, weight], &[]);
        let mut y = new.op("Add", &[y, bias], &[]);
        if silu {
            let gate = new.op("Sigmoid", &[y], &[]);
            y = new.op("Mul", &[y, gate], &[]);
        }
        let y = new.cast(y, self.dtype);
        match channels_last {
            true => new.op_into("Transpose", &[y], &perm([0, 2, 3, 1]), self.output),
            false => new.op_into("Identity", &[y], &[], self.output),
        }
    }

    /// The f32 `x` normalised group by group, as the given value or a new one.
    fn normalise(
        &self,
        new: &mut Replacement<'_>,
        x: ValueId,
        scale: ValueId,
        bias: ValueId,
        output: Option<ValueId>,
    ) -> ValueId {
        let shape = |new: &mut Replacement<'_>, axis| {
            let shape = [0, axis, -1, 0];
            new.ints(&shape[..self.rank.min(4)])
        };
        let to_groups = shape(new, self.groups);
        let to_channels = shape(new, self.channels);
        let grouped = new.op("Reshape", &[x, to_groups], &[]);
        let epsilon = [("epsilon", Attribute::Float(self.epsilon))];
        let normed = new.op("InstanceNormalization", &[grouped, scale, bias], &epsilon);
        match output {
            Some(output) => {
                new.op_into("Reshape", &[normed, to_channels], &[], output);
                output
            }
            None => new.op("Reshape", &[normed, to_channels], &[]),
        }
    }
}

fn to_f32(new: &mut Replacement<'_>, value: ValueId, dtype: DType) -> ValueId {
    match dtype {
        DType::F32 => value,
        _ => new.cast(value, DType::F32),
    }
}
