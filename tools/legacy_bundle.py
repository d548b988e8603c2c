"""Write a checkpoint in diffusers layout as a bundle in flux2-vulkan-bridge's layout, for tests.

    .venv/bin/python tools/legacy_bundle.py CHECKPOINT BUNDLE --taps 2,4,6 --text-length 64

What that layout is, is known from its engine only (file names, keys, inputs and outputs; the published files were not at
hand). The graphs here are written from the model's equations (docs/flux2.md) with onnx.helper, in the manner of a
TorchScript export: attention written out, masks of -inf with an IsNaN guard, positions and rotary tables inside. Nothing
here is shared with the program that reads the result.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
# Where fixed files lie in the layout.
CONFIG = "flux2-config.json"
SAFETENSORS = {"F32": np.float32, "F16": np.float16, "I64": np.int64}
ONNX_TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}
QUERY_ROWS = 1024
RESIDUAL = "/decoder/block_1/Add_output_0"
Q, KT, V = (f"/decoder/attn_1/{name}_output_0" for name in ("Mul_6", "Mul_7", "Reshape_2"))
ATTENDED = "/decoder/attn_1/MatMul_1_output_0"


class Checkpoint:
    """The tensors of one component, as float32 arrays by name."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8 : 8 + length]).items():
                if name == "__metadata__":
                    continue
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                self.tensors[name] = decoded(data[begin:end], entry["dtype"]).reshape(entry["shape"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]


def decoded(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, SAFETENSORS[dtype]).astype(np.float32)


def quantised(weight: np.ndarray, bits: int, block: int, scale_type: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and zero points of [N, K] as MatMulNBits takes them: round to nearest, asymmetric."""
    rows, columns = weight.shape
    blocks = -(-columns // block)
    padded = np.zeros((rows, blocks * block), np.float32)
    padded[:, :columns] = weight
    groups = padded.reshape(rows, blocks, block)
    real = np.arange(blocks * block).reshape(blocks, block) < columns
    low = np.minimum(np.where(real, groups, 0).min(-1), np.float32(0))
    high = np.maximum(np.where(real, groups, 0).max(-1), np.float32(0))
    most = np.float32(2**bits - 1)
    scale = (high - low) / most
    half_up = lambda x: np.floor(x + np.float32(0.5))  # noqa: E731 (values are not negative)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(scale > 0, np.clip(half_up(-low / scale), 0, most), 0).astype(np.float32)
        stored = scale.astype(scale_type)
        inverse = np.where(stored > 0, np.float32(1) / stored.astype(np.float32), 0).astype(np.float32)
    codes = np.clip(half_up(np.maximum(groups * inverse[..., None] + zero[..., None], 0)), 0, most)
    codes = np.where(real, codes, 0).astype(np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    zeros = zero.astype(np.uint8)
    if blocks % 2:
        zeros = np.concatenate([zeros, np.full((rows, 1), 2 ** (bits - 1), np.uint8)], 1)
    return packed, stored, zeros[:, 0::2] | zeros[:, 1::2] << 4


class GraphWriter:
    """A graph under construction: values are named by strings."""

    def __init__(self, name: str, dtype: type, weights: str, accuracy_level: int = 0):
        self.name, self.dtype, self.weights, self.accuracy_level = name, dtype, weights, accuracy_level
        self.nodes, self.initializers, self.inputs, self.outputs = [], [], [], []
        self.count = 0

    def input(self, name: str, dtype: int, shape: list) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def float_input(self, name: str, shape: list) -> str:
        return self.input(name, ONNX_TYPES[np.dtype(self.dtype)], shape)

    def output(self, value: str, name: str, shape: list) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"{name}/Identity"))
        self.outputs.append(helper.make_tensor_value_info(name, ONNX_TYPES[np.dtype(self.dtype)], shape))

    def constant(self, value: np.ndarray, name: str | None = None) -> str:
        if name is None:
            self.count += 1
            name = f"constant_{self.count}"
        if name not in {tensor.name for tensor in self.initializers[-400:]}:
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, self.dtype))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def op(self, op_type: str, *operands: str, outputs: int = 1, **attributes) -> str | list[str]:
        self.count += 1
        made = [f"/{op_type}_{self.count}_output_{i}" for i in range(outputs)]
        domain = attributes.pop("domain", "")
        node = helper.make_node(op_type, list(operands), made, name=f"/{op_type}_{self.count}", domain=domain, **attributes)
        self.nodes.append(node)
        return made[0] if outputs == 1 else made

    def cast(self, x: str, dtype: type) -> str:
        return self.op("Cast", x, to=ONNX_TYPES[np.dtype(dtype)])

    def as_f32(self, x: str) -> str:
        return x if self.dtype is np.float32 else self.cast(x, np.float32)

    def as_own(self, x: str) -> str:
        return x if self.dtype is np.float32 else self.cast(x, self.dtype)

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, self.ints(*shape))

    def transpose(self, x: str, *perm: int) -> str:
        return self.op("Transpose", x, perm=list(perm))

    def slice(self, x: str, axis: int, start: int, end: int) -> str:
        return self.op("Slice", x, self.ints(start), self.ints(end), self.ints(axis))

    def split(self, x: str, axis: int, *sizes: int) -> list[str]:
        return self.op("Split", x, self.ints(*sizes), axis=axis, outputs=len(sizes))

    def linear(self, x: str, name: str, weight: np.ndarray) -> str:
        """x W^T, W [N, K]."""
        rows, columns = weight.shape
        if self.weights != "q4":
            return self.op("MatMul", x, self.constant(weight.T.astype(self.dtype), f"onnx::MatMul_{name}"))
        codes, scales, zeros = quantised(weight, 4, 16, self.dtype)
        operands = [
            self.constant(codes, f"{name}_Q4"),
            self.constant(scales.reshape(-1), f"{name}_scales"),
            self.constant(zeros.reshape(-1), f"{name}_zero_points"),
        ]
        return self.op(
            "MatMulNBits", x, *operands, domain="com.microsoft", K=columns, N=rows, bits=4, block_size=16,
            accuracy_level=self.accuracy_level,
        )  # fmt: skip

    def silu(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", x))

    def rms_norm(self, x: str, weight: np.ndarray, eps: float, name: str) -> str:
        """In float32, as exporters write it out."""
        x = self.as_f32(x)
        square = self.op("Pow", x, self.constant(np.array(2, np.float32)))
        mean = self.op("ReduceMean", square, axes=[-1], keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.constant(np.array(eps, np.float32))))
        inverse = self.op("Div", self.constant(np.array(1, np.float32)), root)
        return self.op("Mul", self.as_own(self.op("Mul", x, inverse)), self.constant(weight.astype(self.dtype), name))

    def layer_norm(self, x: str, width: int, eps: float) -> str:
        ones = self.constant(np.ones(width, np.float32))
        return self.as_own(self.op("LayerNormalization", self.as_f32(x), ones, axis=-1, epsilon=eps))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="pytorch", ir_version=8)
        return model


# ---------------------------------------------------------------------------------------------- text encoder


def rope_theta(config: dict) -> float:
    return config.get("rope_theta") or config["rope_parameters"]["rope_theta"]


def text_encoder(weights: Checkpoint, taps: list[int], length: int, g: GraphWriter) -> None:
    c = weights.config
    heads, groups, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    ids = g.input("input_ids", TensorProto.INT64, [1, length])
    mask = g.input("attention_mask", TensorProto.INT64, [1, length])
    table = g.constant(weights["model.embed_tokens.weight"].astype(g.dtype), "model.embed_tokens.weight")
    x = g.op("Gather", table, ids, axis=0)
    causal = g.constant(np.tril(np.ones((1, 1, length, length), bool)))
    seen = g.op("Reshape", g.op("Cast", mask, to=TensorProto.BOOL), g.ints(1, 1, 1, length))
    bias = g.op("Where", g.op("And", causal, seen), g.number(0), g.number(-math.inf))
    inverse = (1.0 / rope_theta(c) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d))).astype(np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse
    angles = np.concatenate([angles, angles], 1)
    cos, sin = (g.constant(table.astype(g.dtype)) for table in (np.cos(angles), np.sin(angles)))

    def rotated(x: str) -> str:
        first, second = g.split(x, -1, d // 2, d // 2)
        turned = g.op("Concat", g.op("Neg", second), first, axis=-1)
        return g.op("Add", g.op("Mul", x, cos), g.op("Mul", turned, sin))

    kept = {}
    for layer in range(max(taps)):
        kept[layer] = x
        key = f"model.layers.{layer}"
        h = g.rms_norm(x, weights[f"{key}.input_layernorm.weight"], c["rms_norm_eps"], f"{key}.input_layernorm.weight")

        def projected(name: str, count: int, h: str = h, key: str = key) -> str:
            y = g.linear(h, f"{key}.{name}_proj", weights[f"{key}.self_attn.{name}_proj.weight"])
            y = g.reshape(y, 1, length, count, d)
            if name != "v":
                norm = f"{key}.self_attn.{name}_norm.weight"
                y = g.rms_norm(y, weights[norm], c["rms_norm_eps"], norm)
            return g.transpose(y, 0, 2, 1, 3)

        def repeated(x: str) -> str:
            x = g.op("Unsqueeze", x, g.ints(2))
            x = g.op("Expand", x, g.ints(1, groups, heads // groups, length, d))
            return g.reshape(x, 1, heads, length, d)

        scale = g.number(d**-0.25)
        q = g.op("Mul", rotated(projected("q", heads)), scale)
        k = g.op("Mul", g.transpose(repeated(rotated(projected("k", groups))), 0, 1, 3, 2), scale)
        v = repeated(projected("v", groups))
        scores = g.op("Softmax", g.op("Add", g.op("MatMul", q, k), bias), axis=-1)
        scores = g.op("Where", g.op("IsNaN", scores), g.number(0), scores)
        y = g.reshape(g.transpose(g.op("MatMul", scores, v), 0, 2, 1, 3), 1, length, heads * d)
        x = g.op("Add", x, g.linear(y, f"{key}.o_proj", weights[f"{key}.self_attn.o_proj.weight"]))
        norm = f"{key}.post_attention_layernorm.weight"
        h = g.rms_norm(x, weights[norm], c["rms_norm_eps"], norm)
        gate = g.silu(g.linear(h, f"{key}.gate_proj", weights[f"{key}.mlp.gate_proj.weight"]))
        y = g.op("Mul", gate, g.linear(h, f"{key}.up_proj", weights[f"{key}.mlp.up_proj.weight"]))
        x = g.op("Add", x, g.linear(y, f"{key}.down_proj", weights[f"{key}.mlp.down_proj.weight"]))
    kept[max(taps)] = x
    width = c["hidden_size"] * len(taps)
    g.output(g.op("Concat", *(kept[tap] for tap in taps), axis=-1), "ctx", [1, length, width])


# ---------------------------------------------------------------------------------------------- transformer


class Transformer:
    def __init__(self, weights: Checkpoint, text: int, g: GraphWriter):
        self.w, self.g, self.text, self.c = weights, g, text, weights.config
        self.heads, self.d = self.c["num_attention_heads"], self.c["attention_head_dim"]
        self.width = self.heads * self.d
        self.mlp = int(self.width * self.c["mlp_ratio"])

    def linear(self, x: str, name: str) -> str:
        return self.g.linear(x, name, self.w[f"{name}.weight"])

    def time(self, sigma: str) -> str:
        g, channels = self.g, self.c["timestep_guidance_channels"]
        half = channels // 2
        frequencies = np.exp(np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half))
        time = g.op("Mul", g.as_f32(sigma), g.constant(np.array(1000, np.float32)))
        angles = g.op("Mul", g.reshape(time, 1, 1), g.constant(frequencies.reshape(1, half).astype(np.float32)))
        x = g.as_own(g.op("Concat", g.op("Cos", angles), g.op("Sin", angles), axis=-1))
        x = g.silu(self.linear(x, "time_guidance_embed.timestep_embedder.linear_1"))
        return self.linear(x, "time_guidance_embed.timestep_embedder.linear_2")

    def tables(self, text_ids: str, image_ids: str) -> tuple[str, str]:
        g = self.g
        ids = g.op("Concat", text_ids, image_ids, axis=1)
        parts = []
        for axis, dims in enumerate(self.c["axes_dims_rope"]):
            steps = np.arange(0, dims, 2, dtype=np.float64) / dims
            frequencies = np.repeat(float(self.c["rope_theta"]) ** -steps, 2).astype(np.float32)
            position = g.slice(ids, 2, axis, axis + 1)
            parts.append(g.op("Mul", position, g.constant(frequencies.reshape(1, 1, dims))))
        angles = g.op("Unsqueeze", g.op("Concat", *parts, axis=-1), g.ints(1))
        return g.op("Cos", angles), g.op("Sin", angles)

    def rotated(self, x: str, tables: tuple[str, str]) -> str:
        g = self.g
        pairs = g.reshape(g.as_f32(x), 1, self.heads, -1, self.d // 2, 2)
        first, second = g.split(pairs, -1, 1, 1)
        turned = g.op("Concat", g.op("Neg", second), first, axis=-1)
        whole, turned = (g.reshape(y, 1, self.heads, -1, self.d) for y in (pairs, turned))
        return g.as_own(g.op("Add", g.op("Mul", whole, tables[0]), g.op("Mul", turned, tables[1])))

    def heads_of(self, x: str, norm: str | None) -> str:
        x = self.g.reshape(x, 1, -1, self.heads, self.d)
        if norm:
            x = self.g.rms_norm(x, self.w[norm], 1e-6, norm)
        return self.g.transpose(x, 0, 2, 1, 3)

    def attention(self, q: str, k: str, v: str, tables: tuple[str, str]) -> str:
        """Scores in float32; the scale is a chain over q's shape, as the TorchScript exporter writes it."""
        g = self.g
        q, k = self.rotated(q, tables), self.rotated(k, tables)
        last = g.op("Slice", g.op("Shape", q), g.ints(-1), g.ints(2**63 - 1))
        root = g.op("Sqrt", g.cast(last, np.float32))
        scale = g.op("Sqrt", g.op("Div", g.constant(np.array([1], np.float32)), root))
        q = g.op("Mul", g.as_f32(q), scale)
        k = g.op("Mul", g.transpose(g.as_f32(k), 0, 1, 3, 2), scale)
        scores = g.as_own(g.op("Softmax", g.op("MatMul", q, k), axis=-1))
        return g.reshape(g.transpose(g.op("MatMul", scores, v), 0, 2, 1, 3), 1, -1, self.width)

    def modulated(self, x: str, shift: str, scale: str) -> str:
        g = self.g
        normed = g.layer_norm(x, self.width, 1e-6)
        return g.op("Add", g.op("Mul", normed, g.op("Add", scale, g.number(1))), shift)

    def modulation(self, vec: str, name: str, count: int) -> list[str]:
        parts = self.linear(self.g.silu(vec), f"{name}.linear")
        parts = self.g.op("Unsqueeze", parts, self.g.ints(1))
        return self.g.split(parts, -1, *[self.width] * count)

    def gated(self, x: str) -> str:
        gate, up = self.g.split(x, -1, self.mlp, self.mlp)
        return self.g.op("Mul", self.g.silu(gate), up)

    def added(self, x: str, gate: str, y: str) -> str:
        return self.g.op("Add", x, self.g.op("Mul", gate, y))

    def double_block(self, index: int, img: str, txt: str, mods: tuple[list[str], list[str]], tables: tuple) -> tuple:
        g, key = self.g, f"transformer_blocks.{index}"
        names = dict(img=("to_q", "to_k", "to_v", "norm_q", "norm_k"))
        names["txt"] = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")
        parts = {}
        for side, x, mod in (("img", img, mods[0]), ("txt", txt, mods[1])):
            y = self.modulated(x, mod[0], mod[1])
            q, k, v, norm_q, norm_k = (f"{key}.attn.{name}" for name in names[side])
            parts[side] = (
                self.heads_of(self.linear(y, q), f"{norm_q}.weight"),
                self.heads_of(self.linear(y, k), f"{norm_k}.weight"),
                self.heads_of(self.linear(y, v), None),
            )
        q, k, v = (g.op("Concat", t, i, axis=2) for t, i in zip(parts["txt"], parts["img"]))
        y = self.attention(q, k, v, tables)
        of_text = g.slice(y, 1, 0, self.text)
        of_image = g.slice(y, 1, self.text, 2**63 - 1)
        results = []
        for x, y, mod, out, mlp in (
            (img, of_image, mods[0], "attn.to_out.0", "ff"),
            (txt, of_text, mods[1], "attn.to_add_out", "ff_context"),
        ):
            x = self.added(x, mod[2], self.linear(y, f"{key}.{out}"))
            y = self.gated(self.linear(self.modulated(x, mod[3], mod[4]), f"{key}.{mlp}.linear_in"))
            results.append(self.added(x, mod[5], self.linear(y, f"{key}.{mlp}.linear_out")))
        return results[0], results[1]

    def single_block(self, index: int, z: str, mod: list[str], tables: tuple) -> str:
        g, key = self.g, f"single_transformer_blocks.{index}.attn"
        y = self.linear(self.modulated(z, mod[0], mod[1]), f"{key}.to_qkv_mlp_proj")
        q, k, v, rest = g.split(y, -1, self.width, self.width, self.width, 2 * self.mlp)
        q = self.heads_of(q, f"{key}.norm_q.weight")
        k = self.heads_of(k, f"{key}.norm_k.weight")
        attended = self.attention(q, k, self.heads_of(v, None), tables)
        y = g.op("Concat", attended, self.gated(rest), axis=-1)
        return self.added(z, mod[2], self.linear(y, f"{key}.to_out"))

    def write(self) -> None:
        g, c = self.g, self.c
        channels = c["in_channels"]
        x = g.float_input("x", [1, "image_seq", channels])
        image_ids = g.input("x_ids", TensorProto.FLOAT, [1, "image_seq", 4])
        sigma = g.float_input("timesteps", [1])
        ctx = g.float_input("ctx", [1, self.text, c["joint_attention_dim"]])
        text_ids = g.input("ctx_ids", TensorProto.FLOAT, [1, self.text, 4])
        vec = self.time(sigma)
        tables = self.tables(text_ids, image_ids)
        mods = tuple(self.modulation(vec, f"double_stream_modulation_{side}", 6) for side in ("img", "txt"))
        single = self.modulation(vec, "single_stream_modulation", 3)
        img, txt = self.linear(x, "x_embedder"), self.linear(ctx, "context_embedder")
        for index in range(c["num_layers"]):
            img, txt = self.double_block(index, img, txt, mods, tables)
        z = g.op("Concat", txt, img, axis=1)
        for index in range(c["num_single_layers"]):
            z = self.single_block(index, z, single, tables)
        z = g.slice(z, 1, self.text, 2**63 - 1)
        scale, shift = self.modulation(vec, "norm_out", 2)
        g.output(self.linear(self.modulated(z, shift, scale), "proj_out"), "pred", [1, "image_seq", channels])


# ---------------------------------------------------------------------------------------------- image decoder


class Decoder:
    def __init__(self, weights: Checkpoint, dtype: type):
        self.w, self.c, self.dtype = weights, weights.config, dtype
        self.channels = list(reversed(self.c.get("decoder_block_out_channels") or self.c["block_out_channels"]))
        self.middle = self.channels[0]

    def graph(self, name: str) -> GraphWriter:
        self.g = GraphWriter(name, self.dtype, "float")
        return self.g

    def named(self, name: str) -> str:
        return self.g.constant(self.w[name].astype(self.dtype), name)

    def conv(self, x: str, name: str) -> str:
        weight = self.w[f"{name}.weight"]
        pad = weight.shape[-1] // 2
        return self.g.op("Conv", x, self.named(f"{name}.weight"), self.named(f"{name}.bias"), pads=[pad] * 4)

    def group_norm(self, x: str, name: str) -> str:
        g, groups = self.g, self.c["norm_num_groups"]
        shape = g.op("Shape", x)
        flat = g.reshape(x, 0, groups, -1)
        ones, zeros = (g.constant(np.full(groups, value, self.dtype)) for value in (1, 0))
        flat = g.op("InstanceNormalization", flat, ones, zeros, epsilon=1e-6)
        y = g.op("Reshape", flat, shape)
        weight, bias = (self.w[f"{name}.{part}"].astype(self.dtype).reshape(-1, 1, 1) for part in ("weight", "bias"))
        y = g.op("Mul", y, g.constant(weight, f"{name}.weight"))
        return g.op("Add", y, g.constant(bias, f"{name}.bias"))

    def resnet(self, x: str, name: str) -> str:
        y = self.conv(self.g.silu(self.group_norm(x, f"{name}.norm1")), f"{name}.conv1")
        y = self.conv(self.g.silu(self.group_norm(y, f"{name}.norm2")), f"{name}.conv2")
        if f"{name}.conv_shortcut.weight" in self.w.tensors:
            x = self.conv(x, f"{name}.conv_shortcut")
        return self.g.op("Add", x, y)

    def linear(self, x: str, name: str) -> str:
        weight = self.g.constant(self.w[f"{name}.weight"].T.astype(self.dtype), f"{name}.weight")
        return self.g.op("Add", self.g.op("MatMul", x, weight), self.named(f"{name}.bias"))

    def latents(self) -> str:
        """z [1, 4c, h, w] to [1, c, 2h, 2w]: the batch norm undone, then unpacked."""
        g, packed = self.g, 4 * self.c["latent_channels"]
        z = g.float_input("z", [1, packed, "latent_height", "latent_width"])
        deviation = np.sqrt(self.w["bn.running_var"] + np.float32(self.c["batch_norm_eps"]))
        z = g.op("Mul", z, g.constant(deviation.reshape(1, -1, 1, 1).astype(self.dtype)))
        z = g.op("Add", z, g.constant(self.w["bn.running_mean"].reshape(1, -1, 1, 1).astype(self.dtype)))
        return g.op("DepthToSpace", z, blocksize=2, mode="CRD")

    def start(self) -> str:
        x = self.conv(self.conv(self.latents(), "post_quant_conv"), "decoder.conv_in")
        return self.resnet(x, "decoder.mid_block.resnets.0")

    def q_k_v(self, x: str, scaled: str) -> list[str]:
        """q [1,1,T,C], kt [1,1,C,T], v [1,1,T,C]; with the split scale in q and kt, or raw."""
        g, name = self.g, "decoder.mid_block.attentions.0"
        y = self.group_norm(x, f"{name}.group_norm")
        y = g.reshape(g.transpose(y, 0, 2, 3, 1), 1, 1, -1, self.middle)
        q, k, v = (self.linear(y, f"{name}.to_{part}") for part in "qkv")
        k = g.transpose(k, 0, 1, 3, 2)
        if scaled == "split":
            last = g.op("Slice", g.op("Shape", q), g.ints(-1), g.ints(2**63 - 1))
            root = g.op("Sqrt", g.cast(last, self.dtype))
            one = g.constant(np.array([1], np.float32))
            scale = g.op("Sqrt", g.as_own(g.op("Div", one, g.as_f32(root))))
            q, k = g.op("Mul", q, scale), g.op("Mul", k, scale)
        return [q, k, v]

    def attended(self, q: str, kt: str, v: str, scaled: str) -> str:
        g = self.g
        scores = g.op("MatMul", q, kt)
        if scaled == "chunk":
            scores = g.op("Mul", scores, g.number(self.middle**-0.5))
        return g.op("MatMul", g.op("Softmax", scores, axis=-1), v)

    def end(self, x: str, attended: str) -> str:
        """After the attention: x [1,C,h,w] and its result [1,1,T,C]."""
        g = self.g
        y = self.linear(attended, "decoder.mid_block.attentions.0.to_out.0")
        y = g.op("Reshape", g.transpose(y, 0, 1, 3, 2), g.op("Shape", x))
        return self.resnet(g.op("Add", x, y), "decoder.mid_block.resnets.1")

    def levels(self, x: str, start: int, end: int, head: bool = True) -> str:
        """Up blocks `start` to `end`; without `head`, the last one's upsampling is left to the next stage."""
        for level in range(start, end):
            x = self.resnets(x, level)
            if level + 1 < len(self.channels) and (head or level + 1 < end):
                x = self.upsampled(x, level)
        return x

    def resnets(self, x: str, level: int) -> str:
        for layer in range(self.c["layers_per_block"] + 1):
            x = self.resnet(x, f"decoder.up_blocks.{level}.resnets.{layer}")
        return x

    def upsampled(self, x: str, level: int) -> str:
        scales = self.g.constant(np.array([1, 1, 2, 2], np.float32))
        x = self.g.op("Resize", x, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
        return self.conv(x, f"decoder.up_blocks.{level}.upsamplers.0.conv")

    def picture(self, x: str) -> str:
        return self.conv(self.g.silu(self.group_norm(x, "decoder.conv_norm_out")), "decoder.conv_out")


def decoder_graphs(weights: Checkpoint, dtype: type, scaled: str, split: bool) -> dict[str, GraphWriter]:
    """By key of the config."""
    d = Decoder(weights, dtype)
    if not split:
        g = d.graph("vae_decoder")
        x = d.start()
        x = d.end(x, d.attended(*d.q_k_v(x, "split"), "split"))
        g.output(d.picture(d.levels(x, 0, len(d.channels))), "image", [1, 3, "height", "width"])
        return {"vae_decoder": g}
    graphs, c = {}, d.middle
    g = graphs["vae_decoder_pre"] = d.graph("vae_decoder_pre")
    x = d.start()
    q, kt, v = d.q_k_v(x, scaled)
    g.output(x, RESIDUAL, [1, c, "height", "width"])
    for value, name, shape in ((q, Q, [1, 1, "kv_seq", c]), (kt, KT, [1, 1, c, "kv_seq"]), (v, V, [1, 1, "kv_seq", c])):
        g.output(value, name, shape)
    g = graphs["vae_decoder_attn_chunk"] = d.graph("vae_decoder_attn_chunk")
    q = g.float_input("q_chunk", [1, 1, QUERY_ROWS, c])
    kt, v = g.float_input("kt", [1, 1, c, "kv_seq"]), g.float_input("v", [1, 1, "kv_seq", c])
    g.output(d.attended(q, kt, v, scaled), "attn_chunk", [1, 1, QUERY_ROWS, c])

    last = len(d.channels) - 1
    wide, narrow = d.channels[last - 1], d.channels[last]
    names = [f"/decoder/up.{place}_output_0" for place in ("1/block.2/Add", "0/block.0/Add", "0/block.2/Add")]

    def stage(index: int, name: str, channels: int) -> tuple[GraphWriter, str]:
        g = graphs[f"vae_decoder_post_stage{index}"] = d.graph(f"vae_decoder_post_stage{index}")
        return g, g.float_input(name, [1, channels, "height", "width"])

    g, x = stage(0, RESIDUAL, c)
    attended = g.float_input(ATTENDED, [1, 1, "kv_seq", c])
    x = d.levels(d.end(x, attended), 0, last, head=False)
    g.output(x, names[0], [1, wide, "out_height", "out_width"])
    g, x = stage(1, names[0], wide)
    x = d.resnet(d.upsampled(x, last - 1), f"decoder.up_blocks.{last}.resnets.0")
    g.output(x, names[1], [1, narrow, "out_height", "out_width"])
    g, x = stage(2, names[1], narrow)
    for layer in range(1, d.c["layers_per_block"] + 1):
        x = d.resnet(x, f"decoder.up_blocks.{last}.resnets.{layer}")
    g.output(x, names[2], [1, narrow, "height", "width"])
    g, x = stage(3, names[2], narrow)
    g.output(d.picture(x), "image", [1, 3, "height", "width"])
    return graphs


# ---------------------------------------------------------------------------------------------- files


def write_json(path: Path, value: object) -> None:
    """Two spaces, and a newline at the end: the layout's own bytes."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_graph(bundle: Path, g: GraphWriter, file: str, shards: str | None) -> dict:
    """Writes a graph; its larger tensors into two data files listed in a manifest, or into the graph. Returns the entry."""
    model = g.model()
    entry = dict(file=file, inputs=[i.name for i in model.graph.input], outputs=[o.name for o in model.graph.output])
    if shards:
        large = [t for t in model.graph.initializer if len(t.raw_data) >= 1024]
        total, done, files = sum(len(t.raw_data) for t in large), 0, {}
        for tensor in large:
            name = f"{shards}-{1 + (2 * done >= total):05}.onnx_data"
            data = files.setdefault(name, bytearray())
            data.extend(bytes(-len(data) % 64))
            place = dict(location=name, offset=len(data), length=len(tensor.raw_data))
            data.extend(tensor.raw_data)
            done += len(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
        for name, data in files.items():
            (bundle / name).write_bytes(data)
        entry["manifest"] = f"{shards}-manifest.json"
        write_json(bundle / entry["manifest"], list(files))
    (bundle / file).write_bytes(model.SerializeToString(deterministic=True))
    return entry


def write_bundle(args: argparse.Namespace) -> None:
    source, bundle = args.checkpoint, args.bundle
    (bundle / "tokenizer").mkdir(parents=True)
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        shutil.copyfile(source / "tokenizer" / name, bundle / "tokenizer" / name)
    # Weights that are not quantised, and all arithmetic, are float16 in the published bundle.
    dtype = np.float32 if args.dtype == "f32" else np.float16
    text, transformer, vae = (Checkpoint(source / name) for name in ("text_encoder", "transformer", "vae"))
    taps = [int(tap) for tap in args.taps.split(",")]
    models = {}

    g = GraphWriter("text_encoder", dtype, args.weights)
    text_encoder(text, taps, args.text_length, g)
    models["text_encoder"] = write_graph(bundle, g, f"tiny-text-encoder-{args.weights}.onnx", f"text-encoder-{args.weights}")
    g = GraphWriter("transformer", dtype, args.weights, accuracy_level=4 if args.weights == "q4" else 0)
    Transformer(transformer, args.text_length, g).write()
    models["transformer"] = write_graph(bundle, g, f"tiny-transformer-{args.weights}.onnx", f"transformer-{args.weights}")
    if args.weights == "q4":
        for name, level in (("text_encoder", 0), ("transformer", 4)):
            models[name]["quantization"] = dict(algorithm="rtn", bits=4, block_size=16, accuracy_level=level)
    decoder = decoder_graphs(vae, dtype, args.scale, not args.whole_decoder)
    for key, g in decoder.items():
        models[key] = write_graph(bundle, g, f"tiny-{key.replace('_', '-')}-{args.dtype}.onnx", None)
    if not args.whole_decoder:
        width = Decoder(vae, dtype).middle
        models["vae_decoder_attn_chunk"].update(head_dim=width, chunk_size=QUERY_ROWS)
        models["vae_decoder_post_stage0"].update(residual_input=RESIDUAL, attn_input=ATTENDED)
    for entry in models.values():
        entry["graph_optimization_level"] = "disabled"
        if args.dtype == "f32":
            entry["activation_dtype"] = "float32"
    side = vae.config.get("sample_size", 256)
    config = dict(
        model_name="tiny-klein", model_variant=args.weights, text_seq_len=args.text_length,
        context_dim=transformer.config["joint_attention_dim"], latent_channels=transformer.config["in_channels"],
        latent_downsample=2 ** len(vae.config["block_out_channels"]), num_steps=4, default_width=side,
        default_height=side, context_clip=0, models=models,
    )  # fmt: skip
    if not args.whole_decoder:
        config["vae_decoder_post_stage_keys"] = [key for key in decoder if "post_stage" in key]
    write_json(bundle / CONFIG, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("bundle", type=Path, help="folder to make")
    parser.add_argument("--taps", required=True, help="layers of the text encoder whose output is kept: 9,18,27")
    parser.add_argument("--text-length", type=int, default=512)
    parser.add_argument("--weights", choices=["q4", "float"], default="q4", help="q4: block 16 with zero points")
    parser.add_argument("--dtype", choices=["f16", "f32"], default="f16", help="of activations and other weights")
    parser.add_argument("--scale", choices=["split", "chunk", "none"], default="split",
                        help="where 1/sqrt(d) of the decoder's attention is: in q and kt, in the chunk's graph, nowhere")  # fmt: skip
    parser.add_argument("--whole-decoder", action="store_true", help="one graph from z to image")
    write_bundle(parser.parse_args())


if __name__ == "__main__":
    main()
