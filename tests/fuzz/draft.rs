//! A graph under construction that stays valid: the shape of every value is known for each of several sizes of the open
//! dimensions, and an operator is only added where it fits all of them.

use viaduct_export::onnx::{Attribute, DType, Dim, Graph, Model, Node, Tensor, ValueType};

/// How many sets of sizes a graph must hold for.
pub const RUNS: usize = 3;

/// A size in each of the runs.
pub type Size = [usize; RUNS];

/// Values larger than this are not made.
const MAX_ELEMENTS: usize = 1 << 14;
const MAX_RANK: usize = 6;

#[derive(Clone, Debug)]
pub struct Value {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<Size>,
    /// The elements of a list of integers, in each of the runs.
    pub ints: Option<Vec<[i64; RUNS]>>,
}

impl Value {
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    pub fn is_float(&self) -> bool {
        matches!(self.dtype, DType::F32 | DType::F16)
    }
}

pub fn fixed(size: &Size) -> Option<usize> {
    size.iter().all(|other| *other == size[0]).then_some(size[0])
}

pub fn every(shape: &[usize]) -> Vec<Size> {
    shape.iter().map(|size| [*size; RUNS]).collect()
}

/// Numbers that a case is made of: those given, and after them more that follow from them.
pub struct Choices {
    given: Vec<u16>,
    at: usize,
}

impl Choices {
    pub fn of(given: &[u16]) -> Choices {
        Choices { given: given.to_vec(), at: 0 }
    }

    pub fn below(&mut self, count: usize) -> usize {
        let given = self.given.get(self.at).copied().unwrap_or_else(|| {
            let seed = self
                .given
                .iter()
                .fold(self.at as u64, |h, v| (h ^ u64::from(*v)).wrapping_mul(0x0100_0000_01b3));
            (seed >> 24) as u16
        });
        self.at += 1;
        usize::from(given) % count.max(1)
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == count - 1
    }

    pub fn of_list<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

pub struct Draft {
    pub graph: Graph,
    pub opset: i64,
    pub values: Vec<Value>,
    pub choices: Choices,
    /// Constants by name, to be shared.
    constants: Vec<(String, DType, Vec<usize>)>,
    made: usize,
}

impl Draft {
    pub fn new(opset: i64) -> Draft {
        let graph = Graph::new("fuzz");
        Draft { graph, opset, values: Vec::new(), choices: Choices::of(&[]), constants: Vec::new(), made: 0 }
    }

    pub fn name(&mut self, stem: &str) -> String {
        self.made += 1;
        format!("{stem}{}", self.made)
    }

    /// A value that fits, more likely a late one.
    pub fn pick(&mut self, fits: impl Fn(&Value) -> bool) -> Option<Value> {
        let found: Vec<usize> = (0..self.values.len()).filter(|i| fits(&self.values[*i])).collect();
        if found.is_empty() {
            return None;
        }
        let (a, b) = (self.choices.below(found.len()), self.choices.below(found.len()));
        Some(self.values[found[found.len() - 1 - a.min(b)]].clone())
    }

    pub fn float(&mut self) -> Option<Value> {
        self.pick(Value::is_float)
    }

    pub fn input(&mut self, dtype: DType, dims: Vec<(Dim, Size)>) {
        let name = self.name("in");
        let id = self.graph.value(&name);
        let (dims, shape): (Vec<Dim>, Vec<Size>) = dims.into_iter().unzip();
        self.graph[id].ty = Some(ValueType::Tensor { dtype, shape: Some(dims) });
        self.graph.inputs.push(id);
        self.values.push(Value { name, dtype, shape, ints: None });
    }

    /// A constant: a new initializer or a Constant node.
    pub fn constant(&mut self, tensor: Tensor) -> String {
        let name = self.name("c");
        if self.choices.one_in(6) {
            let id = self.graph.value(&name);
            self.graph.add_node(Node {
                op_type: "Constant".to_owned(),
                outputs: vec![Some(id)],
                attributes: vec![("value".to_owned(), Attribute::Tensor(tensor))],
                ..Node::default()
            });
        } else {
            self.constants.push((name.clone(), tensor.dtype, tensor.shape.clone()));
            self.graph.add_constant(&name, tensor);
        }
        name
    }

    pub fn ints(&mut self, values: &[i64]) -> String {
        self.constant(Tensor::from_i64(&[values.len()], values))
    }

    pub fn int(&mut self, value: i64) -> String {
        self.constant(Tensor::from_i64(&[], &[value]))
    }

