"""Weights as block-wise integers would store them: quantised by rounding to nearest, then expanded again."""

import torch


def quantise(weight, bits, block, symmetric):
    """weight [out, in], in divisible by BLOCK -> the same shape, each run of BLOCK inputs with a scale of its own."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // block, block)
    return (round_symmetric if symmetric else round_asymmetric)(blocks, bits).reshape(rows, columns)


def round_symmetric(blocks, bits):
    """The value furthest from zero becomes the lowest integer, so that all 2^bits levels can be used."""
    lowest = -(2 ** (bits - 1))
    extreme = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scale = nonzero(extreme / lowest)
    return (blocks / scale).round().clamp(lowest, -lowest - 1) * scale


def round_asymmetric(blocks, bits):
    """Unsigned integers with an integer zero point, as MatMulNBits stores them; zero is always inside the range."""
    top = 2**bits - 1
    low, high = blocks.amin(2, keepdim=True).clamp(max=0), blocks.amax(2, keepdim=True).clamp(min=0)
    scale = nonzero((high - low) / top)
    zero = (-low / scale).round()
    return (((blocks / scale).round() + zero).clamp(0, top) - zero) * scale


def nonzero(scale):
    return torch.where(scale == 0, torch.ones_like(scale), scale)
