"""Plans of decode steps, made by the kernel and by XLA's operations."""

from unittest import mock

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_decode import plan as P
from pallas_kernels.ragged_decode.plan_gpu import equal_shares
from tests.one_program import in_one

# (requests, layers, KV heads, most entries, shares or None): a few items for many shares, and many for one; some hold
# nothing, or all of them.
CASES = [
    (9, 2, 3, 3000, None),
    (40, 1, 8, 200, 7),
    (5, 3, 2, 0, 3),
    (1, 1, 1, 100_000, None),
    (4, 2, 4, 1000, None),  # with room for whole shares
]


def compare(case: tuple, *, interpret=None) -> None:
    """The kernel's plan and XLA's are equal in every number."""
    batch, layers, kv_heads, most, num_shares = case
    rng = np.random.default_rng(sum(map(int, case[:4])))
    heads, page_size, unit = layers * kv_heads, 16, 32
    lengths = rng.integers(-1, most + 1, (batch, heads))
    lengths[rng.random(batch) < 0.2] = 0  # nothing yet
    lengths[rng.random(batch) < 0.2] = -1  # no request
    table = jnp.asarray(rng.integers(0, 1000, (batch + 3, 64 * heads)), jnp.int32)
    first, column = rng.integers(0, 64 * heads, heads), rng.integers(0, 2, heads)
    rows = jnp.asarray(rng.permutation(batch + 3)[:batch], jnp.int32)
    skip = jnp.asarray(rng.integers(0, page_size, batch), jnp.int32)
    given = jnp.asarray(lengths, jnp.int32), table, jnp.asarray(first), jnp.asarray(column)
    with mock.patch.object(P, "_has_kernel", lambda _: False):
        plan = in_one(
            P.plan_decode, *given[:2], first=given[2], column=given[3], page_size=page_size, num_layers=layers,
            rows=rows, skip=skip, num_shares=num_shares, unit=unit,
        )  # fmt: skip
    made = equal_shares(
        *given, rows, skip, P._by_column(column, layers, batch), jnp.asarray(column.max() + 1),
        page_size=page_size, unit=unit, num_shares=plan.num_shares,
        least=P.least_share(unit) if num_shares is None else 1, interpret=interpret,
    )  # fmt: skip
    for name, x in zip(("shares", "items", "sync"), made, strict=True):
        np.testing.assert_array_equal(x, getattr(plan, name), err_msg=name)
