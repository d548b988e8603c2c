//! Shapes that ONNX Runtime's own operators give, and that no operator trips over nonsense.
//!
//! `shapes_contrib/cases.json` lists nodes: type and shape of each input, a constant's contents where they matter, and
//! what the outputs must be (`null`: not known). ONNX Runtime 1.31.1 gives the stated types and shapes for each case
//! with `"cpu": true`; its CPU provider does not have the others, which follow from the operators' definitions.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use viaduct_export::{
    onnx::{Attribute, DType, Model, Node, Tensor, ValueId},
    shapes::{Dims, Elements, Fact, Shapes, infer, operators},
};

const DTYPES: &[(&str, DType)] = &[
    ("f32", DType::F32),
    ("f16", DType::F16),
    ("u8", DType::U8),
    ("i8", DType::I8),
    ("i16", DType::I16),
    ("i32", DType::I32),
    ("i64", DType::I64),
];

fn dtype(name: &Json) -> Option<DType> {
    name.as_str().map(|name| DTYPES.iter().find(|dtype| dtype.0 == name).unwrap().1)
}

fn dims(list: &Json) -> Dims {
    list.as_array().unwrap().iter().map(|size| size.as_u64().map(|size| size as usize)).collect()
}

/// What a case says about a value: type, shape, and contents if it has them.
fn fact(case: &Json) -> Fact {
    let mut fact = Fact::partial(dtype(&case[0]), Some(dims(&case[1])));
    fact.elements =
        case[2].as_array().map(|values| Elements::Ints(values.iter().map(Json::as_i64).collect()));
    fact
}

fn attribute(value: &Json) -> Attribute {
    match value {
        Json::String(text) => Attribute::String(text.clone().into_bytes()),
        Json::Array(values) => Attribute::Ints(values.iter().map(|value| value.as_i64().unwrap()).collect()),
        Json::Number(number) => {
            number.as_i64().map_or_else(|| Attribute::Float(number.as_f64().unwrap() as f32), Attribute::Int)
        }
        other => panic!("{other} is no attribute"),
    }
}

/// A model of one node, and the ids of its outputs.
fn model_of(node: Node, inputs: usize, outputs: usize, opset: i64) -> (Model, Vec<ValueId>) {
    let mut model =
        Model { opsets: vec![(String::new(), 22), (node.domain.clone(), opset)], ..Model::default() };
    let graph = &mut model.graph;
    let inputs = (0..inputs).map(|index| Some(graph.value(&format!("in{index}")))).collect();
    let ids: Vec<ValueId> = (0..outputs).map(|index| graph.value(&format!("out{index}"))).collect();
    graph.add_node(Node { inputs, outputs: ids.iter().copied().map(Some).collect(), ..node });
    (model, ids)
}

fn run(case: &Json) -> (Shapes, Vec<ValueId>) {
    let empty = serde_json::Map::new();
    let attributes = case["attributes"].as_object().unwrap_or(&empty);
    let node = Node {
        op_type: case["op"].as_str().unwrap().to_owned(),
        domain: case["domain"].as_str().unwrap_or("com.microsoft").to_owned(),
        attributes: attributes.iter().map(|(name, value)| (name.clone(), attribute(value))).collect(),
        ..Node::default()
    };
    let inputs = case["inputs"].as_array().unwrap();
    let (mut model, ids) = model_of(node, inputs.len(), case["outputs"].as_array().unwrap().len(), 1);
    let given: BTreeMap<String, Fact> = inputs
        .iter()
        .enumerate()
        .filter(|(_, input)| !input.is_null())
        .map(|(index, input)| (format!("in{index}"), fact(input)))
        .collect();
    let node = model.graph.nodes().next().unwrap().0;
    for (index, input) in inputs.iter().enumerate() {
        if input.is_null() {
            model.graph[node].inputs[index] = None;
        }
    }
    (infer(&model, &BTreeMap::new(), &given), ids)
}

#[test]
fn operators_of_onnx_runtime_give_its_shapes() {
    let cases: Vec<Json> = serde_json::from_str(include_str!("shapes_contrib/cases.json")).unwrap();
    for case in &cases {
        let (shapes, ids) = run(case);
        assert_eq!(shapes.conflicts, [], "{case}");
        for (id, expected) in ids.iter().zip(case["outputs"].as_array().unwrap()) {
            if !expected.is_null() {
                let found = shapes.fact(*id);
                assert_eq!(
                    (found.dtype, &found.shape),
                    (dtype(&expected[0]), &Some(dims(&expected[1]))),
                    "{case}"
                );
            }
        }
    }
}

