"""8-bit floats from safetensors files, whose library has no NumPy dtype for them."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

EIGHT_BIT_FLOATS = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
FLOATS = ("F64", "F32", "F16", "BF16", *EIGHT_BIT_FLOATS)
INTEGERS = tuple(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))  # of quantised weights


class Bytes:
    """Tensors of a file that safetensors has opened, so that its header is known to be good."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _header(self) -> tuple[dict[str, Any], int]:
        """(name -> dtype, shape and offsets, where the data begins)"""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(length)), 8 + length

    def read(self, name: str) -> np.ndarray:
        """A tensor whose dtype is one of `EIGHT_BIT_FLOATS`."""
        tensors, begin = self._header
        found = tensors[name]
        first, last = found["data_offsets"]
        data = np.fromfile(self.path, np.uint8, last - first, offset=begin + first)
        return data.view(EIGHT_BIT_FLOATS[found["dtype"]]).reshape(found["shape"])
