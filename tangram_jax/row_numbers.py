"""The numbers that callers give: of rows, tokens and entries."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def whole(name: str, numbers: Any) -> jax.Array:
    """`numbers` in int32, as others may overflow in what is counted with them. Raises TypeError where they are not whole.

    Those of NumPy that int32 does not hold become its least or largest, and not others that it holds.
    """
    if (
        isinstance(numbers, np.ndarray | np.integer)
        and numbers.dtype.itemsize > 4
        and numbers.dtype.kind in "iu"
    ):
        numbers = np.clip(numbers, -(2**31), 2**31 - 1).astype(np.int32)
    numbers = jnp.asarray(numbers)
    check_whole(name, numbers)
    return numbers.astype(jnp.int32)


def check_whole(name: str, numbers: np.ndarray | jax.Array) -> None:
    """Raises TypeError where the array's numbers are not whole."""
    if numbers.dtype == bool:
        raise TypeError(f"{name} are numbers, got a mask: write np.flatnonzero(mask)")
    if not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise TypeError(f"{name} are whole numbers, got {numbers.dtype}: write an array of int32")


def at_least(least: int, **numbers: Any) -> Iterator[int]:
    """Each of `numbers` as an int. Raises ValueError for one that is not whole, or less."""
    for name, number in numbers.items():
        try:
            fits = int(number) == number and number >= least
        except (TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            raise ValueError(f"{name} must be a whole number of at least {least}; got {number!r}")
        yield int(number)


def known_rows(rows: Any, num_rows: int) -> jax.Array:
    """`rows` i32[...], and `num_rows` for all that are of no row: a negative one would be counted from the end.

    Raises TypeError for a mask, and for what else are no whole numbers.
    """
    rows = whole("rows", rows)
    return jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)


def one_row(row: Any, num_rows: int) -> jax.Array:
    """The same of one. Raises ValueError for several."""
    row = known_rows(row, num_rows)
    if row.ndim:
        raise ValueError(f"rows {[*row.shape]}: give one at a time, as a number")
    return row
