"""Heads in parts, for the interpreter and a GPU."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_layer import Heads, Made, rope_of
from tests.kernels.ragged_cases import Case


def heads_of(
    case: Case, *, splits: int = 2, rows: int | None = None, bias: bool = False, norms: bool = False, bad: bool = False
) -> tuple[Heads, Made]:  # fmt: skip
    """Of a case's shapes; `rows` of the parts, `bad`: with a key and a value that are not finite."""
    rng = np.random.default_rng(len(case.q))
    tokens, kv_heads, held, head_dim = case.q.shape
    columns, dtype = kv_heads * held * head_dim, str(case.q.dtype)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    parts = draw(splits, rows or tokens, columns) * splits**-0.5
    if bad:
        parts[0, 0, (held - 2) * head_dim] = np.nan
        parts[0, 0, (held - 1) * head_dim + 5] = np.inf
    angles = draw(tokens, head_dim // 2) * 3
    more: dict[str, Any] = {}
    if bias:
        more["bias"] = jnp.asarray(draw(columns), dtype)
    if norms:
        more |= {name: jnp.asarray(draw(head_dim), dtype) for name in ("q_norm", "k_norm")}
    rope = rope_of(jnp.cos(angles), jnp.sin(angles))
    return Heads(jnp.asarray(parts), rope, **more), Made(kv_heads, dtype, 1e-5, 1.0 if norms else 0.0)
