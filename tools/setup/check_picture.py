#!/usr/bin/env python3
"""Compare a PNG with a reference tensor: check_picture.py PICTURE.png REFERENCE.npy MIN_DB

The reference is f32, [1, 3, height, width], in 0..1. The figure is the PSNR with peak 1. Exit 0 at or above the bar, 1 below it.
It reads both files itself, with the standard library alone: a judge must not share code with what it judges.
"""

import array
import ast
import math
import struct
import sys
import zlib
from pathlib import Path
from typing import List, Tuple


def read_png(path: Path) -> Tuple[int, int, List[int]]:
    """Width, height and the RGB samples of an 8-bit, non-interlaced colour PNG (alpha is dropped)."""
    data = path.read_bytes()
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        sys.exit(f"{path}: not a PNG")
    at, header, packed = 8, None, bytearray()
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        (crc,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        if zlib.crc32(kind + body) != crc:
            sys.exit(f"{path}: chunk {kind.decode('ascii', 'replace')} is corrupt")
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    if header is None:
        sys.exit(f"{path}: no header")
    width, height, depth, colour, _, _, interlace = header
    if depth != 8 or colour not in (2, 6) or interlace:
        sys.exit(f"{path}: wanted 8-bit RGB or RGBA, not interlaced; found depth {depth}, colour type {colour}")
    channels = 3 if colour == 2 else 4
    samples = unfilter(zlib.decompress(bytes(packed)), width * channels, height, channels)
    if channels == 4:
        del samples[3::4]
    return width, height, samples


def unfilter(raw: bytes, stride: int, height: int, back: int) -> List[int]:
    """Undo the row filters (PNG specification, section 9)."""
    out: List[int] = []
    above = [0] * stride
    for row in range(height):
        kind, *line = raw[row * (stride + 1) : (row + 1) * (stride + 1)]
        for i in range(stride):
            left = line[i - back] if i >= back else 0
            up = above[i]
            corner = above[i - back] if i >= back else 0
            line[i] = (line[i] + (0, left, up, (left + up) // 2, paeth(left, up, corner))[kind]) & 255
        out += line
        above = line
    return out


def paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def read_npy(path: Path) -> Tuple[Tuple[int, ...], array.array]:
    data = path.read_bytes()
    if data[:6] != b"\x93NUMPY":
        sys.exit(f"{path}: not an .npy file")
    size, start = (struct.unpack("<H", data[8:10])[0], 10) if data[6] == 1 else (struct.unpack("<I", data[8:12])[0], 12)
    header = ast.literal_eval(data[start : start + size].decode("latin-1"))
    if header["descr"] != "<f4" or header["fortran_order"]:
        sys.exit(f"{path}: wanted little-endian f32 in C order; found {header}")
    values = array.array("f", data[start + size :])
    if sys.byteorder == "big":
        values.byteswap()
    if len(values) != math.prod(header["shape"]):
        sys.exit(f"{path}: {len(values)} values for the shape {header['shape']}")
    return header["shape"], values


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} PICTURE.png REFERENCE.npy MIN_DB")
    picture, reference, bar = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    width, height, samples = read_png(picture)
    shape, wanted = read_npy(reference)
    if tuple(shape) != (1, 3, height, width):
        sys.exit(f"{picture} is {width}x{height}, but {reference} has the shape {shape}")
    pixels = width * height
    errors = (samples[3 * i + c] / 255 - wanted[c * pixels + i] for c in range(3) for i in range(pixels))
    mean = math.fsum(error * error for error in errors) / (3 * pixels)
    psnr = math.inf if mean == 0 else -10 * math.log10(mean)
    passed = psnr >= bar  # false for NaN
    print(f"{picture}: {psnr:.1f} dB to {reference}, wanted {bar:.1f}: {'ok' if passed else 'FAILED'}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
