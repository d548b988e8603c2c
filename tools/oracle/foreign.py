"""Graphs as torch exports them: small ones, with inputs and torch's own outputs.

    python tools/oracle/foreign.py tests/fixtures/foreign

`checkpoint.json` there is a procedural spec (see procedural.py); its modules are exported whole, so that the same
checkpoint can also be exported by this project and the two compared. `patterns` are single computations that graph
rewriting must know. Every file is run once on ONNX Runtime's CPU provider and compared with torch.

========================  ==========================================================================================
`text_encoder/`           `input_ids`, `attention_mask` [1,16] int64 -> `ctx` [1,16,64]: hidden states 1 and 2 side by side
`transformer/`            `x` [1,image_seq,32], `x_ids` [1,image_seq,4], `timesteps` [1] (sigma), `ctx` [1,text_seq,64],
                          `ctx_ids` [1,text_seq,4] -> `pred` [1,image_seq,32]; rotary tables inside
`vae/`                    `z` [1,32,latent_height,latent_width] -> `image` [1,3,4*latent_height,4*latent_width];
                          batch-norm and unpatchify inside
`patterns/<name>/`        inputs as `PATTERNS` names them -> `y`
========================  ==========================================================================================

`patterns/attention_masked/legacy_f16` returns f32: the legacy exporter widens masked attention and leaves it so.

A folder holds each tensor once as `.npy`, in f32 where it is a floating-point one; a model that declares f16 takes it
rounded (values of inputs are exact in f16). `<output>_f16.npy` is what torch computes in f16. The models:

====================  ==============================================================================================
`legacy`              TorchScript exporter, opset 17, constants folded
`legacy_unfolded`     the same without constant folding
`dynamo`              torch.export, opset 20
`..._f16`             the module converted with `.half()`; position ids stay f32
====================  ==============================================================================================

`transformer/dynamo.onnx` has its weights in `dynamo.onnx.data`, all other files are whole. Doc strings and metadata,
which name the exporting machine's files, are removed; nothing else is touched.

The legacy exporter knows neither RMSNorm nor f64 rotary tables on every device, so people replace both before they
export: `legacy_friendly` does what they do. torch.export gets the module as it is.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from diffusers.models.transformers import transformer_flux2
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from procedural import fnv1a, mix, tensor, unit, write_checkpoint

TAPS = (1, 2)
TEXT_LENGTH = 16
SEED = 31
# Largest difference between torch and ONNX Runtime, relative to the largest output.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-3}


# ---------------------------------------------------------------------------------------------- the checkpoint's modules


class TextEncoder(nn.Module):
    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.m = model.model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out = self.m(input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[tap] for tap in TAPS], dim=-1)


class Transformer(nn.Module):
    def __init__(self, model: Flux2Transformer2DModel) -> None:
        super().__init__()
        self.m = model

    def forward(self, x: Tensor, x_ids: Tensor, timesteps: Tensor, ctx: Tensor, ctx_ids: Tensor) -> Tensor:
        return self.m(x, ctx, timesteps, x_ids, ctx_ids, return_dict=False)[0]


class VaeDecoder(nn.Module):
    def __init__(self, model: AutoencoderKLFlux2) -> None:
        super().__init__()
        self.m = model

    def forward(self, z: Tensor) -> Tensor:
        bn = self.m.bn
        std = torch.sqrt(bn.running_var.view(1, -1, 1, 1) + self.m.config.batch_norm_eps)
        z = z * std + bn.running_mean.view(1, -1, 1, 1)
        batch, channels, height, width = z.shape
        z = z.reshape(batch, channels // 4, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)
        z = z.reshape(batch, channels // 4, 2 * height, 2 * width)
        return self.m.decode(z, return_dict=False)[0]


class ManualRMSNorm(nn.Module):
    """RMSNorm as Qwen and LLaMA spell it."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def legacy_friendly(module: nn.Module) -> nn.Module:
    """A copy with RMSNorm spelled out; rotary tables in f32 (see `f32_rotary_tables`)."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.RMSNorm):
                setattr(parent, name, ManualRMSNorm(child.weight.detach().clone(), child.eps))
    return module


class f32_rotary_tables:
    """While active, diffusers computes rotary tables in f32, as it does on devices without f64."""

    def __enter__(self) -> None:
        self.original = transformer_flux2.maybe_adjust_dtype_for_device
        transformer_flux2.maybe_adjust_dtype_for_device = lambda _dtype, _device: torch.float32

    def __exit__(self, *_error) -> None:
        transformer_flux2.maybe_adjust_dtype_for_device = self.original


# ---------------------------------------------------------------------------------------------- exporting


@dataclass
class Case:
    """A module, what goes in (input name -> tensor; dynamic axes by name), and which exports to write."""

    folder: str
    module: nn.Module
    inputs: dict[str, Tensor]
    output: str
    axes: dict[str, dict[int, str]] = field(default_factory=dict)
    output_axes: dict[int, str] = field(default_factory=dict)
    exports: tuple[str, ...] = ("legacy", "legacy_f16", "dynamo", "dynamo_f16")
    external: tuple[str, ...] = ()
    # torch.export may fix an axis that the legacy exporter leaves open.
    dynamo_axes: dict[str, dict[int, str]] | None = None
    keep_f32: tuple[str, ...] = ()


def export_legacy(case: Case, module: nn.Module, inputs: dict[str, Tensor], path: Path, fold: bool) -> None:
    with f32_rotary_tables():
        torch.onnx.export(
            legacy_friendly(module),
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=[case.output],
            dynamic_axes={**case.axes, case.output: case.output_axes},
            opset_version=17,
            do_constant_folding=fold,
            dynamo=False,
        )


def export_dynamo(case: Case, module: nn.Module, inputs: dict[str, Tensor], path: Path, external: bool) -> None:
    axes = case.axes if case.dynamo_axes is None else case.dynamo_axes
    dims = {name: torch.export.Dim(name, min=2, max=4096) for per in axes.values() for name in per.values()}
    shapes = tuple({axis: dims[name] for axis, name in axes.get(key, {}).items()} for key in inputs)
    torch.onnx.export(
        module,
        tuple(inputs.values()),
        str(path),
        input_names=list(inputs),
        output_names=[case.output],
        dynamic_shapes=shapes if any(shapes) else None,
        opset_version=20,
        external_data=external,
        dynamo=True,
        verbose=False,
    )


def strip(path: Path) -> None:
    """Remove doc strings and metadata; the order, names and attributes of everything else stay."""
    model = onnx.load(path, load_external_data=False)

    def clear(message) -> None:
        for name in ("doc_string", "metadata_props", "producer_version"):
            if name in message.DESCRIPTOR.fields_by_name:
                message.ClearField(name)
        for descriptor, value in message.ListFields():
            if descriptor.type == descriptor.TYPE_MESSAGE and descriptor.name != "external_data":
                for part in value if hasattr(value, "__len__") else [value]:
                    clear(part)

    clear(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def run(path: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The output on ONNX Runtime's CPU provider, unoptimised."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})[0]


def write(case: Case, root: Path) -> None:
    folder = root / case.folder
    folder.mkdir(parents=True, exist_ok=True)
    case.module.eval()
    for name, value in case.inputs.items():
        np.save(folder / f"{name}.npy", value.numpy())
    with f32_rotary_tables():
        reference = case.module(**case.inputs)
    np.save(folder / f"{case.output}.npy", reference.numpy())

    for export in case.exports:
        exporter, *rest = export.split("_")
        dtype = torch.float16 if "f16" in rest else torch.float32
        module, inputs, expected = case.module, case.inputs, reference
        if dtype == torch.float16:
            module = copy.deepcopy(case.module).half()
            inputs = {
                name: value.half() if value.is_floating_point() and name not in case.keep_f32 else value
                for name, value in case.inputs.items()
            }
            with f32_rotary_tables():
                expected = module(**inputs)
            np.save(folder / f"{case.output}_f16.npy", expected.numpy())
        path = folder / f"{export}.onnx"
        if exporter == "legacy":
            export_legacy(case, module, inputs, path, fold="unfolded" not in rest)
        else:
            export_dynamo(case, module, inputs, path, external=export in case.external)
        strip(path)

        found = torch.from_numpy(run(path, {name: value.numpy() for name, value in inputs.items()}))
        if found.shape != expected.shape:
            raise ValueError(f"{path}: {found.shape}, torch {expected.shape}")
        scale = expected.float().abs().max()
        error = ((found.float() - expected.float()).abs().max() / scale).item()
        print(f"{str(path.relative_to(root)):46} {path.stat().st_size:7} B  torch - onnxruntime {error:.1e}", flush=True)
        if not error <= TOLERANCE[dtype]:
            raise ValueError(f"{path}: torch and onnxruntime differ by {error:.1e}")


# ---------------------------------------------------------------------------------------------- inputs


def sample(name: str, *shape: int) -> Tensor:
    """Values in [-2, 2) with eleven bits, exact in f16."""
    values = unit(SEED, name, int(np.prod(shape)))
    return torch.from_numpy(np.round(values * 1024) / 512).float().reshape(shape)


def integers(name: str, below: int, *shape: int) -> Tensor:
    key = mix(mix(SEED) ^ fnv1a(name.encode()))
    values = [mix(key + i) % below for i in range(int(np.prod(shape)))]
    return torch.tensor(values, dtype=torch.int64).reshape(shape)


def positions(rows: int, columns: int) -> Tensor:
    """Position ids of an image's tokens: (t, row, column, text position)."""
    grid = torch.cartesian_prod(*(torch.arange(n) for n in (1, rows, columns, 1)))
    return grid.float().unsqueeze(0)


