"""The experts of tokens by a router's logits, a warp for each token, written with `inline_mgpu`.

A lane has up to four experts side by side, sorted. As often as experts are chosen the lanes compare their best ones, as
whole numbers in the logits' order, and the first lane that has the largest gives it away. The CPU interpreter has a plain
path.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

from pallas_kernels.numbers import LANES, WARPS

AT_ONCE = 4  # tokens that a warp chooses for side by side, at most
SIGN, ALL = 1 << 31, (1 << 32) - 1
SCALAR = plgpu.Layout.WG_SPLAT(())


@dataclasses.dataclass(frozen=True)
class Choice:
    """Of each token the experts with the largest logits: what is chosen from, and where it goes."""

    logits: Any  # f32[S, T, X], parts that are added up
    bias: Any  # [X], added to them; or None
    chosen: Any  # i32[T * k]: the largest logit first
    weights: Any  # f32[T * k]: the chosen experts' probabilities
    count: int  # k
    normalize: bool  # among the chosen, else among all


def choose(of: Choice, cta: Any, ctas: int, wg: Any, warpgroups: int, *, interpreted: bool) -> None:
    """By all warpgroups of a CTA, for all tokens; each of the CTAs stores some tokens' weights.

    NaNs of a sign come before or behind all numbers.
    """
    tokens = of.logits.shape[1]
    if interpreted:
        pl.when(wg == 0)(lambda: _choose_plainly(of, cta))
        return
    warps = WARPS * warpgroups
    each = min(AT_ONCE, -(-tokens // warps))

    def some(n: Any, _: None) -> None:
        _choose_some(of, n * (warps * each), cta, ctas, warps, each)

    lax.fori_loop(jnp.int32(0), jnp.int32(-(-tokens // (warps * each))), some, None)


def _choose_plainly(of: Choice, cta: Any) -> None:
    logits = of.logits[...].sum(0)
    if of.bias is not None:
        logits += of.bias[...].astype(jnp.float32)
    logits = jnp.where(logits == 0, 0.0, logits)  # of one sign, or -0 came behind 0
    largest, experts = lax.top_k(logits, of.count)
    of.chosen[...] = experts.reshape(-1)

    @pl.when(cta == 0)
    def _store() -> None:
        weights = jnp.exp(largest - largest[:, :1])
        among = weights if of.normalize else jnp.exp(logits - largest[:, :1])
        of.weights[...] = (weights / jnp.sum(among, axis=1, keepdims=True)).reshape(-1)


def _choose_some(of: Choice, first: Any, cta: Any, ctas: int, warps: int, each: int) -> None:
    refs = [of.logits, of.chosen, of.weights, *([] if of.bias is None else [of.bias])]
    shape = of.logits.shape

    @plgpu.inline_mgpu(arg_types=(SCALAR, SCALAR, *[plgpu.RefType()] * len(refs)))
    def run(_: Any, first: Any, cta: Any, logits: Any, chosen: Any, weights: Any, bias: Any = None) -> None:
        first, cta = (x.registers.item() for x in (first, cta))
        thread = mgpu_utils.thread_idx()
        warp, lane = arith.divui(thread, _c(LANES)), arith.remui(thread, _c(LANES))
        begin = arith.addi(first, warp)
        tokens = [_Token(logits, bias, arith.addi(begin, _c(n * warps)), lane, shape) for n in range(each)]
        for nth in range(of.count):  # side by side: none waits for what another compares
            for token in tokens:
                token.compare()
            for token in tokens:
                token.find_lane()
            for token in tokens:
                token.take(chosen, of.count, nth)
        for token in tokens:
            own = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(token.number, _c(ctas)), cta)
            with mgpu_utils.when(own):  # for all of the warp
                token.store_weights(weights, of.normalize)

    run(first, cta, *refs)


class _Token:
    """A token's experts among a warp's lanes."""

    def __init__(
        self, logits: Any, bias: Any, token: ir.Value, lane: ir.Value, shape: tuple[int, ...]
    ) -> None:
        self._parts, tokens, self._num_experts = shape
        self._logits, self._bias, self._lane, self._part = logits, bias, lane, tokens * self._num_experts
        self._exists = _less(token, _c(tokens))
        self.number = arith.minui(token, _c(tokens - 1))
        each = -(-self._num_experts // LANES)
        begin = arith.muli(lane, _c(each))
        self._experts = [arith.addi(begin, _c(n)) for n in range(each)]
        self._keys = [self._key(expert) for expert in self._experts]
        self._all = list(self._keys)
        for turn in range(each):  # neighbours that are out of order, so equal ones keep theirs
            for n in range(turn % 2, each - 1, 2):
                self._sort(n)
        self._best: list[ir.Value] = []  # keys of the chosen, known to all lanes
        self._gives: Any = None  # whether it is this lane that has the best one

    def _key(self, expert: ir.Value) -> ir.Value:
        """Whole numbers in the order of the logits; 0, the least, where there is no such expert."""
        place = arith.minui(expert, _c(self._num_experts - 1))
        at = arith.addi(arith.muli(self.number, _c(self._num_experts)), place)
        parts = [
            llvm.load(_f32(), _at(self._logits, arith.addi(at, _c(n * self._part))))
            for n in range(self._parts)
        ]
        if self._bias is not None:
            kind = ir.MemRefType(self._bias.type).element_type
            bias = memref.load(self._bias, [arith.index_cast(ir.IndexType.get(), place)])
            parts.append(bias if kind == _f32() else arith.extf(_f32(), bias))
        logit = functools.reduce(arith.addf, parts, _f(0.0))  # which makes -0 0
        bits = arith.bitcast(_i32(), logit)
        negative = arith.cmpi(arith.CmpIPredicate.slt, bits, _c(0))
        key = arith.select(negative, arith.xori(bits, _c(ALL)), arith.ori(bits, _c(SIGN)))
        return arith.select(_less(expert, _c(self._num_experts)), key, _c(0))

    def _sort(self, n: int) -> None:
        swap = arith.cmpi(arith.CmpIPredicate.ugt, self._keys[n + 1], self._keys[n])
        for held in (self._keys, self._experts):
            one, other = held[n : n + 2]
            held[n : n + 2] = [arith.select(swap, other, one), arith.select(swap, one, other)]

    def compare(self) -> None:
        best = mgpu_utils.inline_ptx(
            "redux.sync.max.u32 $0, $1, 0xffffffff;", self._keys[0], result_types=_i32(), convergent=True
        )
        self._best.append(best)

    def find_lane(self) -> None:
        has_it = arith.cmpi(arith.CmpIPredicate.eq, self._keys[0], self._best[-1])
        lanes = nvvm.vote_sync(_c(ALL), has_it, nvvm.VoteSyncKind.ballot)
        first = arith.andi(lanes, arith.subi(_c(0), lanes))  # its bit alone
        self._gives = arith.cmpi(arith.CmpIPredicate.eq, first, arith.shli(_c(1), self._lane))

    def take(self, chosen: Any, count: int, nth: int) -> None:
        """Of the lane that has it: the expert, whose place its next one takes."""
        expert = arith.minui(self._experts[0], _c(self._num_experts - 1))  # of no number, if all are NaNs
        place = _at(chosen, arith.addi(arith.muli(self.number, _c(count)), _c(nth)))
        shared = llvm.PointerType(place.type).address_space == mgpu_utils.WORKGROUP_NVPTX_ADDRESS_SPACE
        mgpu_utils.inline_ptx(
            f"st.{'shared' if shared else 'global'}.b32 [$0], $1;",
            place,
            expert,
            predicate=arith.andi(self._gives, self._exists),
            has_side_effects=True,
        )
        for held, none in ((self._keys, _c(0)), (self._experts, self._experts[-1])):
            following: Sequence[ir.Value] = [*held[1:], none]
            held[:] = [
                arith.select(self._gives, after, now) for now, after in zip(held, following, strict=True)
            ]

    def store_weights(self, ref: Any, normalize: bool) -> None:
        values = [_number(key) for key in self._best]
        weights = [_exp(arith.subf(x, values[0])) for x in values]
        if normalize:
            total = weights[0]
            for weight in weights[1:]:
                total = arith.addf(total, weight)
        else:
            total = _f(0.0)
            for key in self._all:
                there = arith.cmpi(arith.CmpIPredicate.ne, key, _c(0))
                weight = _exp(arith.subf(_number(key), values[0]))
                total = arith.addf(total, arith.select(there, weight, _f(0.0)))
            distance = LANES // 2
            while distance:
                total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
                distance //= 2
        own = weights[0]  # of a lane the one of its number
        for n, weight in enumerate(weights):
            own = arith.select(arith.cmpi(arith.CmpIPredicate.eq, self._lane, _c(n)), weight, own)
        count = _c(len(weights))
        with mgpu_utils.when(arith.andi(self._exists, _less(self._lane, count))):
            place = arith.addi(arith.muli(self.number, count), self._lane)
            llvm.store(arith.divf(own, total), _at(ref, place))


def _number(key: ir.Value) -> ir.Value:
    """The logit of a key."""
    positive = arith.cmpi(arith.CmpIPredicate.slt, key, _c(0))
    return arith.bitcast(_f32(), arith.select(positive, arith.xori(key, _c(SIGN)), arith.xori(key, _c(ALL))))


def _exp(x: ir.Value) -> ir.Value:
    return mgpu_utils.inline_ptx(
        "ex2.approx.ftz.f32 $0, $1;", arith.mulf(x, _f(math.log2(math.e))), result_types=_f32()
    )


def _at(ref: Any, place: ir.Value) -> ir.Value:
    """The address of a number of 4 bytes."""
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [place], _i32())


def _less(one: ir.Value, other: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, one, other)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _c(value: int) -> ir.Value:
    return mgpu_utils.c(value if value < SIGN else value - (1 << 32), _i32())


def _f(value: float) -> ir.Value:
    return mgpu_utils.c(value, _f32())
