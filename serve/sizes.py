"""Numbers of bytes as people write them."""

import argparse
import math
import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """A number of bytes: 1000000, 512MiB, 1.5G (1000-based without the i, as in vLLM)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a size: write for example 2GiB, 512MiB or 1000000000"
        )
    return math.floor(float(match[1]) * _UNITS[match[2]])
