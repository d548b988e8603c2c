//! Real files, changed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use proptest::prelude::*;
use prost::Message;
use viaduct_export::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto,
    attribute_proto::AttributeType,
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};

use crate::properties::{Depth, Trial};

/// Files larger than this take too long for what they tell.
const MAX_FILE: u64 = 140_000;

/// The project's own fixtures, and what `VIADUCT_SHARED` has.
pub struct Corpus {
    /// Small files first.
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl Corpus {
    pub fn load() -> Corpus {
        let mut paths = Vec::new();
        find(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures"), &mut paths);
        if let Some(shared) = std::env::var_os("VIADUCT_SHARED") {
            find(&Path::new(&shared).join("oracles/onnx-tiny"), &mut paths);
        }
        paths.sort();
        let mut files: Vec<(PathBuf, Vec<u8>)> =
            paths.into_iter().map(|path| (path.clone(), fs::read(path).expect("a fixture"))).collect();
        files.sort_by_key(|(_, bytes)| bytes.len());
        assert!(files.len() > 50, "{} fixtures", files.len());
        Corpus { files }
    }
}

fn find(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, size) = (entry.path(), entry.metadata().map_or(0, |data| data.len()));
        if path.is_dir() {
            find(&path, found);
        } else if path.extension().is_some_and(|end| end == "onnx") && size <= MAX_FILE {
            found.push(path);
        }
    }
}

/// One change of a model.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    SwapOperands,
    Rewire,
    MoreOutputs,
    OtherInt,
    SwapInts,
    OtherConstant,
    Twin,
    OtherFloat,
    DropOperand,
    OnEdge,
    OpenDimension,
    DefaultInput,
    ForgetTypes,
    DropNode,
    OtherOperator,
    OtherDomain,
    DropAttribute,
    ExtremeInt,
    OtherShape,
    OtherType,
    Rename,
    OtherOpset,
    SwapNodes,
    DropOutput,
    ExtremeConstant,
    Repeat,
    OutputTwice,
    Bytes,
}

use Change::*;

impl Change {
    pub const GENTLE: &[Change] = &[
        SwapOperands,
        Rewire,
        MoreOutputs,
        MoreOutputs,
        OtherInt,
        SwapInts,
        OtherConstant,
        Twin,
        OtherFloat,
        DropOperand,
        OnEdge,
        OpenDimension,
        DefaultInput,
        ForgetTypes,
    ];
    pub const ALL: &[Change] = &[
        SwapOperands,
        Rewire,
        MoreOutputs,
        OtherInt,
        SwapInts,
        OtherConstant,
        Twin,
        OtherFloat,
        DropOperand,
        OnEdge,
        OpenDimension,
        DefaultInput,
        ForgetTypes,
        DropNode,
        OtherOperator,
        OtherDomain,
        DropAttribute,
        ExtremeInt,
        OtherShape,
        OtherType,
        Rename,
        OtherOpset,
        SwapNodes,
        DropOutput,
        ExtremeConstant,
        Repeat,
        OutputTwice,
        Bytes,
    ];

    fn is_gentle(self) -> bool {
        (self as usize) < DropNode as usize
    }
}

#[derive(Clone, Debug)]
pub struct Recipe {
    file: u32,
    changes: Vec<(Change, [u16; 3])>,
}

pub fn recipe(of: &'static [Change]) -> impl Strategy<Value = Recipe> {
    let change = (proptest::sample::select(of), proptest::array::uniform3(any::<u16>()));
    (any::<u32>(), proptest::collection::vec(change, 0..5))
        .prop_map(|(file, changes)| Recipe { file, changes })
}