def modules(spec: dict) -> list[Case]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(spec, folder)
        text = Qwen3ForCausalLM.from_pretrained(folder / "text_encoder", dtype=torch.float32, attn_implementation="sdpa")
        transformer = Flux2Transformer2DModel.from_pretrained(folder / "transformer", low_cpu_mem_usage=False)
        vae = AutoencoderKLFlux2.from_pretrained(folder / "vae", low_cpu_mem_usage=False)
    mask = (torch.arange(TEXT_LENGTH) < 11).long().unsqueeze(0)
    ids = torch.where(mask > 0, integers("input_ids", 256, 1, TEXT_LENGTH), 256)
    text_positions = F.pad(torch.arange(TEXT_LENGTH).float().unsqueeze(-1), (3, 0)).unsqueeze(0)
    image = {1: "image_seq"}
    tokens = {1: "text_seq"}
    return [
        Case(
            "text_encoder", TextEncoder(text), dict(input_ids=ids, attention_mask=mask), "ctx",
            exports=("legacy_unfolded", "dynamo"),
        ),
        Case(
            "transformer", Transformer(transformer),
            dict(
                x=sample("x", 1, 12, 32), x_ids=positions(3, 4), timesteps=torch.tensor([0.625]),
                ctx=sample("ctx", 1, TEXT_LENGTH, 64), ctx_ids=text_positions,
            ),
            "pred", dict(x=image, x_ids=image, ctx=tokens, ctx_ids=tokens), image,
            exports=("legacy", "legacy_unfolded_f16", "dynamo"), external=("dynamo",),
            dynamo_axes=dict(x=image, x_ids=image), keep_f32=("x_ids", "ctx_ids"),
        ),
        Case(
            "vae", VaeDecoder(vae), dict(z=sample("z", 1, 32, 3, 4)), "image",
            dict(z={2: "latent_height", 3: "latent_width"}), {2: "height", 3: "width"},
            exports=("legacy", "dynamo_f16"),
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- patterns


class LayerNormManual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(32)), nn.Parameter(torch.empty(32))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class LayerNormModulated(nn.Module):
    """Adaptive layer norm: no weights, scale and shift from the time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, eps=1e-6, elementwise_affine=False)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (1 + scale) * self.norm(x) + shift


class SwigluSplit(nn.Module):
    """Gate and value as halves of one tensor, the gate first."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


class SwigluTwo(nn.Module):
    """Gate and value as two linears over one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 12, bias=False), nn.Linear(32, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


class RopeTables(nn.Module):
    """Angles of three axes in f64, each twice in a row: the tables of FLUX.2. ids [seq,3] -> cosines, then sines."""

    def forward(self, ids: Tensor) -> Tensor:
        tables = []
        for axis in range(3):
            frequencies = 1.0 / 2000.0 ** (torch.arange(0, 4, 2, dtype=torch.float64) / 4)
            angles = torch.outer(ids[:, axis], frequencies)
            tables.append([t.repeat_interleave(2, dim=1).float() for t in (angles.cos(), angles.sin())])
        return torch.cat([torch.cat(each, dim=-1) for each in zip(*tables)], dim=-1)


class RopeInterleaved(nn.Module):
    """Pairs (0,1), (2,3), ... are turned; x [1,seq,heads,head], tables [seq,head] with each angle twice in a row."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[None, :, None, :], sin[None, :, None, :]
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
        return (x.float() * cos + turned.float() * sin).to(x.dtype)


class RopeSplitHalf(nn.Module):
    """Pairs (i, i + head/2) are turned; x [1,heads,seq,head], tables [1,seq,head] with the angles twice."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + turned * sin


class RopeComplex(nn.Module):
    """Pairs (0,1), (2,3), ... as complex numbers, written with reals; x [1,seq,heads,head], tables [seq,head/2]."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[None, :, None, :], sin[None, :, None, :]
        real, imaginary = x[..., 0::2], x[..., 1::2]
        pairs = torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)
        return pairs.flatten(-2)


