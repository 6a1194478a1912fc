"""The host's count of pages: exact, from the plan alone, without reading anything back from the device."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class SharedRun:
    """Pages that several rows own together: int64[M] of each group, counted once."""

    pages: np.ndarray
    owners: int


@dataclass(eq=False)
class Holding:
    """What one row owns: pages of each group, shared runs included."""

    owned: np.ndarray  # int64[M]
    shared: list[SharedRun] = field(default_factory=list)


class PageBook:
    """How many pages are free. Mirrors reserve, trim, fork and release of the cache one for one."""

    def __init__(self, total: int, groups: int) -> None:
        self.total = total
        self.free = total
        self._groups = groups

    @property
    def used(self) -> int:
        return self.total - self.free

    def empty(self) -> Holding:
        return Holding(np.zeros(self._groups, np.int64))

    def missing(self, holding: Holding, wanted: np.ndarray) -> int:
        """Pages to take before `holding` owns at least `wanted` [M] of each group."""
        return int(np.maximum(wanted - holding.owned, 0).sum())

    def grow(self, holding: Holding, wanted: np.ndarray) -> int:
        """Take the missing pages; how many. Raises RuntimeError when the pool lacks them: the scheduler must have asked."""
        need = self.missing(holding, wanted)
        if need > self.free:
            raise RuntimeError(f"{need} pages wanted, {self.free} free: the scheduler admitted too much")
        if need:
            self.free -= need
            holding.owned = np.maximum(holding.owned, wanted)
        return need

    def surplus(self, holding: Holding, wanted: np.ndarray) -> int:
        """Pages that a trim to `wanted` gives back."""
        return int(np.maximum(holding.owned - wanted, 0).sum())

    def trim(self, holding: Holding, wanted: np.ndarray) -> int:
        """Give back what lies beyond `wanted` [M]; how many. Never reaches shared pages, which hold locked entries."""
        surplus = self.surplus(holding, wanted)
        if surplus:
            self.free += surplus
            holding.owned = np.minimum(holding.owned, wanted)
        return surplus

    def fork_cost(self, holding: Holding, full: np.ndarray) -> int:
        """Pages that a fork copies; `full` [M] are shared instead."""
        return int((holding.owned - np.minimum(full, holding.owned)).sum())

    def fork(self, holding: Holding, full: np.ndarray) -> Holding:
        """A second row with the same contents: `full` [M] pages shared, the rest copied."""
        full = np.minimum(full, holding.owned)
        before = sum((run.pages for run in holding.shared), np.zeros(self._groups, np.int64))
        new = np.maximum(full - before, 0)
        for run in holding.shared:
            run.owners += 1
        if new.any():
            holding.shared.append(SharedRun(new, 2))
        self.free -= self.fork_cost(holding, full)
        return Holding(holding.owned.copy(), list(holding.shared))

    def release(self, holding: Holding) -> None:
        """Give up every page."""
        freed = int(holding.owned.sum())
        for run in holding.shared:
            run.owners -= 1
            if run.owners:
                freed -= int(run.pages.sum())
        self.free += freed
        holding.owned = np.zeros(self._groups, np.int64)
        holding.shared = []
