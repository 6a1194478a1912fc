"""The tiny checkpoint that the tests of loading share."""

from pathlib import Path

import jax
import numpy as np

from models.huggingface import HuggingFaceDirectory
from models.weight_names import leaf_names
from models.weights import _parts

GOLDEN = Path(__file__).parent / "golden"
FP4 = np.asarray([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def golden_tensors(name):
    """(the tensors of a golden checkpoint, its configuration)"""
    directory = HuggingFaceDirectory(GOLDEN / name)
    directory.open()
    return Tensors({key: directory.read(key) for key in directory.shapes}), directory.config


class Tensors:
    """A TensorSource in memory."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: x.shape for name, x in tensors.items()}

    def read(self, name):
        return self.tensors[name]

    def in_mxfp4(self, name):
        return False

    def in_fp8(self, name):
        return None


def same(a, b):
    """Whether two parameter trees of the same structure have the same numbers."""
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def random_tensors(config):
    """A Hugging Face checkpoint with random weights for a configuration."""
    rng, parts = np.random.default_rng(0), _parts(config)
    return {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        for pieces in leaf_names(config, "huggingface", ()).values()
        for piece in pieces
        for name, shape in zip(piece.names, parts[piece.part].shapes, strict=True)
    }


def quantised(weights):
    """[X, in, out] -> (blocks u8[X, out, in / 32, 16], scales u8[X, out, in / 32], what they stand for [X, in, out])."""
    x = weights.astype(np.float64).swapaxes(1, 2)
    x = x.reshape(*x.shape[:2], -1, 32)
    exponent = np.floor(np.log2(np.abs(x).max(-1, keepdims=True))) - 2
    scaled = x / 2.0**exponent
    number = np.abs(np.abs(scaled)[..., None] - FP4).argmin(-1)
    nibble = (number + 8 * (scaled < 0)).astype(np.uint8)
    values = np.where(scaled < 0, -FP4[number], FP4[number]) * 2.0**exponent
    blocks = nibble[..., ::2] | nibble[..., 1::2] << 4
    scales = (exponent[..., 0] + 127).astype(np.uint8)
    blocks, scales = map(np.ascontiguousarray, (blocks, scales))  # as safetensors takes them for granted
    return blocks, scales, values.reshape(*x.shape[:2], -1).swapaxes(1, 2).astype(np.float32)


def in_mxfp4(tensors):
    """(the checkpoint as it is published, the same with dequantised experts)"""
    packed, plain = {}, {}
    for name, x in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed[f"{name}_blocks"], packed[f"{name}_scales"], plain[name] = quantised(x)
        else:
            packed[name] = plain[name] = x
    return packed, plain