class Attention(nn.Module):
    """Heads first: [1,heads,seq,head]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class AttentionMasked(nn.Module):
    """With a boolean mask [1,1,queries,keys], true where a key may be seen."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class AttentionBias(nn.Module):
    """With a mask that is added, -inf where a key may not be seen."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        bias = torch.zeros_like(q[:, :1, :, :1]).expand(mask.shape).masked_fill(~mask, float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class AttentionManual(nn.Module):
    """The arithmetic spelled out; q, k and v side by side in one tensor [1,seq,3*heads*head]."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in x.chunk(3, dim=-1))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 8**-0.5, dim=-1)
        return torch.matmul(weights, v).transpose(1, 2).flatten(2)


class AttentionGrouped(nn.Module):
    """Three query heads share one key-value head, as in Qwen and LLaMA."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, head = k.shape
        repeated = [t[:, :, None].expand(batch, heads, 3, length, head).reshape(batch, 3, length, head) for t in (k, v)]
        return F.scaled_dot_product_attention(q, *repeated)


class Upsample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class CausalConv3d(nn.Module):
    """A convolution over time that looks back only; with one frame all but its last tap meet padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (1, 1, 1, 1, 2, 0)))


class LinearShared(nn.Module):
    """One weight under two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.silu(self.linear(x)))


class LinearTied(nn.Module):
    """An embedding that is also the last linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.embedding(ids), self.embedding.weight)


