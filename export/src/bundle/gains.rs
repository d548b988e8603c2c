//! What a model whose graphs others exported would gain by being exported anew.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Bundle, BundleError, Stages};
use crate::{
    bytes::ByteSize,
    onnx::{DType, Graph, Links, Model, Node, NodeId, ValueId},
    shapes::{Shapes, Sizes, infer},
};

/// Something that a re-export does better.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gain {
    pub stage: String,
    /// What stands in the graph.
    pub found: String,
    /// What it costs, or what takes its place.
    pub gain: String,
}

/// One thing to look for: what is found, and what would be gained.
type Rule = fn(&Looked<'_>) -> Vec<(String, String)>;

const RULES: &[Rule] =
    &[slow_blocks, written_scores, nan_guards, runtime_shapes, embedding_tables, plain_weights];

/// Looks through all stages, at the sizes of the model's usual picture.
pub fn gains(bundle: &Bundle) -> Result<Vec<Gain>, BundleError> {
    let picture = bundle.usual().ok();
    let sizes = picture.and_then(|picture| bundle.sizes(&picture).ok()).unwrap_or_default();
    let place = picture.map_or(String::new(), |picture| format!(" at {}x{}", picture.width, picture.height));
    let mut found = Vec::new();
    for stage in bundle.stage_names() {
        let model = bundle.original(stage)?;
        let looked = Looked::at(&model, &sizes, &place);
        let of_stage = RULES.iter().flat_map(|rule| rule(&looked));
        found.extend(of_stage.map(|(found, gain)| Gain { stage: stage.to_owned(), found, gain }));
    }
    Ok(found)
}

/// A graph and what is known about it.
struct Looked<'a> {
    graph: &'a Graph,
    shapes: Shapes,
    links: Links,
    /// ` at 512x512`
    place: &'a str,
}

impl<'a> Looked<'a> {
    fn at(model: &'a Model, sizes: &Sizes, place: &'a str) -> Looked<'a> {
        let shapes = infer(model, sizes, &Default::default());
        Looked { graph: &model.graph, shapes, links: model.graph.links(), place }
    }

    fn of_type(&self, op_type: &str) -> impl Iterator<Item = (NodeId, &'a Node)> {
        self.graph.nodes().filter(move |(_, node)| node.op_type == op_type)
    }

    fn count(&self, op_type: &str) -> usize {
        self.of_type(op_type).count()
    }

    /// A constant's shape and bytes.
    fn constant(&self, id: Option<ValueId>) -> Option<(&[usize], DType, usize)> {
        let tensor = self.graph[id?].constant.as_ref()?;
        Some((&tensor.shape, tensor.dtype, tensor.bytes.len()))
    }
}

/// `1 node`, `2 nodes`
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Blocks that the fast kernels of MatMulNBits do not take. The conditions are those of the WebGPU provider's own choice of
/// kernels: blocks of whole 32s, accuracy level 4, K in whole 128s, N in whole 16s.
fn slow_blocks(looked: &Looked<'_>) -> Vec<(String, String)> {
    /// Bits, block, accuracy level.
    type Format = (i64, i64, i64);
    let mut formats: BTreeMap<Format, (usize, usize)> = BTreeMap::new();
    for (_, node) in looked.of_type("MatMulNBits") {
        let attribute = |name: &str, default| node.int(name).unwrap_or(default);
        let format = (attribute("bits", 4), attribute("block_size", 32), attribute("accuracy_level", 0));
        let fits = attribute("K", 0) % 128 == 0 && attribute("N", 0) % 16 == 0;
        let (count, fitting) = formats.entry(format).or_default();
        *count += 1;
        *fitting += usize::from(fits);
    }
    let slow = formats.into_iter().filter(|((_, block, accuracy), _)| block % 32 != 0 || *accuracy != 4);
    let told = slow.map(|((bits, block, accuracy), (count, fitting))| {
        let found = format!(
            "{} of {bits} bits, block {block}, accuracy_level {accuracy}",
            counted(count, "MatMulNBits node")
        );
        let reason = match block % 32 {
            0 => "accuracy_level 0 keeps them",
            _ => "the block keeps them",
        };
        let gain = format!(
            "{reason} from WebGPU's cooperative-matrix and DP4A kernels; with block 32 and accuracy_level 4, {fitting} of {count} reach them (K a multiple of 128, N of 16)"
        );
        (found, gain)
    });
    told.collect()
}

