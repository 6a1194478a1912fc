"""Quantised checkpoints, read as if they were not: which tensors a weight is made of, and whether they go together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from models import dequantise
from models.config import ModelConfig
from models.quantisation import Quantisation
from models.weight_names import is_ignored, leaf_names, text_name
from models.weights import TensorSource, WeightMismatchError

# Of activations, keys and values, which are not quantised here.
_UNUSED = re.compile(r".+\.((input|output|activation|act|prob_output|[qkv]|kv)_(scale|zero_point))")


class _Stored(NamedTuple):
    """A weight and the tensors that it is made of."""

    shape: tuple[int, int]  # [out, in]
    parts: tuple[str | None, ...]
    read: Callable[[], np.ndarray]
    in_fp8: Callable[[], tuple[np.ndarray, np.ndarray] | None] = lambda: None


class _Misfit(Exception):
    """Tensors are not as others say; a message of each."""


class DequantisedTensors:
    """A `TensorSource` of what a quantised one stands for: float32 where it is quantised, else as it is.

    Never more than one weight is in memory, as it is stored and as it is dequantised.

    Raises WeightMismatchError naming every tensor that is missing beside others, or has another shape than these say.
    """

    def __init__(self, source: TensorSource, quantisation: Quantisation, config: ModelConfig) -> None:
        self._source, self._how, self._name = source, quantisation, config.name
        self._stored: dict[str, _Stored] = {}
        problems: list[str] = []
        for name in source.shapes:
            if is_ignored(text_name(name)):
                continue
            try:
                self._find(name)
            except _Misfit as misfit:
                problems += misfit.args
        if problems:
            raise self._error(*problems)
        parts = {part for stored in self._stored.values() for part in stored.parts if part}
        self.shapes = {name: stored.shape for name, stored in self._stored.items()} | {
            name: tuple(shape)
            for name, shape in source.shapes.items()
            if name not in parts and not _UNUSED.fullmatch(name)
        }
        for name in self._needless_biases(config):
            del self.shapes[name]

    def read(self, name: str) -> np.ndarray:
        """One tensor. Raises WeightMismatchError for integers or 8 bits without a scale, and for others that have one."""
        if name in self._stored:
            return self._stored[name].read()
        tensor = self._tensor(name)
        if tensor.dtype.itemsize == 1 or tensor.dtype.kind in "iu":
            raise self._error(f"{name}: stored as {tensor.dtype}, without a scale beside it")
        return tensor

    def in_mxfp4(self, name: str) -> bool:
        """Never."""
        return False

    def in_fp8(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Codes and scales of e4m3 with one scale for each output, or for all."""
        return self._stored[name].in_fp8() if name in self._stored else None

    def _tensor(self, name: str) -> np.ndarray:
        tensor = self._source.read(name)
        assert isinstance(tensor, np.ndarray)  # no GGUF file comes here
        return tensor

    def _error(self, *problems: str) -> WeightMismatchError:
        lines = "\n  ".join(problems)
        return WeightMismatchError(
            f"the weights of {self._name} are not as {self._how.method} stores them, {len(problems)} mismatches:\n  {lines}"
        )

    def _needless_biases(self, config: ModelConfig) -> list[str]:
        """The zeros that tools for GPTQ write for layers that have no bias."""
        found = [text_name(name) for name in self.shapes]
        known = {
            name
            for pieces in leaf_names(config, "huggingface", found).values()
            for piece in pieces
            for name in piece.names
        }
        biases = [name for name in self.shapes if name.endswith(".bias") and text_name(name) not in known]
        return [
            name
            for name in biases
            if f"{name.removesuffix('bias')}weight" in self._stored and not self._tensor(name).any()
        ]

    # --- what is stored ------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> None:
        """Notes the weight that a tensor is the main part of. Raises _Misfit."""
        module, _, kind = name.rpartition(".")
        method = self._how.method
        if kind == "weight" and method in ("fp8", "compressed-tensors"):
            scale = next(
                (x for x in (f"{name}_scale_inv", f"{name}_scale") if x in self._source.shapes), None
            )
            if scale:
                self._stored[name] = self._of_blocks(name, scale)
        elif kind == "weight_packed" and method == "compressed-tensors":
            self._stored[f"{module}.weight"] = self._of_packed(f"{module}.")
        elif kind == "qweight" and method == "awq":
            self._stored[f"{module}.weight"] = self._of_awq(f"{module}.")
        elif kind == "qweight" and method == "gptq":
            self._stored[f"{module}.weight"] = self._of_gptq(f"{module}.")

    def _of_blocks(self, weight: str, scale: str) -> _Stored:
        shape = self._matrix(weight)
        given = self._source.shapes[scale]
        found = (*given, 1, 1)[:2]  # of rows, or of the whole: also with fewer axes
        blocks = [(min(a or shape[0], shape[0]), min(b or shape[1], shape[1])) for a, b in self._how.blocks]
        fitting = {(a, b) for a, b in blocks if (-(-shape[0] // a), -(-shape[1] // b)) == found}
        if len(fitting) != 1 or len(given) > 2:
            known = _listed(f"{a} x {b}" for a, b in blocks)
            raise _Misfit(
                f"{scale}: {tuple(given)} scales of a matrix {shape}, expected those of blocks of {known}"
                f"{' (several fit)' if fitting else ''}"
            )
        (block,) = fitting
        zero = self._optional(f"{weight}_zero_point", given)

        def codes() -> np.ndarray:
            codes = self._tensor(weight)
            if codes.dtype.itemsize != 1:
                raise self._error(f"{weight}: stored as {codes.dtype}, expected 8 bits beside {scale}")
            return codes

        def read() -> np.ndarray:
            zeros = self._tensor(zero).reshape(found) if zero else None
            return dequantise.of_blocks(codes(), self._tensor(scale).reshape(found), block, zeros)

        def in_fp8() -> tuple[np.ndarray, np.ndarray] | None:
            if found[1] != 1 or block[0] not in (1, shape[0]) or zero:
                return None
            scales = np.broadcast_to(self._tensor(scale).reshape(found), (shape[0], 1))[:, 0]
            stored = codes()
            return (stored, scales.astype(np.float32)) if stored.dtype == "float8_e4m3fn" else None

        return _Stored(shape, (weight, scale, zero), read, in_fp8)

    def _of_packed(self, module: str) -> _Stored:
        words, scale, said = self._parts(module, "weight_packed", "weight_scale", "weight_shape")
        self._expect(said, (2,))
        out, inputs = (int(x) for x in self._tensor(said))
        groups = self._source.shapes[scale][-1]
        self._expect(scale, (out, groups))
        bits = self._bits(words, {bits: (out, _words(inputs, bits)) for bits in self._how.bits})
        sizes = [min(size or inputs, inputs) for _, size in self._how.blocks]
        size = next((size for size in sizes if -(-inputs // size) == groups), None)
        if size is None:
            raise _Misfit(f"{scale}: {groups} groups of {inputs} inputs, expected groups of {_listed(sizes)}")
        zero = self._optional(f"{module}weight_zero_point", (_words(out, bits), groups))
        index = self._optional(f"{module}weight_g_idx", (inputs,))

        def read() -> np.ndarray:
            of = np.arange(inputs) // size
            if index and (given := self._tensor(index)).min() != -1:  # which stands for their order
                of = self._groups(index, given, groups)
            zeros = self._tensor(zero) if zero else None
            return dequantise.of_packed(self._tensor(words), self._tensor(scale), of, bits, zeros)

        return _Stored((out, inputs), (words, scale, said, zero, index), read)

    def _of_awq(self, module: str) -> _Stored:
        words, zero, scale = self._parts(module, "qweight", "qzeros", "scales")
        inputs, packed = self._matrix(words)
        groups = self._source.shapes[scale][0]
        self._expect(scale, (groups, 8 * packed))
        self._expect(zero, (groups, packed))
        if inputs % groups:
            raise _Misfit(f"{scale}: {groups} groups do not divide the {inputs} inputs of {words}")

        def read() -> np.ndarray:
            return dequantise.of_awq(self._tensor(words), self._tensor(zero), self._tensor(scale))

        return _Stored((8 * packed, inputs), (words, zero, scale), read)

    def _of_gptq(self, module: str) -> _Stored:
        words, zero, scale = self._parts(module, "qweight", "qzeros", "scales")
        rows, out = self._matrix(words)
        groups = self._source.shapes[scale][0]
        self._expect(scale, (groups, out))
        bits = self._bits(zero, {bits: (groups, _words(out, bits)) for bits in self._how.bits})
        index = f"{module}g_idx" if f"{module}g_idx" in self._source.shapes else None
        inputs = self._source.shapes[index][0] if index else rows * 32 // bits
        self._expect(words, (_words(inputs, bits), out))
        size = self._how.group_size or inputs
        if index is None and -(-inputs // size) != groups:
            raise _Misfit(f"{scale}: {groups} groups of {inputs} inputs, expected groups of {size}")

        def read() -> np.ndarray:
            of = self._groups(index, self._tensor(index), groups) if index else np.arange(inputs) // size
            codes, zeros, scales = (self._tensor(name) for name in (words, zero, scale))
            return dequantise.of_gptq(codes, zeros, scales, of, bits, self._how.zeros_less_one)

        return _Stored((out, inputs), (words, zero, scale, index), read)

    def _parts(self, module: str, *names: str) -> list[str]:
        """Their names in full."""
        parts = [module + name for name in names]
        missing = [name for name in parts if name not in self._source.shapes]
        if missing:
            raise _Misfit(*(f"{name}: missing beside {parts[0]}" for name in missing))
        return parts

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self._source.shapes[name]
        if len(shape) != 2 or 0 in shape:
            raise _Misfit(f"{name}: expected a matrix, found shape {tuple(shape)}")
        return shape[0], shape[1]

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        if tuple(self._source.shapes[name]) != shape:
            raise _Misfit(f"{name}: expected shape {shape}, found {tuple(self._source.shapes[name])}")

    def _optional(self, name: str, shape: tuple[int, ...]) -> str | None:
        """The name, if there is such a tensor."""
        if name not in self._source.shapes:
            return None
        self._expect(name, shape)
        return name

    def _bits(self, name: str, shapes: dict[int, tuple[int, ...]]) -> int:
        """Those with which a packed tensor has the shape that it has."""
        found = tuple(self._source.shapes[name])
        fitting = next((bits for bits, shape in shapes.items() if shape == found), None)
        if fitting is None:
            expected = _listed(f"{shape} ({bits} bits)" for bits, shape in shapes.items())
            raise _Misfit(f"{name}: expected shape {expected}, found {found}")
        return fitting

    def _groups(self, name: str, of: np.ndarray, groups: int) -> np.ndarray:
        if of.min() < 0 or of.max() >= groups:
            raise self._error(f"{name}: groups {of.min()} to {of.max()}, there are {groups}")
        return of


def _words(codes: int, bits: int) -> int:
    """32-bit words that so many codes fill."""
    return -(-codes * bits // 32)


def _listed(values: Iterable[object]) -> str:
    return " or ".join(map(str, dict.fromkeys(values)))
