//! Image decoders as exporters write them, whose shapes are computed in the graph.

mod onnx_support;

use std::{collections::BTreeMap, env, path::Path};

use onnx_support::node;
use viaduct_export::{
    onnx::{Attribute, DType, Dim, Graph, Model, Tensor, ValueType, read_graph},
    shapes::{Sizes, infer},
};

fn latent(height: usize, width: usize) -> Sizes {
    [("latent_height".to_owned(), height), ("latent_width".to_owned(), width)].into()
}

fn attribute(graph: &mut Graph, name: &str, value: Attribute) {
    let last = graph.nodes().last().unwrap().0;
    graph[last].attributes.push((name.to_owned(), value));
}

/// The middle of a decoder: attention over all places of an image, then the image at twice the size.
fn middle() -> Model {
    let mut graph = Graph::new("decoder");
    let z = graph.value("z");
    let [height, width] = ["latent_height", "latent_width"].map(|name| Dim::Symbol(name.to_owned()));
    let shape = Some(vec![Dim::Fixed(1), Dim::Fixed(32), height, width]);
    graph[z].ty = Some(ValueType::Tensor { dtype: DType::F16, shape });
    graph.inputs.push(z);
    graph.add_constant("weights", Tensor::from_f16(&[8, 32, 3, 3], &[0.0; 8 * 32 * 9]));
    for (name, value) in [("0", 0), ("1", 1), ("2", 2), ("3", 3)] {
        graph.add_constant(name, Tensor::from_i64(&[], &[value]));
        graph.add_constant(&format!("[{name}]"), Tensor::from_i64(&[1], &[value]));
    }
    graph.add_constant("twice", Tensor::from_f32(&[4], &[1.0, 1.0, 2.0, 2.0]));

    node(&mut graph, "Conv", &["z", "weights"], &["x"]);
    attribute(&mut graph, "pads", Attribute::Ints(vec![1; 4]));
    node(&mut graph, "Shape", &["x"], &["sizes"]);
    for axis in ["0", "1", "2", "3"] {
        node(&mut graph, "Gather", &["sizes", axis], &[&format!("size {axis}")]);
        node(&mut graph, "Unsqueeze", &[&format!("size {axis}"), "[0]"], &[&format!("sizes {axis}")]);
    }
    node(&mut graph, "Mul", &["size 2", "size 3"], &["places"]);
    node(&mut graph, "Unsqueeze", &["places", "[0]"], &["places list"]);
    node(&mut graph, "Concat", &["sizes 0", "sizes 1", "places list"], &["flat sizes"]);
    attribute(&mut graph, "axis", Attribute::Int(0));
    node(&mut graph, "Reshape", &["x", "flat sizes"], &["keys"]);
    node(&mut graph, "Transpose", &["keys"], &["queries"]);
    attribute(&mut graph, "perm", Attribute::Ints(vec![0, 2, 1]));
    node(&mut graph, "MatMul", &["queries", "keys"], &["scores"]);
    node(&mut graph, "Softmax", &["scores"], &["probabilities"]);
    node(&mut graph, "MatMul", &["probabilities", "queries"], &["mixed"]);
    node(&mut graph, "Transpose", &["mixed"], &["mixed channels"]);
    attribute(&mut graph, "perm", Attribute::Ints(vec![0, 2, 1]));
    node(&mut graph, "Reshape", &["mixed channels", "sizes"], &["image"]);
    node(&mut graph, "Resize", &["image", "", "twice"], &["large"]);
    let resize = graph.nodes().last().unwrap().0;
    graph[resize].inputs[1] = None;
    let large = graph.find("large").unwrap();
    graph.outputs.push(large);
    Model { graph, ir_version: 8, opsets: vec![(String::new(), 17)], ..Model::default() }
}

#[test]
fn shapes_computed_in_the_graph_are_followed() {
    let model = middle();
    let shapes = infer(&model, &latent(6, 10), &BTreeMap::new());
    assert_eq!(shapes.conflicts, []);
    assert_eq!(shapes.unknown(&model.graph), BTreeMap::new());
    let shape = |name: &str| shapes.shape(model.graph.find(name).unwrap()).unwrap();
    assert_eq!(shape("keys"), [1, 8, 60]);
    assert_eq!(shape("probabilities"), [1, 60, 60]);
    assert_eq!(shape("image"), [1, 8, 6, 10]);
    assert_eq!(shape("large"), [1, 8, 12, 20]);
}

#[test]
fn an_unbound_size_stays_unknown() {
    let model = middle();
    let sizes = [("latent_height".to_owned(), 6)].into();
    let shapes = infer(&model, &sizes, &BTreeMap::new());
    assert_eq!(shapes.conflicts, []);
    let fact = |name: &str| shapes.fact(model.graph.find(name).unwrap());
    assert_eq!(fact("keys").shape, Some(vec![Some(1), Some(8), None]));
    assert_eq!(fact("image").rank(), Some(4));
    assert_eq!(shapes.unknown(&model.graph)["MatMul"], 2);
}

/// The decoder of FLUX.2 at full size, of which only the graph is there. `VIADUCT_SHARED` names the folder in which
/// it lies as `oracles/onnx-full/flux2_vae_decoder.onnx`.
#[test]
#[ignore = "needs a graph that is not in the repository: set VIADUCT_SHARED"]
fn every_tensor_of_the_full_decoder_is_known() {
    let folder = env::var_os("VIADUCT_SHARED").expect("VIADUCT_SHARED names a folder");
    let path = Path::new(&folder).join("oracles/onnx-full/flux2_vae_decoder.onnx");
    let model = read_graph(&path).unwrap();
    let shapes = infer(&model, &latent(64, 64), &BTreeMap::new());
    assert_eq!(shapes.conflicts, []);
    assert_eq!(shapes.unknown(&model.graph), BTreeMap::new());

    let outputs = model.graph.nodes().flat_map(|(_, node)| node.outputs.iter().flatten());
    let facts: Vec<_> = outputs.map(|id| shapes.fact(*id)).collect();
    let of_shape = |shape: &[usize]| {
        let same = facts.iter().filter(|fact| fact.full_shape().as_deref() == Some(shape));
        same.map(|fact| (fact.dtype, fact.bytes())).collect::<Vec<_>>()
    };
    assert_eq!(of_shape(&[1, 1, 16384, 16384]), [(Some(DType::F16), Some(512 << 20)); 2]);
    let last = of_shape(&[1, 256, 1024, 1024]);
    assert!(
        !last.is_empty() && last.iter().all(|fact| *fact == (Some(DType::F16), Some(512 << 20))),
        "{last:?}"
    );
    let [image] = model.graph.outputs[..] else { panic!("one output") };
    assert_eq!(shapes.shape(image), Some(vec![1, 3, 1024, 1024]));
}
