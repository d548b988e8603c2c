"""Runs models with every intermediate tensor exposed, and prints what ONNX Runtime makes of each as JSON.

    .venv/bin/python tools/shapes/onnxruntime_shapes.py MODEL.onnx... --sizes image_seq=12,text_seq=20 --sizes ...

Each model runs once per `--sizes`, which bind its named dimensions; optimisation is off, so that no tensor disappears.
Output: {model: [{"sizes": {name: size}, "tensors": {name: {"dtype", "shape", "ints"}}}]}, where `dtype` is the number of
`TensorProto.DataType` and `ints` the contents of integer and boolean tensors of at most 1024 elements.
"""

import argparse
import json

import numpy
import onnx
import onnxruntime

MAX_ELEMENTS = 1024


def parse_sizes(text):
    return {name: int(size) for name, size in (pair.split("=") for pair in text.split(","))}


def expose(path):
    """The model with all intermediate tensors as outputs, external data included."""
    model = onnx.load(path)
    present = {output.name for output in model.graph.output}
    made = [name for node in model.graph.node for name in node.output if name and name not in present]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    return model


def feeds(model, sizes):
    """Ones for integers, which are valid as token ids and as masks, and small random numbers for floats."""
    random = numpy.random.default_rng(0)
    constants = {tensor.name for tensor in model.graph.initializer}
    made = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        tensor = value.type.tensor_type
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        floating = numpy.issubdtype(dtype, numpy.floating)
        made[value.name] = random.uniform(0.1, 0.9, shape).astype(dtype) if floating else numpy.ones(shape, dtype)
    return made


def describe(array):
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    described = {"dtype": dtype, "shape": list(array.shape)}
    if array.dtype.kind in "iub" and array.size <= MAX_ELEMENTS:
        described["ints"] = [int(value) for value in array.flatten()]
    return described


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--sizes", type=parse_sizes, action="append", required=True)
    arguments = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    found = {}
    for path in arguments.models:
        model = expose(path)
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        names = [output.name for output in session.get_outputs() if output.type.startswith("tensor")]
        found[path] = [
            {
                "sizes": sizes,
                "tensors": dict(zip(names, map(describe, session.run(names, feeds(model, sizes))))),
            }
            for sizes in arguments.sizes
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