impl Recipe {
    pub fn trial(&self, corpus: &Corpus) -> Trial {
        // Small files most of the time: they are quick.
        let count =
            if self.file.is_multiple_of(16) { corpus.files.len() } else { corpus.files.len() * 9 / 10 };
        let (_, original) = &corpus.files[self.file as usize / 16 % count];
        let mut model = ModelProto::decode(original.as_slice()).expect("a model");
        for (change, numbers) in &self.changes {
            let numbers = numbers.map(usize::from);
            apply(*change, &mut model, numbers);
        }
        let mut bytes = model.encode_to_vec();
        for (change, numbers) in &self.changes {
            if matches!(change, Bytes) {
                damage(&mut bytes, numbers.map(usize::from));
            }
        }
        let gentle = self.changes.iter().all(|(change, _)| change.is_gentle());
        let names = open_dimensions(&model);
        let sizes = [[8, 8, 8], [5, 3, 7], [1, 2, 1]]
            .map(|row| names.iter().enumerate().map(|(i, name)| (name.clone(), row[i % 3])).collect());
        Trial { bytes, sizes: sizes.to_vec(), depth: if gentle { Depth::Numbers } else { Depth::Structure } }
    }
}

fn open_dimensions(model: &ModelProto) -> Vec<String> {
    let inputs = model.graph.iter().flat_map(|graph| &graph.input);
    let mut names: Vec<String> = inputs
        .filter_map(|input| match input.r#type.as_ref()?.value.as_ref()? {
            type_proto::Value::TensorType(tensor) => tensor.shape.as_ref(),
            _ => None,
        })
        .flat_map(|shape| &shape.dim)
        .filter_map(|dim| match &dim.value {
            Some(dimension::Value::DimParam(name)) => Some(name.clone()),
            _ => None,
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

fn damage(bytes: &mut Vec<u8>, [a, b, c]: [usize; 3]) {
    let at = (a << 8 | b >> 8) % bytes.len().max(1);
    match c % 4 {
        0 => bytes.truncate(at),
        1 => bytes.iter_mut().skip(at).take(1 + b % 8).for_each(|byte| *byte = (c >> 4) as u8),
        2 => bytes.insert(at, (c >> 4) as u8),
        _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << (b % 8)),
    }
}

fn nth<T>(list: &mut [T], at: usize) -> Option<&mut T> {
    let count = list.len();
    list.get_mut(at % count.max(1))
}

fn apply(change: Change, model: &mut ModelProto, [a, b, c]: [usize; 3]) -> Option<()> {
    if let OtherOpset = change {
        nth(&mut model.opset_import, a)?.version = Some([1, 11, 13, 17, 18, 21, 23, i64::MAX, -1, 0][b % 10]);
        return Some(());
    }
    let graph = model.graph.as_mut()?;
    match change {
        SwapOperands => {
            let node = nth(&mut graph.node, a)?;
            let count = node.input.len().max(1);
            (node.input.len() > 1).then(|| node.input.swap(b % count, c % count))?;
        }
        Rewire => {
            let at = a % graph.node.len().max(1);
            let names = earlier(graph, at);
            *nth(&mut graph.node.get_mut(at)?.input, b)? = names.get(c % names.len().max(1))?.clone();
        }
        MoreOutputs => {
            let name = nth(&mut nth(&mut graph.node, a)?.output, b)?.clone();
            if !name.is_empty() && graph.output.iter().all(|output| output.name() != name) {
                let known = graph.value_info.iter().find(|info| info.name() == name).cloned();
                let fresh = || ValueInfoProto { name: Some(name.clone()), ..ValueInfoProto::default() };
                graph.output.push(known.unwrap_or_else(fresh));
            }
        }
        OtherInt => {
            let attribute = nth(&mut nth(&mut graph.node, a)?.attribute, b)?;
            let by = [1, -1, 2, -2][c % 4];
            if let Some(i) = &mut attribute.i {
                *i = i.wrapping_add(by);
            } else if let Some(i) = nth(&mut attribute.ints, c / 4) {
                *i = i.wrapping_add(by);
            }
        }
        SwapInts => {
            let ints = &mut nth(&mut nth(&mut graph.node, a)?.attribute, b)?.ints;
            let count = ints.len().max(1);
            (ints.len() > 1).then(|| ints.swap(c % count, c / count % count))?;
        }
        OtherConstant => other_constant(nth(&mut graph.initializer, a)?, b, c, &[1, -1, 2]),
        ExtremeConstant => {
            other_constant(nth(&mut graph.initializer, a)?, b, c, &[i64::MAX, i64::MIN, 1 << 40])
        }
        Twin => {
            let at = a % graph.node.len().max(1);
            let mut twin = graph.node.get(at)?.clone();
            let name = twin.output.first()?.clone();
            let mut renamed = Vec::new();
            for output in twin.output.iter_mut().filter(|output| !output.is_empty()) {
                *output = format!("{output}.twin{b}");
                renamed.push(output.clone());
            }
            twin.name = Some(format!("twin{b}"));
            let user = graph.node.iter_mut().skip(at + 1 + c % 3).find(|node| node.input.contains(&name));
            if let Some(input) = user.and_then(|user| user.input.iter_mut().find(|input| **input == name)) {
                input.clone_from(renamed.first()?);
            }
            graph.node.insert(at + 1, twin);
        }
        OtherFloat => {
            let attributes = graph.node.iter_mut().flat_map(|node| &mut node.attribute);
            let mut floats: Vec<&mut AttributeProto> =
                attributes.filter(|attribute| attribute.f.is_some()).collect();
            let attribute = nth(&mut floats, a)?;
            attribute.f = attribute.f.map(|f| [f * 2.0, f + 1.0, 0.5, 1e-3][b % 4]);
        }
        DropOperand => {
            let node = nth(&mut graph.node, a)?;
            if b % 2 == 0 {
                node.input.pop();
            } else {
                nth(&mut node.input, c)?.clear();
            }
            // ONNX Runtime dies of a LayerNormalization whose last operand is an empty name.
            while node.input.last().is_some_and(String::is_empty) {
                node.input.pop();
            }
        }
        OnEdge => {
            let at = a % graph.node.len().max(1);
            let input = nth(&mut graph.node.get_mut(at)?.input, b)?;
            let old = std::mem::replace(input, format!("edge{a}_{b}"));
            let new = input.clone();
            let op_type = ["Identity", "Neg", "Abs", "Identity"][c % 4];
            graph.node.insert(
                at,
                NodeProto {
                    input: vec![old],
                    output: vec![new],
                    op_type: Some(op_type.to_owned()),
                    ..NodeProto::default()
                },
            );
        }
        OpenDimension => {
            let dim = nth(dims(nth(&mut graph.input, a)?)?, b)?;
            dim.value = Some(match c % 4 {
                0 => dimension::Value::DimParam("open".to_owned()),
                1 => dimension::Value::DimParam("wide".to_owned()),
                _ => dimension::Value::DimValue([1, 2, 5, 8][c / 4 % 4]),
            });
        }
        DefaultInput => {
            let tensor = nth(&mut graph.initializer, a)?;
            let dim = |size: &i64| Dimension {
                value: Some(dimension::Value::DimValue(*size)),
                ..Dimension::default()
            };
            let shape =
                viaduct_export::onnx::proto::TensorShapeProto { dim: tensor.dims.iter().map(dim).collect() };
            let value = type_proto::Tensor { elem_type: tensor.data_type, shape: Some(shape) };
            let ty = viaduct_export::onnx::proto::TypeProto {
                value: Some(type_proto::Value::TensorType(value)),
                ..Default::default()
            };
            let name = tensor.name.clone();
            if graph.input.iter().all(|input| input.name != name) {
                graph.input.push(ValueInfoProto { name, r#type: Some(ty), ..ValueInfoProto::default() });
            }
        }
        ForgetTypes => graph.value_info.clear(),
        DropNode => drop((!graph.node.is_empty()).then(|| graph.node.remove(a % graph.node.len()))),
        OtherOperator => {
            let other = nth(&mut graph.node, b)?.op_type.clone();
            let more =
                ["Split", "Concat", "Slice", "Pad", "Conv", "Softmax", "MatMul", "Reshape", "If", "Resize"];
            nth(&mut graph.node, a)?.op_type =
                if c % 2 == 0 { other } else { Some(more[c / 2 % 10].to_owned()) };
        }
        OtherDomain => {
            nth(&mut graph.node, a)?.domain = Some(["com.microsoft", "ai.onnx", "x", ""][b % 4].to_owned())
        }
        DropAttribute => {
            let attributes = &mut nth(&mut graph.node, a)?.attribute;
            (!attributes.is_empty()).then(|| attributes.remove(b % attributes.len()))?;
        }
        ExtremeInt => {
            let attribute = nth(&mut nth(&mut graph.node, a)?.attribute, b)?;
            let extreme = [i64::MAX, i64::MIN, -1, 0, 1 << 40, 65][c % 6];
            if attribute.i.is_some() || attribute.ints.is_empty() {
                attribute.i = Some(extreme);
                attribute.r#type = Some(AttributeType::Int as i32);
            } else if c % 7 == 0 {
                attribute.ints.clear();
            } else {
                *nth(&mut attribute.ints, c / 6)? = extreme;
            }
        }
        OtherShape => {
            let sizes: &[i64] =
                [&[][..], &[0], &[1 << 40, 1 << 40], &[-1], &[1, 1, 1, 1, 1, 1, 1], &[i64::MAX]][c % 6];
            if b % 2 == 0 {
                nth(&mut graph.initializer, a)?.dims = sizes.to_vec();
            } else {
                let all: Vec<&mut ValueInfoProto> =
                    graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info).collect();
                let mut all = all;
                let dim = |size: &i64| Dimension {
                    value: Some(dimension::Value::DimValue(*size)),
                    ..Dimension::default()
                };
                *dims(nth(&mut all, a)?)? = sizes.iter().map(dim).collect();
            }
        }
        OtherType => {
            let mut all: Vec<&mut ValueInfoProto> =
                graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info).collect();
            if let Some(type_proto::Value::TensorType(tensor)) =
                nth(&mut all, a)?.r#type.as_mut()?.value.as_mut()
            {
                tensor.elem_type = Some([1, 7, 10, 9, 8, 0, 99][b % 7]);
            }
        }
        Rename => {
            let node = nth(&mut graph.node, a)?;
            let name = [String::new(), "x".to_owned(), "open".to_owned()][c % 3].clone();
            *nth(if b % 2 == 0 { &mut node.input } else { &mut node.output }, b / 2)? = name;
        }
        SwapNodes => {
            let count = graph.node.len();
            (count > 1).then(|| graph.node.swap(a % count, b % count))?;
        }
        DropOutput => {
            let node = nth(&mut graph.node, a)?;
            if b % 2 == 0 { drop(node.output.pop()) } else { node.output.push(format!("more{b}")) }
        }
        Repeat => {
            let node = nth(&mut graph.node, a)?;
            let input = nth(&mut node.input, b)?.clone();
            node.input.extend(vec![input; c % 20]);
        }
        OutputTwice => {
            let output = nth(&mut graph.output, a)?.clone();
            graph.output.push(output);
        }
        OtherOpset | Bytes => {}
    }
    Some(())
}

/// Names that are defined before a node.
fn earlier(graph: &GraphProto, at: usize) -> Vec<String> {
    let inputs = graph.input.iter().map(|input| input.name().to_owned());
    let constants = graph.initializer.iter().map(|tensor| tensor.name().to_owned());
    let outputs = graph.node.iter().take(at).flat_map(|node| node.output.clone());
    inputs.chain(constants).chain(outputs).filter(|name| !name.is_empty()).collect()
}

fn dims(info: &mut ValueInfoProto) -> Option<&mut Vec<Dimension>> {
    match info.r#type.as_mut()?.value.as_mut()? {
        type_proto::Value::TensorType(tensor) => Some(&mut tensor.shape.get_or_insert_default().dim),
        _ => None,
    }
}

/// Another number in one place of a small constant.
fn other_constant(tensor: &mut TensorProto, at: usize, how: usize, ints: &[i64]) {
    let Some(raw) = &tensor.raw_data else { return };
    let mut bytes = raw.to_vec();
    match tensor.data_type() {
        1 => {
            let count = bytes.len() / 4;
            if let Some(place) = bytes.chunks_exact_mut(4).nth(at % count.max(1)) {
                let number = [0.0f32, 1.0, 2.0, -0.5][how % 4];
                place.copy_from_slice(&number.to_le_bytes());
            }
        }
        7 => {
            let count = bytes.len() / 8;
            if let Some(place) = bytes.chunks_exact_mut(8).nth(at % count.max(1)) {
                let old = i64::from_le_bytes(place.try_into().expect("eight bytes"));
                place.copy_from_slice(&old.wrapping_add(ints[how % ints.len()]).to_le_bytes());
            }
        }
        _ => {}
    }
    tensor.raw_data = Some(bytes.into());
}
