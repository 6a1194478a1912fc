"""What the scheduler asks of the device."""

from typing import Any, Protocol

import numpy as np

from serve.sequence import RowState, Sequence


class RowOperations(Protocol):
    """What the scheduler asks of the device, in order; each mirrors a function of tangram_jax.cache."""

    def set_budgets(self, row: int, budgets: np.ndarray) -> None: ...
    def reserve(self, row: int, tokens: int, tail: int) -> None: ...
    def trim(self, row: int, tokens: int, tail: int) -> None: ...
    def rollback(self, row: int, count: int) -> None: ...
    def settle(self, row: int, tokens: int) -> None: ...
    def fork(self, src: int, dst: int) -> None: ...
    def release(self, row: int) -> None: ...
    def start(self, sequence: Sequence) -> None:
        """The sequence has a row: set its sampling parameters."""

    # Copies in host memory, dispatched only. `pages` i64[page lists]: those that hold something of the row.

    def saved_bytes(self, pages: int) -> int:
        """Bytes that a copy of so many pages takes."""

    def save(self, state: RowState, pages: np.ndarray) -> object | None:
        """A copy of the row, which may be released at once; None if there is no memory for it."""

    def load(self, state: RowState, pages: np.ndarray, saved: Any) -> None:
        """Fill a row that was just reserved with what was saved, and set its numbers."""

    @property
    def copies_wait(self) -> bool:
        """Whether the next copy would have to wait for those before."""
