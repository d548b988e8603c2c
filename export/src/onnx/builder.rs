//! Authoring graphs: a thin layer that names values, tracks element types and keeps constants unique.

use std::collections::HashMap;

use super::{Attribute, DType, Dim, Graph, Model, Node, Tensor, ValueId, ValueType};

/// Operator-set versions of authored graphs. 23 is the first with RMSNormalization.
const OPSETS: &[(&str, i64)] = &[("", 23), ("com.microsoft", 1)];
/// The IR version that goes with opset 23.
const IR_VERSION: i64 = 11;

/// A graph under construction. Every method appends nodes in execution order.
pub struct Builder {
    graph: Graph,
    dtypes: HashMap<ValueId, DType>,
    counters: HashMap<String, usize>,
    small_constants: HashMap<(DType, Vec<usize>, Vec<u8>), ValueId>,
}

/// Attributes of a node under construction, by name.
pub type Attributes<'a> = &'a [(&'a str, Attribute)];

impl Builder {
    pub fn new(name: &str) -> Builder {
        Builder {
            graph: Graph { name: name.to_owned(), ..Graph::default() },
            dtypes: HashMap::new(),
            counters: HashMap::new(),
            small_constants: HashMap::new(),
        }
    }

    /// A graph input. Dimensions are numbers or names that are bound when the graph is run.
    pub fn input(&mut self, name: &str, dtype: DType, dims: &[Dim]) -> ValueId {
        let id = self.graph.value(name);
        self.set_type(id, dtype, Some(dims.to_vec()));
        self.graph.inputs.push(id);
        id
    }

    /// Makes a value a graph output under the given name.
    pub fn output(&mut self, value: ValueId, name: &str, dims: &[Dim]) {
        self.label(value, name);
        self.set_type(value, self.dtypes[&value], Some(dims.to_vec()));
        self.graph.outputs.push(value);
    }

    /// Gives a value a name of its own, by which reports and comparisons find it.
    pub fn label(&mut self, value: ValueId, name: &str) {
        self.graph.rename(value, name);
    }

    /// Records the shape of a value inside the graph, for those who rewrite the graph later.
    pub fn record_shape(&mut self, value: ValueId, dims: &[Dim]) {
        self.set_type(value, self.dtypes[&value], Some(dims.to_vec()));
    }

    pub fn dtype(&self, value: ValueId) -> DType {
        self.dtypes[&value]
    }

    /// A named constant, for example a weight under its checkpoint name.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let dtype = tensor.dtype;
        let id = self.graph.add_constant(name, tensor);
        self.dtypes.insert(id, dtype);
        id
    }

    /// An unnamed small constant; equal ones are stored once, unless their values are not known yet.
    pub fn small_constant(&mut self, tensor: Tensor) -> ValueId {
        let super::Bytes::Inline(bytes) = &tensor.bytes else {
            let name = self.unique("const");
            return self.constant(&name, tensor);
        };
        let bytes = bytes.to_vec();
        let key = (tensor.dtype, tensor.shape.clone(), bytes);
        if let Some(id) = self.small_constants.get(&key) {
            return *id;
        }
        let name = self.unique("const");
        let id = self.constant(&name, tensor);
        self.small_constants.insert(key, id);
        id
    }

    pub fn ints(&mut self, values: &[i64]) -> ValueId {
        self.small_constant(Tensor::from_i64(&[values.len()], values))
    }

    /// A floating-point scalar of the given type (f32 or f16).
    pub fn scalar(&mut self, dtype: DType, value: f32) -> ValueId {
        let tensor = match dtype {
            DType::F16 => Tensor::from_f16(&[], &[value]),
            _ => Tensor::from_f32(&[], &[value]),
        };
        self.small_constant(tensor)
    }

    /// A standard operator with one output of the first input's type.
    pub fn op(&mut self, op_type: &str, inputs: &[ValueId], attributes: Attributes<'_>) -> ValueId {
        self.ops("", op_type, inputs, attributes, 1)[0]
    }

    /// A com.microsoft operator with one output of the first input's type.
    pub fn contrib(&mut self, op_type: &str, inputs: &[ValueId], attributes: Attributes<'_>) -> ValueId {
        self.ops("com.microsoft", op_type, inputs, attributes, 1)[0]
    }

    /// Any operator whose `outputs` outputs have the first input's type.
    pub fn ops(
        &mut self,
        domain: &str,
        op_type: &str,
        inputs: &[ValueId],
        attributes: Attributes<'_>,
        outputs: usize,
    ) -> Vec<ValueId> {
        let inputs = inputs.iter().copied().map(Some).collect();
        self.append(domain, op_type, inputs, attributes, outputs)
    }

    fn append(
        &mut self,
        domain: &str,
        op_type: &str,
        inputs: Vec<Option<ValueId>>,
        attributes: Attributes<'_>,
        outputs: usize,
    ) -> Vec<ValueId> {
        let dtype = inputs.first().copied().flatten().map_or(DType::F32, |x| self.dtypes[&x]);
        let name = self.unique(op_type);
        let made: Vec<ValueId> = (0..outputs)
            .map(|i| {
                let id = self.graph.value(&if outputs == 1 { name.clone() } else { format!("{name}.{i}") });
                self.set_type(id, dtype, None);
                id
            })
            .collect();
        self.graph.add_node(Node {
            op_type: op_type.to_owned(),
            domain: domain.to_owned(),
            name,
            inputs,
            outputs: made.iter().copied().map(Some).collect(),
            attributes: attributes.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect(),
            extra: None,
        });
        made
    }

    /// Nearest-neighbour Resize by whole factors, one per dimension.
    pub fn resize_nearest(&mut self, x: ValueId, factors: &[f32]) -> ValueId {
        let scales = self.small_constant(Tensor::from_f32(&[factors.len()], factors));
        let text = |s: &str| Attribute::String(s.as_bytes().to_vec());
        let attributes = [
            ("mode", text("nearest")),
            ("coordinate_transformation_mode", text("asymmetric")),
            ("nearest_mode", text("floor")),
        ];
        self.append("", "Resize", vec![Some(x), None, Some(scales)], &attributes, 1)[0]
    }

    /// Row `index` along the first axis, without that axis.
    pub fn row(&mut self, x: ValueId, index: i64) -> ValueId {
        let index = self.small_constant(Tensor::from_i64(&[], &[index]));
        self.op("Gather", &[x, index], &[("axis", Attribute::Int(0))])
    }

    /// A value that exists already, by name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.graph.find(name)
    }

    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op("Add", &[a, b], &[])
    }

    pub fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op("Mul", &[a, b], &[])
    }

    pub fn matmul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op("MatMul", &[a, b], &[])
    }

    /// Reshape; 0 copies the dimension at the same place, -1 takes the rest.
    pub fn reshape(&mut self, x: ValueId, shape: &[i64]) -> ValueId {
        let shape = self.ints(shape);
        self.op("Reshape", &[x, shape], &[])
    }

    pub fn transpose(&mut self, x: ValueId, perm: &[i64]) -> ValueId {
        self.op("Transpose", &[x], &[("perm", Attribute::Ints(perm.to_vec()))])
    }

    pub fn concat(&mut self, values: &[ValueId], axis: i64) -> ValueId {
        self.op("Concat", values, &[("axis", Attribute::Int(axis))])
    }

    /// `x[start..end]` along one axis; `i64::MAX` means to the end.
    /// Parts of the given sizes along an axis, in one operator.
    pub fn split<const N: usize>(&mut self, x: ValueId, axis: i64, sizes: [usize; N]) -> [ValueId; N] {
        let sizes = self.ints(&sizes.map(|size| size as i64));
        let parts = self.ops("", "Split", &[x, sizes], &[("axis", Attribute::Int(axis))], N);
        parts.try_into().expect("there are as many outputs as were asked for")
    }

    pub fn slice(&mut self, x: ValueId, axis: i64, start: i64, end: i64) -> ValueId {
        let operands = [x, self.ints(&[start]), self.ints(&[end]), self.ints(&[axis])];
        self.op("Slice", &operands, &[])
    }

    /// The value itself if it has that type already.
    pub fn cast(&mut self, x: ValueId, to: DType) -> ValueId {
        if self.dtypes[&x] == to {
            return x;
        }
        let y = self.op("Cast", &[x], &[("to", Attribute::Int(i64::from(to.to_onnx())))]);
        self.set_type(y, to, None);
        y
    }

    pub fn finish(self) -> Model {
        Model {
            graph: self.graph,
            ir_version: IR_VERSION,
            opsets: OPSETS.iter().map(|(domain, version)| ((*domain).to_owned(), *version)).collect(),
            producer: "viaduct".to_owned(),
            extra: None,
            folder: None,
        }
    }

    fn set_type(&mut self, id: ValueId, dtype: DType, shape: Option<Vec<Dim>>) {
        self.dtypes.insert(id, dtype);
        self.graph[id].ty = Some(ValueType::Tensor { dtype, shape });
    }

    fn unique(&mut self, stem: &str) -> String {
        let count = self.counters.entry(stem.to_owned()).or_default();
        *count += 1;
        format!("{stem}_{count}")
    }
}
