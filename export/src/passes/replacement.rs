//! New nodes in the place of a matched one.

use crate::onnx::{Attribute, DType, Dim, Graph, Node, NodeId, Tensor, ValueId, ValueType};

/// Nodes that will take the place of one node. Constants and values that they make are named after it.
///
/// What the node's inputs depend on stays, for the runner to drop where nothing else uses it. So a pass replaces the last
/// node of its pattern and leaves the rest alone.
pub struct Replacement<'g> {
    graph: &'g mut Graph,
    root: NodeId,
    prefix: String,
    nodes: Vec<Node>,
    made: usize,
}

impl<'g> Replacement<'g> {
    pub fn of(graph: &'g mut Graph, root: NodeId) -> Replacement<'g> {
        let prefix = graph.place(root);
        Replacement { graph, root, prefix, nodes: Vec::new(), made: 0 }
    }

    pub fn graph(&self) -> &Graph {
        self.graph
    }

    /// A constant under a name of its own.
    pub fn constant(&mut self, tensor: Tensor) -> ValueId {
        let name = self.fresh();
        self.graph.add_constant(&name, tensor)
    }

    /// A constant under the given name, or a name that begins with it if it is taken.
    pub fn named_constant(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let name = self.graph.free_name(name);
        self.graph.add_constant(&name, tensor)
    }

    pub fn ints(&mut self, values: &[i64]) -> ValueId {
        self.constant(Tensor::from_i64(&[values.len()], values))
    }

    /// A scalar of type f32 or f16.
    pub fn scalar(&mut self, dtype: DType, value: f32) -> ValueId {
        self.constant(match dtype {
            DType::F16 => Tensor::from_f16(&[], &[value]),
            _ => Tensor::from_f32(&[], &[value]),
        })
    }

    /// A standard operator with one output.
    pub fn op(&mut self, op_type: &str, inputs: &[ValueId], attributes: &[(&str, Attribute)]) -> ValueId {
        self.ops("", op_type, inputs, attributes, 1)[0]
    }

    /// A com.microsoft operator with one output. The caller makes sure that the model imports the domain:
    /// [`crate::onnx::Model::import`].
    pub fn contrib(
        &mut self,
        op_type: &str,
        inputs: &[ValueId],
        attributes: &[(&str, Attribute)],
    ) -> ValueId {
        self.ops("com.microsoft", op_type, inputs, attributes, 1)[0]
    }

    /// The value in another type.
    pub fn cast(&mut self, x: ValueId, to: DType) -> ValueId {
        let y = self.value();
        self.cast_into(x, to, y);
        self.retype(y, to);
        y
    }

    /// A Cast that defines an existing value, which keeps what is recorded of it.
    pub fn cast_into(&mut self, x: ValueId, to: DType, output: ValueId) {
        self.op_into("Cast", &[x], &[("to", Attribute::Int(i64::from(to.to_onnx())))], output);
    }

    pub fn ops(
        &mut self,
        domain: &str,
        op_type: &str,
        inputs: &[ValueId],
        attributes: &[(&str, Attribute)],
        outputs: usize,
    ) -> Vec<ValueId> {
        let outputs: Vec<ValueId> = (0..outputs).map(|_| self.value()).collect();
        self.ops_into(domain, op_type, inputs, attributes, &outputs);
        outputs
    }

    /// A standard operator that defines an existing value, as a rule the output of the node that goes.
    pub fn op_into(
        &mut self,
        op_type: &str,
        inputs: &[ValueId],
        attributes: &[(&str, Attribute)],
        output: ValueId,
    ) {
        self.ops_into("", op_type, inputs, attributes, &[output]);
    }

    pub fn ops_into(
        &mut self,
        domain: &str,
        op_type: &str,
        inputs: &[ValueId],
        attributes: &[(&str, Attribute)],
        outputs: &[ValueId],
    ) {
        self.push(Node {
            op_type: op_type.to_owned(),
            domain: domain.to_owned(),
            inputs: inputs.iter().copied().map(Some).collect(),
            outputs: outputs.iter().copied().map(Some).collect(),
            attributes: attributes.iter().map(|(k, v)| ((*k).to_owned(), v.clone())).collect(),
            ..Node::default()
        });
    }

    /// A value that a node is still to define.
    pub fn value(&mut self) -> ValueId {
        let name = self.fresh();
        self.graph.value(&name)
    }

    /// Any node. Without a name it gets that of its first output.
    pub fn push(&mut self, mut node: Node) {
        if let (true, Some(output)) = (node.name.is_empty(), node.outputs.iter().flatten().next()) {
            node.name.clone_from(&self.graph[*output].name);
        }
        self.nodes.push(node);
    }

    /// Records a value's type, for those who look at the graph later.
    pub fn set_type(&mut self, value: ValueId, dtype: DType, shape: Option<Vec<Dim>>) {
        self.graph[value].ty = Some(ValueType::Tensor { dtype, shape });
    }

    /// Changes a value's element type and leaves what is recorded of its shape.
    pub fn retype(&mut self, value: ValueId, to: DType) {
        match &mut self.graph[value].ty {
            Some(ValueType::Tensor { dtype, .. }) => *dtype = to,
            ty => *ty = Some(ValueType::Tensor { dtype: to, shape: None }),
        }
    }

    /// Puts the nodes in place.
    pub fn finish(self) {
        self.graph.replace_node(self.root, self.nodes);
    }

    fn fresh(&mut self) -> String {
        loop {
            self.made += 1;
            let name = format!("{}/{}", self.prefix, self.made);
            if self.graph.find(&name).is_none() {
                return name;
            }
        }
    }
}