class ConcatMany(nn.Module):
    """More inputs than a WebGPU shader may bind."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * i for i in range(1, 13)], dim=-1)


class GatedResidual(nn.Module):
    """x + gate * f(x), with the clamp that half precision gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x + gate * self.linear(x)
        return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def patterns() -> list[Case]:
    seq, image = {1: "seq"}, {2: "height", 3: "width"}
    tokens = dict(x=sample("tokens", 1, 6, 32))
    pixels = dict(x=sample("pixels", 1, 8, 4, 5))
    rows = dict(x=sample("rows", 2, 32))
    heads = {name: sample(name, 1, 3, 5, 16) for name in "qkv"}
    grouped = dict(q=heads["q"], k=sample("k1", 1, 1, 5, 16), v=sample("v1", 1, 1, 5, 16))
    mask = dict(mask=torch.ones(5, 5, dtype=torch.bool).tril()[None, None])
    by_head = {name: {2: "seq"} for name in "qkv"}
    angles = sample("angles", 5, 4)
    pairs = torch.repeat_interleave(angles, 2, dim=1)
    halves = torch.cat([angles, angles], dim=1)[None]
    gate = {name: sample(name, 1, 1, 32) for name in ("gate", "scale", "shift")}

    def tables(of: Tensor) -> dict[str, Tensor]:
        return {name: f(of).half().float() for name, f in (("cos", torch.cos), ("sin", torch.sin))}

    def case(name: str, module: nn.Module, inputs: dict[str, Tensor], axes=None, out=None, **options) -> Case:
        for parameter, value in module.named_parameters():
            _, data = tensor(SEED, "f32", f"{name}.{parameter}", tuple(value.shape))
            value.data = torch.from_numpy(np.frombuffer(data, "<f4").copy()).reshape(value.shape)
        return Case(f"patterns/{name}", module, inputs, "y", axes or {}, out or {}, **options)

    each = dict(x=seq)
    unfolded = ("legacy", "legacy_unfolded", "legacy_f16", "dynamo", "dynamo_f16")
    return [
        case("layer_norm", nn.LayerNorm(32), dict(input=tokens["x"]), dict(input=seq), seq),
        case("layer_norm_manual", LayerNormManual(), tokens, each, seq),
        case("layer_norm_modulated", LayerNormModulated(), dict(**tokens, scale=gate["scale"], shift=gate["shift"]), each, seq),
        case("rms_norm", nn.RMSNorm(32, eps=1e-6), tokens, each, seq, exports=("dynamo", "dynamo_f16")),
        case("rms_norm_manual", ManualRMSNorm(torch.empty(32), 1e-6), tokens, each, seq),
        case("group_norm", nn.GroupNorm(4, 8), dict(input=pixels["x"]), dict(input=image), image),
        case("silu", nn.SiLU(), dict(input=tokens["x"]), dict(input=seq), seq),
        case("swiglu_split", SwigluSplit(), tokens, each, seq),
        case("swiglu_two", SwigluTwo(), tokens, each, seq),
        case(
            "rope_tables", RopeTables(), dict(ids=positions(2, 3)[0, :, :3]), dict(ids={0: "seq"}), {0: "seq"},
            exports=("legacy", "legacy_unfolded", "dynamo"),
        ),
        case(
            "rope_interleaved", RopeInterleaved(), dict(x=sample("turned", 1, 5, 3, 8), **tables(pairs)),
            dict(x=seq, cos={0: "seq"}, sin={0: "seq"}), seq, keep_f32=("cos", "sin"),
        ),
        case(
            "rope_split_half", RopeSplitHalf(), dict(x=sample("turned", 1, 3, 5, 8), **tables(halves)),
            dict(x={2: "seq"}, cos=seq, sin=seq), {2: "seq"},
        ),
        case(
            "rope_complex", RopeComplex(), dict(x=sample("turned", 1, 5, 3, 8), **tables(angles)),
            dict(x=seq, cos={0: "seq"}, sin={0: "seq"}), seq,
        ),
        case("attention", Attention(), heads, by_head, {2: "seq"}),
        case("attention_masked", AttentionMasked(), {**heads, **mask}, {**by_head, "mask": {2: "seq", 3: "seq"}}, {2: "seq"}),
        case("attention_bias", AttentionBias(), {**heads, **mask}, {**by_head, "mask": {2: "seq", 3: "seq"}}, {2: "seq"}),
        case("attention_manual", AttentionManual(), dict(x=sample("qkv", 1, 6, 72)), each, seq),
        case("attention_grouped", AttentionGrouped(), grouped, by_head, {2: "seq"}),
        case("upsample", Upsample(), dict(x=sample("small", 1, 4, 3, 2)), dict(x=image), image),
        case("causal_conv3d", CausalConv3d(), dict(x=sample("frame", 1, 4, 1, 4, 3)), dict(x={3: "height", 4: "width"}), {3: "height", 4: "width"}),
        case("linear_gemm", nn.Linear(32, 12), dict(input=rows["x"]), exports=unfolded),
        case("linear_bias", nn.Linear(32, 12), dict(input=tokens["x"]), dict(input=seq), seq, exports=unfolded),
        case("linear_shared", LinearShared(), tokens, each, seq, exports=unfolded),
        case("linear_tied", LinearTied(), dict(ids=integers("ids", 12, 1, 6)), dict(ids=seq), seq, exports=unfolded),
        case("concat_many", ConcatMany(), tokens, each, seq),
        case("gated_residual", GatedResidual(), dict(**tokens, gate=gate["gate"]), each, seq),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Export the foreign-graph fixtures with torch.")
    parser.add_argument("folder", type=Path, help="folder with checkpoint.json")
    parser.add_argument("--only", default="", help="folders that start with this")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    spec = json.loads((args.folder / "checkpoint.json").read_text(encoding="utf-8"))
    for case in modules(spec) + patterns():
        if case.folder.startswith(args.only):
            write(case, args.folder)


if __name__ == "__main__":
    main()
