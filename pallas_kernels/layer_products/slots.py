"""Slots of shared memory as the computing warpgroups read and release them, step by step of a product."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.layer_products.phases import i32


class Slots:
    """Those of shared memory that a warpgroup reads, in the order in which they are filled."""

    def __init__(self, place: Callable[[Any], Any], barriers: Any, count: int, loads: Any) -> None:
        """`place` of a slot, `loads` of all phases together. Nobody waits for slots that are not filled again."""
        self._place, (self._full, self._free) = place, barriers
        self._count, self._loads = i32(count), loads

    def wait(self, turn: Any) -> Any:
        slot = lax.rem(turn, self._count)
        plgpu.barrier_wait(self._full.at[slot])
        return self._place(slot)

    def release(self, turn: Any, when: Any = True) -> None:
        again = when & (turn + self._count < self._loads)
        plgpu.barrier_arrive(self._free.at[lax.rem(turn, self._count)], predicate=again)


@dataclasses.dataclass(frozen=True)
class Steps:
    """What is read in the steps of a phase, whose first one has the slots of these turns."""

    weights: Slots
    tokens: Slots
    turn: Any  # of weights
    token_turn: Any
    pieces: int  # of weights in each step
    token_loads: int
    held: Any  # the slots of weights

    def wait_for_tokens(self, step: Any) -> list[Any]:
        """As many as the step has loads."""
        first = self.token_turn + step * self.token_loads
        return [self.tokens.wait(first + n) for n in range(self.token_loads)]

    def wait_for_weights(self, step: Any, piece: Any) -> Any:
        return self.held.at[self.weights.wait(self.turn + step * self.pieces + piece)]

    def release(self, step: Any, when: Any = True) -> None:
        """All that a step has read."""
        for piece in range(self.pieces):
            self.release_weights(step, piece, when)
        self.release_tokens(step, when)

    def release_weights(self, step: Any, piece: Any, when: Any = True) -> None:
        self.weights.release(self.turn + step * self.pieces + piece, when)

    def release_tokens(self, step: Any, when: Any = True) -> None:
        for n in range(self.token_loads):
            self.tokens.release(self.token_turn + step * self.token_loads + n, when)
