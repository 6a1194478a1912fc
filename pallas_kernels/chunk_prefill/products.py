"""The matrix products of a computing warpgroup of the chunk prefill kernel, and whose turn it is to issue them."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunk_prefill.common import LINE, Config, Refs, f32, i32
from pallas_kernels.chunk_prefill.tuning import ROWS

WGMMA = plgpu.Layout.WGMMA


class Products(NamedTuple):
    """The matrix products of one warpgroup over the blocks of one tile; the loads before them have `done` blocks."""

    cfg: Config
    refs: Refs
    wg: Any
    blocks: Any
    done: Any

    def slot(self, j: Any) -> Any:
        return self.cfg.slot(self.done + j)

    def keys(self, j: Any) -> Any:
        plgpu.barrier_wait(self.refs.k_full.at[self.slot(j)])
        return self.refs.k_s.at[self.slot(j)].transpose((1, 0))

    def values(self, j: Any) -> Any:
        plgpu.barrier_wait(self.refs.v_full.at[self.slot(j)])
        return self.refs.v_s.at[self.slot(j)]

    def release_keys(self, j: Any) -> None:
        plgpu.barrier_arrive(self.refs.k_free.at[self.slot(j)])
        pl.when(j == self.blocks - 1)(lambda: plgpu.barrier_arrive(self.refs.q_free.at[self.wg]))

    def release_values(self, j: Any) -> None:
        plgpu.barrier_arrive(self.refs.v_free.at[self.slot(j)])

    def take_turn(self) -> None:
        """Waits until the tensor cores are this warpgroup's, whose softmax the others' products run beside."""
        if self.cfg.tuning.ping_pong:
            plgpu.barrier_wait(self.refs.turn.at[self.wg])

    def pass_turn(self) -> None:
        if self.cfg.tuning.ping_pong:
            after = lax.rem(self.wg + 1, i32(self.cfg.tuning.warpgroups))
            plgpu.barrier_arrive(self.refs.turn.at[after])

    def _score(self, ref: Any, k: Any) -> None:
        for n, start in enumerate(self.cfg.columns(self.cfg.head_dim)):
            plgpu.wgmma(ref, self.refs.q_s.at[self.wg, n], k.at[pl.ds(start, LINE)])

    def scores(self, j: Any) -> Any:
        """Raw products of the queries with block j's keys, f32[64, block]; ends the turn, begun by `weigh` unless j is 0."""
        k = self.keys(j)
        pl.when(j == 0)(self.take_turn)

        def run(ref: Any) -> Any:
            self._score(ref, k)
            self.pass_turn()
            return ref[...]

        s = pl.run_scoped(run, plgpu.ACC((ROWS, self.cfg.block), f32))
        self.release_keys(j)
        return s

    def weigh(self, acc: Any, p: Any, j: Any) -> Any:
        """acc plus the product of weights with block j's values; the turn goes on to the next block's `scores`, if any."""
        v = self.values(j)
        if not self.cfg.fused:
            self.take_turn()
        if self.cfg.interpreted:
            # It takes operands from shared memory alone, and no accumulator that exists already.
            self.refs.p_s.at[self.wg][...] = p
            plgpu.commit_smem()

            def run(ref: Any) -> Any:
                plgpu.wgmma(ref, self.refs.p_s.at[self.wg], v)
                return ref[...]

            acc = acc + pl.run_scoped(run, plgpu.ACC(acc.shape, f32))
        else:
            acc = pl.run_state(lambda ref: plgpu.wgmma(ref, p, v))(plgpu.ACC.init(acc))
        if not self.cfg.fused:
            pl.when(j == self.blocks - 1)(self.pass_turn)
        self.release_values(j)
        return acc

    def weigh_and_score(self, acc: Any, p: Any, j: Any) -> tuple[Any, Any]:
        """`weigh` of block j - 1 and `scores` of block j, in flight together."""
        if self.cfg.interpreted:
            self.take_turn()
            return self.weigh(acc, p, j - 1), self.scores(j)
        k = self.keys(j)

        def run(state: Any) -> None:
            acc_ref, s_ref = state
            v = self.values(j - 1)
            self.take_turn()
            # The product with a left operand in registers comes first: they must be in place before any is in flight.
            plgpu.wgmma(acc_ref, p, v)
            self._score(s_ref, k)
            self.pass_turn()

        nothing = plgpu.layout_cast(jnp.zeros((ROWS, self.cfg.block), f32), WGMMA)
        acc, s = pl.run_state(run)((plgpu.ACC.init(acc), plgpu.ACC.init(nothing)))
        self.release_values(j - 1)
        self.release_keys(j)
        return acc, s
