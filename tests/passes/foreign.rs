//! Graphs as torch exports them, from the fixtures.

use std::path::Path;

use viaduct::{
    npy,
    tensor::{HostTensor, Values},
};
use viaduct_export::onnx::{Attribute, Bytes, DType, Model, Node, ValueType, read_model};

use crate::runtime_support::{Feeds, tensor};

/// One export of a computation: `patterns/attention`, `legacy_f16`.
pub fn foreign(folder: &str, export: &str) -> (Model, Feeds) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/foreign").join(folder);
    let mut model = read_model(&folder.join(format!("{export}.onnx"))).unwrap();
    hold(&mut model);
    let feeds = feeds(&mut model, &folder);
    (model, feeds)
}

/// Takes external data into memory, so that the model can be run from there.
pub fn hold(model: &mut Model) {
    for id in model.graph.values().map(|(id, _)| id).collect::<Vec<_>>() {
        if let Some(tensor) = &mut model.graph[id].constant {
            tensor.bytes = Bytes::Inline(tensor.bytes.read().unwrap().into_owned().into());
        }
    }
}

/// The inputs beside the model, in the types that it takes. Truth values are fed as integers, through a Cast.
fn feeds(model: &mut Model, folder: &Path) -> Feeds {
    let names: Vec<String> = model.graph.inputs.iter().map(|id| model.graph[*id].name.clone()).collect();
    let feed = |name: String| {
        let value = match dtype_of(model, &name) {
            DType::Bool => truths(model, &name, &folder.join(format!("{name}.npy"))),
            DType::F16 => {
                let value = npy::read(&folder.join(format!("{name}.npy"))).unwrap();
                tensor(DType::F16, &value.shape, &value.to_f32())
            }
            _ => npy::read(&folder.join(format!("{name}.npy"))).unwrap(),
        };
        (name, value)
    };
    names.into_iter().map(feed).collect()
}

fn dtype_of(model: &Model, name: &str) -> DType {
    let id = model.graph.find(name).unwrap();
    let Some(ValueType::Tensor { dtype, .. }) = &model.graph[id].ty else { panic!("{name} has no type") };
    *dtype
}

/// Makes an input of truth values one of integers, and reads them.
fn truths(model: &mut Model, name: &str, file: &Path) -> HostTensor {
    let graph = &mut model.graph;
    let input = graph.find(name).unwrap();
    let inner = graph.value(&format!("{name}.truth"));
    graph.replace_uses(input, inner);
    let Some(ValueType::Tensor { dtype, shape }) = &mut graph[input].ty else { panic!("no type") };
    *dtype = DType::I64;
    let shape = shape.clone();
    graph[inner].ty = Some(ValueType::Tensor { dtype: DType::Bool, shape });
    let cast = Node {
        op_type: "Cast".to_owned(),
        inputs: vec![Some(input)],
        outputs: vec![Some(inner)],
        attributes: vec![("to".to_owned(), Attribute::Int(DType::Bool.to_onnx().into()))],
        ..Node::default()
    };
    let (first, node) = graph.nodes().next().map(|(id, node)| (id, node.clone())).unwrap();
    graph.replace_node(first, vec![cast, node]);
    let bytes = std::fs::read(file).unwrap();
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let values: Vec<i64> = bytes[header..].iter().map(|truth| i64::from(*truth)).collect();
    let side = (values.len() as f64).sqrt() as usize;
    HostTensor::new(&[1, 1, side, side], Values::I64(values.into()))
}
