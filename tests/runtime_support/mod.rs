//! Small models, reproducible values and comparisons for the tests of the runtime.
#![allow(dead_code, unused_imports, reason = "each test file uses its own part")]

pub mod cases;
#[path = "../support/webgpu.rs"]
mod webgpu;

use std::path::Path;

use half::f16;
use viaduct::{
    runtime::{Provider, Runtime, RuntimeError, RuntimeOptions, StageModel},
    tensor::{HostTensor, Values},
};
use viaduct_export::{
    memory::PENDING_DISPATCHES,
    onnx::{Attribute, DType, Dim, Graph, Model, Node, Tensor, ValueType, model_bytes},
};

pub use webgpu::{WebGpu, webgpu};

/// A graph under construction; values are known by name.
pub struct Net {
    graph: Graph,
    pub dtype: DType,
}

pub type Attributes<'a> = &'a [(&'a str, Attribute)];

impl Net {
    pub fn new(dtype: DType) -> Net {
        let mut graph = Graph::default();
        graph.name = "test".to_owned();
        Net { graph, dtype }
    }

    pub fn input(&mut self, name: &str, dtype: DType, dims: &[Dim]) -> &mut Net {
        let id = self.graph.value(name);
        self.graph[id].ty = Some(ValueType::Tensor { dtype, shape: Some(dims.to_vec()) });
        self.graph.inputs.push(id);
        self
    }

    /// A floating-point input of the net's type and fixed sizes.
    pub fn x(&mut self, name: &str, shape: &[usize]) -> &mut Net {
        let dims: Vec<Dim> = shape.iter().map(|n| Dim::Fixed(*n)).collect();
        self.input(name, self.dtype, &dims)
    }

    pub fn constant(&mut self, name: &str, tensor: Tensor) -> &mut Net {
        self.graph.add_constant(name, tensor);
        self
    }

    /// A floating-point constant of the net's type.
    pub fn float(&mut self, name: &str, shape: &[usize], values: &[f32]) -> &mut Net {
        let tensor = match self.dtype {
            DType::F16 => Tensor::from_f16(shape, values),
            _ => Tensor::from_f32(shape, values),
        };
        self.constant(name, tensor)
    }

    pub fn ints(&mut self, name: &str, values: &[i64]) -> &mut Net {
        self.constant(name, Tensor::from_i64(&[values.len()], values))
    }

    /// Appends a node; an operator with a dot is one of com.microsoft. An empty input name is an absent input;
    /// several outputs are separated by spaces.
    pub fn node(&mut self, op: &str, inputs: &[&str], output: &str, attributes: Attributes<'_>) -> &mut Net {
        let (domain, op_type) = match op.strip_prefix("ms.") {
            Some(op_type) => ("com.microsoft", op_type),
            None => ("", op),
        };
        let inputs = inputs.iter().map(|name| (!name.is_empty()).then(|| self.graph.value(name))).collect();
        let outputs = output.split(' ').map(|name| Some(self.graph.value(name))).collect();
        let attributes = attributes.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
        self.graph.add_node(Node {
            op_type: op_type.to_owned(),
            domain: domain.to_owned(),
            name: format!("{op_type}_{output}"),
            inputs,
            outputs,
            attributes,
            extra: None,
        });
        self
    }

    /// The model with the named values as outputs of the net's type.
    pub fn model(&self, outputs: &[&str]) -> Model {
        let typed: Vec<_> = outputs.iter().map(|o| (*o, self.dtype)).collect();
        self.model_typed(&typed)
    }

    pub fn model_typed(&self, outputs: &[(&str, DType)]) -> Model {
        let mut graph = self.graph.clone();
        for (name, dtype) in outputs {
            let id = graph.value(name);
            if graph[id].ty.is_none() {
                graph[id].ty = Some(ValueType::Tensor { dtype: *dtype, shape: None });
            }
            graph.outputs.push(id);
        }
        let opsets = vec![(String::new(), 23), ("com.microsoft".to_owned(), 1)];
        Model { graph, ir_version: 11, opsets, producer: "test".to_owned(), ..Model::default() }
    }
}

pub fn int(value: i64) -> Attribute {
    Attribute::Int(value)
}

pub fn ints(values: &[i64]) -> Attribute {
    Attribute::Ints(values.to_vec())
}

pub fn float(value: f32) -> Attribute {
    Attribute::Float(value)
}

pub fn string(value: &str) -> Attribute {
    Attribute::String(value.as_bytes().to_vec())
}

/// The inputs of a run, by name.
pub type Feeds = Vec<(String, HostTensor)>;

/// Opens the model, runs it once and returns the named outputs.
pub fn run(
    runtime: &mut Runtime,
    model: &Model,
    feeds: &Feeds,
    outputs: &[&str],
) -> Result<Vec<HostTensor>, RuntimeError> {
    let bytes = model_bytes(model).expect("a small model");
    let mut stage = runtime.open(StageModel {
        name: "test",
        bytes,
        folder: Path::new("."),
        pending_dispatches: PENDING_DISPATCHES,
    })?;
    let inputs: Vec<(&str, &HostTensor)> = feeds.iter().map(|(n, t)| (n.as_str(), t)).collect();
    stage.run(&inputs, outputs)
}

/// Reproducible values in -1..1.
pub fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A tensor of the given floating-point type; values are rounded to f16 in either case, so that both types compute
/// with the same numbers.
pub fn tensor(dtype: DType, shape: &[usize], values: &[f32]) -> HostTensor {
    let rounded: Vec<f16> = values.iter().map(|v| f16::from_f32(*v)).collect();
    match dtype {
        DType::F16 => HostTensor::new(shape, Values::F16(rounded.into())),
        _ => HostTensor::f32(shape, rounded.iter().map(|v| v.to_f32()).collect()),
    }
}

/// max|a-b| / max|b|; infinite when something is not finite or the sizes differ.
pub fn relative_error(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() || a.iter().any(|v| !v.is_finite()) {
        return f32::INFINITY;
    }
    let peak = b.iter().fold(0f32, |m, v| m.max(v.abs())).max(f32::MIN_POSITIVE);
    a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / peak
}

pub fn cpu() -> Runtime {
    Runtime::start(&RuntimeOptions { provider: Provider::Cpu, ..RuntimeOptions::default() })
        .expect("the CPU provider")
}
