#!/usr/bin/env python3
"""Writes an ONNX transformer of a given size with external data, as exporters spell it.

    .venv/bin/python tools/bench/synthetic_model.py DEST.onnx [--layers 16 --width 2048 --dtype f32]

16 layers of width 2048 in f32 are 3 GiB. It exists to measure readers, writers and rewriting: linears come as MatMul(x, W),
MatMul(x, Transpose(W)) and Gemm(transB) with a bias; one weight is shared by all layers; axes and scalars are Constant
nodes; head shapes come from Shape chains and the attention's scale from Sqrt, Div, Sqrt; there are Identity nodes and a
branch that nothing reads. `x` [1,seq,width] -> `y` [1,seq,width]. The same arguments give the same bytes.
"""

import argparse
from math import prod, sqrt
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 17
HEAD = 64
PAGE = 4096
DTYPES = {"f32": (TensorProto.FLOAT, np.float32), "f16": (TensorProto.FLOAT16, np.float16)}
# Random values are drawn once; every tensor begins at another place of them.
POOL = 1 << 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path, help="model to write; its data goes beside it, to DEST.onnx.data")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048, help=f"a multiple of {HEAD}")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    arguments = parser.parse_args()
    total = write(arguments.dest, arguments.layers, arguments.width, arguments.dtype)
    print(f"{arguments.dest}: {total / 2**30:.2f} GiB of weights")


def write(dest: Path, layers: int, width: int, dtype: str = "f32") -> int:
    """Writes the model and its data; the data's bytes."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with open(dest.with_name(dest.name + ".data"), "wb") as data:
        graph = Graph(data, dtype)
        x = graph.node("Identity", "x")
        shared = graph.weight("shared.weight", width, width)
        for layer in range(layers):
            x = transformer_layer(graph, f"layers.{layer}", x, width, shared)
        graph.node("Identity", x, output="y")
        total = data.tell()
    element, _ = DTYPES[dtype]
    ends = [helper.make_tensor_value_info(name, element, [1, "seq", width]) for name in ("x", "y")]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "transformer", ends[:1], ends[1:], graph.initializers),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=8,
        producer_name="synthetic",
    )
    dest.write_bytes(model.SerializeToString())
    return total


class Graph:
    """Nodes in order, and initializers whose bytes go straight to the data file."""

    def __init__(self, data, dtype: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.data, self.dtype = data, dtype
        self.pool = np.random.default_rng(1).standard_normal(POOL, np.float32)

    def node(self, op: str, *inputs: str, output: str | None = None, **attributes) -> str:
        name = output or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"node_{name}", **attributes))
        return name

    def constant(self, values: list | int | float, dtype=np.int64) -> str:
        return self.node("Constant", value=onnx.numpy_helper.from_array(np.array(values, dtype)))

    def weight(self, name: str, *shape: int) -> str:
        """Normally distributed; matrices scaled so that a linear keeps the size of what goes through it."""
        element, numpy_type = DTYPES[self.dtype]
        spread = np.float32(1 / sqrt(shape[-1]) if len(shape) > 1 else 0.02)
        tensor = TensorProto(name=name, data_type=element, dims=shape, data_location=TensorProto.EXTERNAL)
        self.data.write(bytes(-self.data.tell() % PAGE))
        offset = self.data.tell()
        count, start = prod(shape), len(self.initializers) * 74_003
        while count > 0:
            start %= POOL
            part = self.pool[start : start + count]
            self.data.write((part * spread).astype(numpy_type).tobytes())
            count, start = count - len(part), start + len(part)
        place = dict(location=Path(self.data.name).name, offset=offset, length=self.data.tell() - offset)
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name


def transformer_layer(graph: Graph, name: str, x: str, width: int, shared: str) -> str:
    _, numpy_type = DTYPES[graph.dtype]
    # A scale of ones, which is what an exporter inlines.
    normed = graph.node(
        "LayerNormalization", x, graph.constant(np.ones(width), numpy_type), axis=-1, epsilon=1e-6
    )
    q = split_heads(graph, graph.node("MatMul", normed, graph.weight(f"{name}.q.weight", width, width)))
    k = split_heads(graph, transposed_linear(graph, f"{name}.k", normed, width, width))
    v = split_heads(graph, graph.node("MatMul", graph.node("Identity", normed), shared))
    graph.node("Mul", q, q)  # nothing reads this

    scale = attention_scale(graph, q)
    k = graph.node("Transpose", k, perm=[0, 1, 3, 2])
    scores = graph.node("MatMul", graph.node("Mul", q, scale), graph.node("Mul", k, scale))
    mixed = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
    mixed = graph.node("Transpose", mixed, perm=[0, 2, 1, 3])
    flat = graph.node("Reshape", mixed, graph.constant([-1, width]))
    out_weight, out_bias = graph.weight(f"{name}.out.weight", width, width), graph.weight(f"{name}.out.bias", width)
    flat = graph.node("Gemm", flat, out_weight, out_bias, transB=1)
    x = graph.node("Add", x, graph.node("Reshape", flat, graph.node("Shape", x)))

    up = transposed_linear(graph, f"{name}.up", x, width, 4 * width)
    up = graph.node("Add", up, graph.weight(f"{name}.up.bias", 4 * width))
    up = graph.node("Mul", up, graph.node("Sigmoid", up))
    down = graph.node("MatMul", up, graph.weight(f"{name}.down.weight", 4 * width, width))
    value = graph.node("MatMul", down, graph.weight(f"{name}.value.weight", width, width))
    return graph.node("Add", x, graph.node("Mul", value, graph.constant(0.25, numpy_type)))


def transposed_linear(graph: Graph, name: str, x: str, inputs: int, outputs: int) -> str:
    weight = graph.weight(f"{name}.weight", outputs, inputs)
    return graph.node("MatMul", x, graph.node("Transpose", weight, perm=[1, 0]))


def split_heads(graph: Graph, x: str) -> str:
    """[1,seq,width] -> [1,heads,seq,head], with the lengths read from the shape."""
    shape = graph.node("Shape", x)
    length, width = (graph.node("Gather", shape, graph.constant(axis), axis=0) for axis in (1, 2))
    heads = graph.node("Cast", graph.node("Div", width, graph.constant(HEAD)), to=TensorProto.INT64)
    parts = [graph.node("Unsqueeze", part, graph.constant([0])) for part in (length, heads)]
    target = graph.node("Concat", graph.constant([1]), *parts, graph.constant([HEAD]), axis=0)
    return graph.node("Transpose", graph.node("Reshape", x, target), perm=[0, 2, 1, 3])


def attention_scale(graph: Graph, q: str) -> str:
    """sqrt(1 / sqrt(head)), computed from the shape of q."""
    element, numpy_type = DTYPES[graph.dtype]
    head = graph.node("Slice", graph.node("Shape", q), graph.constant([-1]), graph.constant([2**63 - 1]))
    root = graph.node("Sqrt", graph.node("Cast", head, to=element))
    return graph.node("Sqrt", graph.node("Div", graph.constant([1.0], numpy_type), root))


if __name__ == "__main__":
    main()
