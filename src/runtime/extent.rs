//! How many rows and columns a value [1, rows, columns] has, as far as a transformer block leaves no doubt.

use std::collections::{BTreeMap, HashMap};

use viaduct_export::onnx::{DType, Dim, Graph, Links, Node, Tensor, ValueId, ValueType};

/// Operators that keep the shape of their first input.
const SAME_SHAPE: &[&str] = &[
    "Cast",
    "Clip",
    "Gelu",
    "Identity",
    "LayerNormalization",
    "Neg",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
    "Sigmoid",
    "Softmax",
    "Tanh",
];
/// Operators whose output has the shape of the larger operand.
const BROADCAST: &[&str] = &["Add", "Div", "Mul", "Sub"];

/// Sizes that follow from recorded shapes and the sizes of their symbols.
pub(super) struct Extents<'g> {
    graph: &'g Graph,
    dims: &'g BTreeMap<String, usize>,
    links: Links,
    rows: HashMap<ValueId, Option<usize>>,
    width: HashMap<ValueId, Option<usize>>,
}

impl<'g> Extents<'g> {
    pub fn new(graph: &'g Graph, dims: &'g BTreeMap<String, usize>) -> Extents<'g> {
        Extents { graph, dims, links: graph.links(), rows: HashMap::new(), width: HashMap::new() }
    }

    /// The size of axis 1.
    pub fn rows(&mut self, value: ValueId) -> Option<usize> {
        if let Some(known) = self.rows.get(&value) {
            return *known;
        }
        // A recorded answer for values on the way back, so that a faulty graph with a cycle ends.
        self.rows.insert(value, None);
        let rows = self.dim(value, 3, 1).or_else(|| self.rows_of_producer(value));
        self.rows.insert(value, rows);
        rows
    }

    fn rows_of_producer(&mut self, value: ValueId) -> Option<usize> {
        let node = self.producer(value)?;
        let input = |i: usize| node.inputs.get(i).copied().flatten();
        let inputs = || node.inputs.iter().copied().flatten();
        match node.op_type.as_str() {
            "RotaryEmbedding" => {
                self.rows(input(0)?).or_else(|| self.dim(self.before_casts(input(2)?), 2, 0))
            }
            "Concat" if node.int("axis") == Some(1) => inputs().map(|x| self.rows(x)).sum(),
            // 0 copies the size.
            "Reshape" => match self.ints(input(1)?)?.get(1)? {
                0 => self.rows(input(0)?),
                -1 => None,
                rows => usize::try_from(*rows).ok(),
            },
            "MatMul" | "MatMulNBits" => self.rows(input(0)?),
            "MultiHeadAttention" => self.rows(input(0)?),
            op if SAME_SHAPE.contains(&op) => self.rows(input(0)?),
            op if BROADCAST.contains(&op) => inputs().filter_map(|x| self.rows(x)).max(),
            "Slice" => self.rows_of_slice(&node),
            _ => None,
        }
    }

    fn rows_of_slice(&mut self, node: &Node) -> Option<usize> {
        let input = |i: usize| node.inputs.get(i).copied().flatten();
        if input(4).is_some() {
            return None;
        }
        let bound = |i: usize| match *self.ints(input(i)?)?.as_slice() {
            [one] => Some(one),
            _ => None,
        };
        let (start, end, axis) = (bound(1)?, bound(2)?, bound(3)?);
        let rows = self.rows(input(0)?)?;
        if axis != 1 {
            return (axis == 2 || axis == -1).then_some(rows);
        }
        let place = |x: i64| if x < 0 { x + rows as i64 } else { x }.clamp(0, rows as i64);
        usize::try_from(place(end) - place(start)).ok()
    }

    /// The size of axis 2.
    pub fn width(&mut self, value: ValueId) -> Option<usize> {
        if let Some(known) = self.width.get(&value) {
            return *known;
        }
        self.width.insert(value, None);
        let width = self.dim(value, 3, 2).or_else(|| self.width_of_producer(value));
        self.width.insert(value, width);
        width
    }

    fn width_of_producer(&mut self, value: ValueId) -> Option<usize> {
        let node = self.producer(value)?;
        let input = |i: usize| node.inputs.get(i).copied().flatten();
        match node.op_type.as_str() {
            "RotaryEmbedding" => {
                let heads = usize::try_from(node.int("num_heads")?).ok()?;
                let pairs = self.dim(self.before_casts(input(2)?), 2, 1);
                self.width(input(0)?).or_else(|| Some(heads * 2 * pairs?))
            }
            "MatMul" => self.graph[input(1)?].constant.as_ref()?.shape.last().copied(),
            "MatMulNBits" => usize::try_from(node.int("N")?).ok(),
            "Concat" if node.int("axis") == Some(1) => self.width(input(0)?),
            op if SAME_SHAPE.contains(&op) => self.width(input(0)?),
            op if BROADCAST.contains(&op) => {
                node.inputs.iter().copied().flatten().filter_map(|x| self.width(x)).max()
            }
            _ => None,
        }
    }

    fn before_casts(&self, mut value: ValueId) -> ValueId {
        while let Some(node) = self.producer(value).filter(|n| n.op_type == "Cast") {
            let Some(Some(input)) = node.inputs.first() else { break };
            value = *input;
        }
        value
    }

    /// A copy, because the answer needs the whole of `self`; nodes are small.
    fn producer(&self, value: ValueId) -> Option<Node> {
        Some(self.graph[self.links.producer(value)?].clone())
    }

    /// The recorded size of one axis, if the value's recorded rank is `rank`.
    fn dim(&self, value: ValueId, rank: usize, axis: usize) -> Option<usize> {
        let value = &self.graph[value];
        if let Some(Tensor { shape, .. }) = &value.constant {
            return if shape.len() == rank { shape.get(axis).copied() } else { None };
        }
        let Some(ValueType::Tensor { shape: Some(shape), .. }) = &value.ty else { return None };
        if shape.len() != rank {
            return None;
        }
        match shape.get(axis)? {
            Dim::Fixed(size) => Some(*size),
            // A sum of symbols, for example `text_seq+image_seq`, is the size of values laid end to end.
            Dim::Symbol(symbol) => symbol.split('+').map(|s| self.dims.get(s.trim()).copied()).sum(),
            Dim::Unknown => None,
        }
    }

    fn ints(&self, value: ValueId) -> Option<Vec<i64>> {
        let tensor = self.graph[value].constant.as_ref().filter(|t| t.dtype == DType::I64)?;
        let bytes = tensor.bytes.read().ok()?;
        let (values, _) = bytes.as_chunks::<8>();
        Some(values.iter().map(|b| i64::from_le_bytes(*b)).collect())
    }
}
