"""Random bf16 weights of sane scale, and the safetensors files that hold them.

Linear layers and convolutions are uniform with a standard deviation of 1/sqrt(inputs), half of that where they end a residual
branch; weights of norms lie in 1 +- 0.1, biases in +- 0.05. So the size of what goes through a layer is kept, and a residual
stream grows by a small part of itself with each block: with norms before every branch all values of FLUX.2 Klein, and of
Qwen-Image, stay far below what f16 can hold.
"""

import json
import random
import re
from array import array
from math import prod, sqrt
from pathlib import Path

from .shapes import Shapes

# Values are drawn once, and every tensor begins at another place of them. A prime, so that no two rows of a matrix are equal.
POOL = 1_000_003
APART = 74_003
BRANCH_ENDS = re.compile(r"\.(to_out|to_out\.0|to_add_out|linear_out|o_proj|down_proj|img_mlp\.out|conv2)\.weight$")
COUNTER = "num_batches_tracked"


class Pool:
    """The same seed gives the same values."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.unit = [2 * source.random() - 1 for _ in range(POOL)]
        self.scaled: dict[tuple[float, float], bytes] = {}

    def bf16(self, mean: float, most: float) -> bytes:
        """Little-endian values, uniform in mean +- most."""
        if (mean, most) not in self.scaled:
            # The upper half of an f32 is its bf16, rounded towards zero.
            f32 = array("f", [mean + most * value for value in self.unit]).tobytes()
            values = bytearray(len(f32) // 2)
            values[0::2], values[1::2] = f32[2::4], f32[3::4]
            self.scaled[mean, most] = bytes(values)
        return self.scaled[mean, most]


def mean_and_most(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """What a tensor's values lie around, and how far from it at most."""
    if len(shape) > 1 and not name.endswith(".gamma"):
        deviation = (0.5 if BRANCH_ENDS.search(name) else 1) / sqrt(prod(shape[1:]))
        return 0, sqrt(3) * deviation
    return (0, 0.05) if name.endswith((".bias", ".running_mean")) else (1, 0.1)


def size(shapes: Shapes) -> int:
    """Bytes of all tensors."""
    return sum(tensor_bytes(name, shape) for name, shape in shapes.items())


def tensor_bytes(name: str, shape: tuple[int, ...]) -> int:
    """A batch norm's counter is one I64, everything else is BF16."""
    return 8 if name.endswith(COUNTER) else 2 * prod(shape)


def write_weights(folder: Path, name: str, shapes: Shapes, pool: Pool, most_bytes: int) -> None:
    """One file NAME.safetensors or, where it would be larger than `most_bytes`, numbered shards and their index."""
    shards = split(shapes, most_bytes)
    numbered = [f"{name}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = numbered if len(shards) > 1 else [f"{name}.safetensors"]
    start = 0
    for file, shard in zip(files, shards):
        write_file(folder / file, shard, pool, start)
        start += len(shard)
    if len(shards) > 1:
        places = {tensor: file for file, shard in zip(files, shards) for tensor in shard}
        index = {"metadata": {"total_size": size(shapes)}, "weight_map": places}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def split(shapes: Shapes, most_bytes: int) -> list[Shapes]:
    """Shards in order: a new one begins with the tensor that would make the last one too large."""
    shards, used = [{}], 0
    for name, shape in shapes.items():
        count = tensor_bytes(name, shape)
        if shards[-1] and used + count > most_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += count
    return shards


def write_file(path: Path, shapes: Shapes, pool: Pool, start: int) -> None:
    """`start` is the number of the first tensor within its component."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + tensor_bytes(name, shape)
        dtype = "I64" if name.endswith(COUNTER) else "BF16"
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        write_all(file, len(text).to_bytes(8, "little") + text)
        for number, (name, shape) in enumerate(shapes.items(), start):
            if name.endswith(COUNTER):
                write_all(file, bytes(8))
            else:
                values = pool.bf16(*mean_and_most(name, shape))
                write_values(file, memoryview(values), 2 * prod(shape), 2 * APART * number)


def write_values(file, values: memoryview, count: int, start: int) -> None:
    """`count` bytes of the pool from `start` on, which begins anew at its end."""
    while count > 0:
        start %= len(values)
        part = values[start : start + count]
        write_all(file, part)
        count, start = count - len(part), start + len(part)


def write_all(file, data) -> None:
    """An unbuffered file may take less than it is given."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
