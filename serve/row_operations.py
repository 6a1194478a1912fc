"""What the scheduler asks of the device."""

from typing import Protocol

import numpy as np

from serve.sequence import Sequence


class RowOperations(Protocol):
    """What the scheduler asks of the device, in order; each mirrors a function of tangram_jax.cache."""

    def set_budgets(self, row: int, budgets: np.ndarray) -> None: ...
    def reserve(self, row: int, tokens: int, tail: int) -> None: ...
    def trim(self, row: int, tokens: int, tail: int) -> None: ...
    def rollback(self, row: int, count: int) -> None: ...
    def fork(self, src: int, dst: int) -> None: ...
    def release(self, row: int) -> None: ...
    def start(self, sequence: Sequence) -> None:
        """The sequence has a row: set its sampling parameters."""
