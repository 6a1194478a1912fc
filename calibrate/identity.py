"""What tells a model from another of the same name: some of its weights, and how its tokenizer cuts a text.

A digest of weights would change with every rounding. So a few values are kept, and compared by their relative difference:
rounding to bfloat16 moves a weight by 0.2%, to 8 bits by 1% (floats: 3%), to 4 bits by 10%, other weights by more than 100%.
AWQ and SmoothQuant also move factors from the norms into the projections: what they leave is the product of the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

from models.config import ModelConfig
from models.fp8_weights import values_at

VALUES = 16  # of the key projection and of the first norm of every layer
# Relative differences of the layer that differs most. Keys: below the first, rounding to 16 or 8 bits; below the second, to
# fewer. Norms are 16 bits or more in every format.
ROUNDED, QUANTISED, NORMS = 0.02, 0.5, 0.005
PROBE = (
    "The quick brown fox, 3.14159 and 2,718; naïve café — “quoted”?\n\n\tdef f(x): return x**2  # y != z\n"
    "https://example.org/a?b=c&d=[1, 2]  Füße, план, 東京, 🙂"
)

Sameness = Literal["same", "quantised", "tuned", "other"]


class Encoder(Protocol):
    """What this file needs of `models.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def weights_identity(params: Any, config: ModelConfig) -> dict[str, Any]:
    """`VALUES` weights of the key projection and of the attention's norm of every layer, to four digits: plain JSON.

    "products" are those of the projection's weights with the norm's that they meet. Which ones are taken depends on shapes
    alone. Compiles a gather or two, and reads 48 numbers a layer from the device.
    """
    rng = np.random.default_rng(0)
    E, K, D = config.hidden_size, config.num_kv_heads, config.head_dim
    rows, heads, columns = (rng.integers(most, size=VALUES) for most in (E, K, D))
    norm = rng.integers(E, size=VALUES)
    keys = [_keys(layer["qkv"], rows, heads, columns, config) for layer in params["layers"]]
    norms = [layer["attn_norm"][norm] for layer in params["layers"]]
    met = [layer["attn_norm"][rows] for layer in params["layers"]]
    products = [_wide(k) * (_wide(n) + config.norm_offset) for k, n in zip(keys, met, strict=True)]
    found = {"keys": keys, "norms": norms, "products": products}
    return {name: [_digits(x) for x in values] for name, values in found.items()}


def _keys(qkv: Any, rows: np.ndarray, heads: np.ndarray, columns: np.ndarray, config: ModelConfig) -> Any:
    key, shape = config.group_size, (config.num_kv_heads, config.group_size + 2, config.head_dim)
    if config.weights_fp8:
        return values_at(qkv, rows, np.ravel_multi_index((heads, np.full_like(heads, key), columns), shape))
    return qkv[rows, heads, key, columns]


def tokenizer_identity(tokenizer: Encoder) -> dict[str, Any]:
    """Size of the vocabulary and a digest of how a fixed text is cut: plain JSON."""
    ids = tokenizer.encode(PROBE, add_special_tokens=False)
    return {"vocab_size": tokenizer.vocab_size, "probe": hashlib.sha256(str(ids).encode()).hexdigest()[:16]}


def compare_weights(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Sameness, float]:
    """How alike two results of `weights_identity` are, and the relative difference of the layer that differs most.

    "quantised": keys differ as by rounding to a few bits, norms do not, as in GGUF files, or their products differ much less
    than they do; weights tuned by adapters that leave the norms alone look alike. "tuned": norms differ too; so little that
    neither shows is "same". "other": some layer has nothing in common, or shapes differ.
    """
    try:
        keys, norms = (_difference(then[name], now[name]) for name in ("keys", "norms"))
        known = "products" in then and "products" in now  # not of older profiles
        products = _difference(then["products"], now["products"]) if known else float("inf")
    except (KeyError, TypeError, ValueError, OverflowError):  # of other shapes
        return "other", float("inf")
    if norms >= NORMS and products < min(QUANTISED, max(keys, norms) / 2):
        return "quantised", products
    if not keys < QUANTISED or not norms < QUANTISED:
        return "other", max(keys, norms)
    if norms >= NORMS:
        return "tuned", max(keys, norms)
    return ("quantised" if keys >= ROUNDED else "same"), keys


def _difference(then: Any, now: Any) -> float:
    a, b = np.asarray(then, np.float64), np.asarray(now, np.float64)
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    scale = np.sqrt(np.square(a).mean(axis=1) + np.square(b).mean(axis=1)) / np.sqrt(2)
    return float((np.sqrt(np.square(a - b).mean(axis=1)) / np.maximum(scale, 1e-12)).max())


def _wide(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def _digits(values: Any) -> list[float]:
    return [float(f"{x:.4g}") for x in _wide(values).tolist()]