/// Attention whose scores are written to memory: MatMul, Softmax, MatMul.
fn written_scores(looked: &Looked<'_>) -> Vec<(String, String)> {
    let mut scores: BTreeMap<String, (usize, Option<u64>)> = BTreeMap::new();
    for (_, softmax) in looked.of_type("Softmax") {
        let (&[Some(input), ..], &[Some(output), ..]) = (&softmax.inputs[..], &softmax.outputs[..]) else {
            continue;
        };
        let multiplied = reaches(looked, output, 4);
        if !multiplied {
            continue;
        }
        let fact = looked.shapes.fact(input);
        let dtype = fact.dtype.map_or("unknown type".to_owned(), DType::name);
        let (count, largest) = scores.entry(dtype).or_default();
        *count += 1;
        *largest = (*largest).max(fact.bytes());
    }
    let told = scores.into_iter().map(|(dtype, (count, largest))| {
        let size = largest.map_or("of unknown size".to_owned(), |bytes| {
            format!("up to {} each{}", ByteSize(bytes), looked.place)
        });
        let found = format!("{} with scores written out in {dtype}, {size}", counted(count, "attention"));
        (found, "fused attention keeps no scores; where it cannot be used, they are computed in slices of 128 MiB".to_owned())
    });
    told.collect()
}

/// Whether a value reaches a matrix product within some nodes.
fn reaches(looked: &Looked<'_>, value: ValueId, within: usize) -> bool {
    looked.links.uses(value).iter().any(|user| {
        let node = &looked.graph[*user];
        let goes_on = matches!(node.op_type.as_str(), "Cast" | "Where" | "IsNaN" | "Identity" | "Dropout");
        let outputs = || node.outputs.iter().flatten();
        node.op_type == "MatMul"
            || within > 0 && goes_on && outputs().any(|id| reaches(looked, *id, within - 1))
    })
}

fn nan_guards(looked: &Looked<'_>) -> Vec<(String, String)> {
    match looked.count("IsNaN") {
        0 => Vec::new(),
        count => {
            let gain = "they guard against rows that are masked whole, which do not occur; where WebGPU has no kernel each costs a way to the CPU and back";
            vec![(counted(count, "IsNaN node"), gain.to_owned())]
        }
    }
}

fn runtime_shapes(looked: &Looked<'_>) -> Vec<(String, String)> {
    match looked.count("Shape") {
        0 => Vec::new(),
        count => {
            let gain = "sizes are computed on the CPU during the run; a re-export has them in the graph";
            vec![(counted(count, "Shape node"), gain.to_owned())]
        }
    }
}

/// Tables that rows are gathered from, of a size that matters.
fn embedding_tables(looked: &Looked<'_>) -> Vec<(String, String)> {
    const LARGE: usize = 1 << 20;
    let tables = looked.of_type("Gather").filter_map(|(_, node)| {
        let (shape, dtype, bytes) = looked.constant(node.inputs.first().copied().flatten())?;
        let (&[rows, width], true) = (shape, bytes >= LARGE) else { return None };
        let found =
            format!("an embedding table [{rows},{width}] {}, {}", dtype.name(), ByteSize(bytes as u64));
        Some((
            found,
            "a re-export reads the rows of a prompt on the host; the table never reaches the device"
                .to_owned(),
        ))
    });
    tables.collect()
}

/// Weights of matrix products that are not quantised.
fn plain_weights(looked: &Looked<'_>) -> Vec<(String, String)> {
    let mut formats: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    let products =
        looked.graph.nodes().filter(|(_, node)| matches!(node.op_type.as_str(), "MatMul" | "Gemm"));
    for (_, node) in products {
        let weight = node.inputs.get(1).copied().flatten();
        let weight =
            weight.map(|id| match looked.links.producer(id).map(|producer| &looked.graph[producer]) {
                Some(transpose) if transpose.op_type == "Transpose" => {
                    transpose.inputs.first().copied().flatten().unwrap_or(id)
                }
                _ => id,
            });
        if let Some(([_, _], dtype @ (DType::F32 | DType::F16 | DType::BF16), bytes)) =
            looked.constant(weight)
        {
            let (count, sum) = formats.entry(dtype.name()).or_default();
            *count += 1;
            *sum += bytes as u64;
        }
    }
    let told = formats.into_iter().map(|(dtype, (count, bytes))| {
        let found = format!("{} in {dtype}, {}", counted(count, "matrix weight"), ByteSize(bytes));
        let parts = if dtype == "f32" { ("27 %", "14 %") } else { ("53 %", "29 %") };
        (found, format!("q8 stores them in {} of that, q4 in {}", parts.0, parts.1))
    });
    told.collect()
}