    pub fn floats(&mut self, dtype: DType, shape: &[usize], values: &[f32]) -> String {
        self.constant(match dtype {
            DType::F16 => Tensor::from_f16(shape, values),
            _ => Tensor::from_f32(shape, values),
        })
    }

    /// Weights of that shape, now and then ones that are there already.
    pub fn weight(&mut self, dtype: DType, shape: &[usize]) -> String {
        let like =
            self.constants.iter().rev().find(|(_, t, s)| *t == dtype && s == shape).map(|c| c.0.clone());
        if let (Some(name), true) = (like, self.choices.one_in(2)) {
            return name;
        }
        let count: usize = shape.iter().product();
        let seed = self.choices.below(5) as u64;
        let values: Vec<f32> =
            crate::runtime_support::noise(seed, count).iter().map(|v| v * 0.7 + 0.01).collect();
        self.floats(dtype, shape, &values)
    }

    /// Appends a node unless a result would be too large; an empty input is absent. The names of the outputs.
    pub fn node(
        &mut self,
        op: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute)],
        outputs: &[(DType, Vec<Size>)],
    ) -> Option<Vec<Value>> {
        let large = |shape: &Vec<Size>| {
            let count = |run: usize| shape.iter().fold(1usize, |n, size| n.saturating_mul(size[run]));
            shape.len() > MAX_RANK || (0..RUNS).any(|run| count(run) > MAX_ELEMENTS)
        };
        if outputs.iter().any(|(_, shape)| large(shape)) {
            return None;
        }
        let made: Vec<Value> = outputs
            .iter()
            .map(|(dtype, shape)| Value {
                name: self.name("v"),
                dtype: *dtype,
                shape: shape.clone(),
                ints: None,
            })
            .collect();
        let names: Vec<&str> = made.iter().map(|value| value.name.as_str()).collect();
        self.raw(op, inputs, attributes, &names);
        self.values.extend(made.clone());
        Some(made)
    }

    /// A node with one result.
    pub fn one(
        &mut self,
        op: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute)],
        dtype: DType,
        shape: Vec<Size>,
    ) -> Option<Value> {
        self.node(op, inputs, attributes, &[(dtype, shape)])?.pop()
    }

    /// A node with one result like the operand.
    pub fn same(&mut self, op: &str, x: &Value, attributes: &[(&str, Attribute)]) -> Option<Value> {
        self.one(op, &[&x.name], attributes, x.dtype, x.shape.clone())
    }

    pub fn raw(&mut self, op: &str, inputs: &[&str], attributes: &[(&str, Attribute)], outputs: &[&str]) {
        let (domain, op_type) = match op.strip_prefix("ms.") {
            Some(op_type) => ("com.microsoft", op_type),
            None => ("", op),
        };
        // One in four nodes has no name, as some exporters write them.
        let name = if self.choices.one_in(4) { String::new() } else { self.name("n") };
        let ids = |graph: &mut Graph, names: &[&str]| {
            names.iter().map(|name| (!name.is_empty()).then(|| graph.value(name))).collect()
        };
        let (inputs, outputs) = (ids(&mut self.graph, inputs), ids(&mut self.graph, outputs));
        let attributes = attributes.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect();
        let (op_type, domain) = (op_type.to_owned(), domain.to_owned());
        self.graph.add_node(Node { op_type, domain, name, inputs, outputs, attributes, extra: None });
    }

    /// A list of integers that a node computes.
    pub fn list(
        &mut self,
        op: &str,
        inputs: &[&str],
        attributes: &[(&str, Attribute)],
        ints: Vec<[i64; RUNS]>,
        scalar: bool,
    ) -> Option<Value> {
        let shape = if scalar { Vec::new() } else { every(&[ints.len()]) };
        self.one(op, inputs, attributes, DType::I64, shape)?;
        let value = self.values.last_mut()?;
        value.ints = Some(ints);
        Some(value.clone())
    }

    pub fn model(self) -> Model {
        let opsets = vec![(String::new(), self.opset), ("com.microsoft".to_owned(), 1)];
        let ir_version = if self.opset > 21 { 10 } else { 8 };
        Model { graph: self.graph, ir_version, opsets, producer: "fuzz".to_owned(), ..Model::default() }
    }
}

pub fn int(value: i64) -> Attribute {
    Attribute::Int(value)
}

pub fn ints(values: &[i64]) -> Attribute {
    Attribute::Ints(values.to_vec())
}