#[test]
fn contradictions_name_the_sizes() {
    let conv = |attributes: Json, data: Json| {
        json!({"op": "Conv", "domain": "", "attributes": attributes, "outputs": [null],
            "inputs": [["f32", data], ["f32", [8, 4, 3, 3]]]})
    };
    let other = |op: &str, attributes: Json, data: Json| json!({"op": op, "attributes": attributes, "inputs": [["f32", data]], "outputs": [null]});
    let contradictions = [
        (conv(json!({}), json!([1, 5, 9, 9])), "sizes 5 and 4"),
        (conv(json!({}), json!([1, 4, 2, 9])), "a window of 3 does not fit into 2"),
        (conv(json!({"strides": [0, 1]}), json!([1, 4, 9, 9])), "strides has the entry 0"),
        (
            conv(json!({"pads": [i64::MAX, i64::MAX, i64::MAX, i64::MAX]}), json!([1, 4, 9, 9])),
            "out of range",
        ),
        (conv(json!({"group": 3}), json!([1, 12, 9, 9])), "8 maps"),
        (other("MatMulNBits", json!({"K": 64, "N": 8}), json!([2, 63])), "sizes 63 and 64"),
        (other("MultiHeadAttention", json!({"num_heads": 3}), json!([1, 2, 32])), "rows of 32 for 3 heads"),
    ];
    for (case, word) in contradictions {
        let (shapes, _) = run(&case);
        let problem = &shapes.conflicts.first().unwrap_or_else(|| panic!("{case} is accepted")).problem;
        assert!(problem.contains(word), "{problem}");
    }
}

const ATTRIBUTES: &[&str] = &[
    "K",
    "N",
    "Nq",
    "Nkv",
    "auto_pad",
    "axes",
    "axis",
    "batch_dims",
    "bits",
    "block_size",
    "channels_last",
    "ceil_mode",
    "dilation",
    "dilations",
    "direction",
    "equation",
    "gather_axis",
    "group",
    "hidden_size",
    "keepdims",
    "kernel_shape",
    "kv_num_heads",
    "layout",
    "ndim",
    "new_axis",
    "num_heads",
    "num_outputs",
    "num_scan_inputs",
    "onesided",
    "output_padding",
    "output_shape",
    "pads",
    "perm",
    "pooled_shape",
    "q_num_heads",
    "qkv_hidden_sizes",
    "scales",
    "shape",
    "split",
    "state_update_capacity",
    "state_window",
    "strides",
    "value_ints",
    "blocksize",
    "ends",
    "starts",
    "end",
    "start",
    "to",
    "v_head_size",
    "keep_aspect_ratio_policy",
    "ngram_indexes",
];

fn hostile_int() -> impl Strategy<Value = i64> {
    prop_oneof![-3i64..6, Just(i64::MAX), Just(i64::MIN), Just(1 << 32), Just(1 << 62)]
}

fn hostile_attribute() -> impl Strategy<Value = Attribute> {
    prop_oneof![
        hostile_int().prop_map(Attribute::Int),
        prop::collection::vec(hostile_int(), 0..5).prop_map(Attribute::Ints),
        prop::collection::vec(-1e30f32..1e30, 0..5).prop_map(Attribute::Floats),
        prop::sample::select(vec![
            "SAME_UPPER",
            "VALID",
            "ij,jk->ik",
            "...i,i",
            "not_larger",
            "bidirectional",
            "\u{e9}"
        ])
        .prop_map(|text| Attribute::String(text.as_bytes().to_vec())),
        Just(Attribute::Tensor(Tensor::from_i64(&[2], &[i64::MAX, -1]))),
    ]
}

fn hostile_fact() -> impl Strategy<Value = Fact> {
    let size = prop_oneof![
        4 => (0usize..6).prop_map(Some), 1 => Just(None), 1 => Just(Some(usize::MAX)), 1 => Just(Some(1 << 40)),
    ];
    let shaped = prop::collection::vec(size, 0..6);
    let dtype = prop::sample::select(vec![
        Some(DType::F32),
        Some(DType::I64),
        Some(DType::U8),
        Some(DType::Bool),
        None,
    ]);
    let ints = prop::collection::vec(prop::option::weighted(0.9, hostile_int()), 0..7);
    let floats = prop::collection::vec(prop::option::weighted(0.9, prop::num::f64::ANY), 0..5);
    prop_oneof![
        4 => (dtype, prop::option::weighted(0.9, shaped)).prop_map(|(dtype, shape)| Fact::partial(dtype, shape)),
        2 => ints.prop_map(|v| Fact::with_elements(Some(DType::I64), &[v.len()], Some(Elements::Ints(v)))),
        1 => hostile_int().prop_map(|v| Fact::with_elements(Some(DType::I64), &[], Some(Elements::Ints(vec![Some(v)])))),
        1 => floats.prop_map(|v| Fact::with_elements(Some(DType::F32), &[v.len()], Some(Elements::Floats(v)))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    /// Every operator gets the same nonsense.
    #[test]
    fn no_operator_panics(
        attributes in prop::collection::btree_map(prop::sample::select(ATTRIBUTES), hostile_attribute(), 0..12),
        facts in prop::collection::vec(hostile_fact(), 0..9),
        opset in 1i64..25,
    ) {
        let given: BTreeMap<String, Fact> =
            facts.iter().enumerate().map(|(index, fact)| (format!("in{index}"), fact.clone())).collect();
        for (domain, op_type) in operators() {
            let attributes = attributes.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
            let node = Node { op_type: op_type.into(), domain: domain.into(), attributes, ..Node::default() };
            let (model, ids) = model_of(node, facts.len(), 3, opset);
            let shapes = infer(&model, &BTreeMap::new(), &given);
            prop_assert!(ids.iter().all(|id| shapes.fact(*id).rank().is_none_or(|rank| rank < 300)));
        }
    }
}
