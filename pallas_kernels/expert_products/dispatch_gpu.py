"""Tokens dealt to their experts as one kernel for Hopper GPUs: XLA takes a dozen small ones for it. Few are not dealt.

Of each token the experts with the largest logits are chosen (`choose_gpu`), each expert's rows are counted and its first
one found, and tokens are copied to their rows. Every CTA does all of this but the copies, of which it has a share: so no CTA
waits for another. An expert, or a token's choice, is a number of a vector (`pallas_kernels.numbers`).
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import numbers
from pallas_kernels.expert_products.choose_gpu import Choice, choose
from pallas_kernels.expert_products.plan import SortedBlocks, most_blocks, num_rows, up
from pallas_kernels.expert_products.rows_gpu import WARPS, copy_row
from pallas_kernels.expert_products.tuning import ALIGN
from pallas_kernels.support import num_sms

i32 = jnp.int32
SMEM = plgpu.SMEM
WARPGROUPS = 4  # of a CTA: one alone takes three times as long to choose
WORD = 32  # tokens of a word of an expert's mask


@functools.partial(jax.jit, static_argnames=("count", "block", "normalize", "ctas", "interpret"))
def dispatch_mosaic_gpu(
    x: jax.Array,
    logits: jax.Array,
    there: jax.Array | None,
    bias: jax.Array | None,
    *,
    count: int,
    block: int,
    normalize: bool,
    ctas: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, SortedBlocks]:
    """See `expert_products.dispatch`: rows, weights, and of the plan positions and blocks."""
    (tokens, size), num_experts = x.shape, logits.shape[2]
    pairs, most = tokens * count, most_blocks(tokens * count, num_experts, block)
    ctas = min(num_sms() if ctas is None else ctas, pl.cdiv(pairs, WARPS))
    given = {"x": x, "logits": logits}
    if there is not None:
        given["there"] = there.astype(i32)
    if bias is not None:
        given["bias"] = bias
    made = {"rows": jax.ShapeDtypeStruct((num_rows(tokens, count, num_experts), size), x.dtype)}
    made["weights"] = jax.ShapeDtypeStruct((pairs,), jnp.float32)
    sizes = {
        "position": pairs,
        "expert": most,
        "first": num_experts,
        "counts": num_experts,
        "ends": num_experts,
    }
    made |= {name: jax.ShapeDtypeStruct((length,), i32) for name, length in sizes.items()}
    lines = numbers.padded(num_experts) // numbers.LANES
    held = {"chosen": pairs, "places": pairs, "masks": pl.cdiv(tokens, WORD) * num_experts}
    held |= {"firsts": num_experts, "some": lines, "others": lines}
    threads = plgpu.Barrier(num_arrivals=WARPGROUPS)

    def expert_dispatch(*refs: Any) -> None:  # the name that profiles show
        *others, chosen, placed = refs
        names = (*given, *made, *(f"{name}_s" for name in held))
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        kernel = _Dispatch(
            dict(zip(names, others, strict=True)), cta=cta, count=count, block=block, interpreted=interpret is not None
        )  # fmt: skip
        pl.when(wg == 0)(kernel.clear)
        kernel.choose(ctas, wg, normalize)
        kernel.wait_for_all(chosen)
        pl.when(wg == 0)(kernel.place)
        kernel.wait_for_all(placed)
        kernel.copy(ctas, wg)

    out = plgpu.kernel(
        expert_dispatch,
        out_type=list(made.values()),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        scratch_types=[*[SMEM((length,), i32) for length in held.values()], threads, threads],
        **({} if interpret is None else {"interpret": interpret}),
    )(*given.values())
    rows, weights, position, *of_blocks = out
    return rows, weights.reshape(tokens, count), position.reshape(tokens, count), SortedBlocks(*of_blocks)


@functools.partial(jax.jit, static_argnames=("count", "normalize", "interpret"))
def choose_mosaic_gpu(
    logits: jax.Array, bias: jax.Array | None, *, count: int, normalize: bool, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """See `expert_products.choose`."""
    tokens = logits.shape[1]
    given = [logits] if bias is None else [logits, bias]

    def choose_experts(logits: Any, *others: Any) -> None:  # the name that profiles show
        *added, chosen, weights = others
        of = Choice(logits, added[0] if added else None, chosen, weights, count, normalize)
        choose(of, i32(0), 1, i32(0), 1, interpreted=interpret is not None)

    made = [jax.ShapeDtypeStruct((tokens * count,), dtype) for dtype in (i32, jnp.float32)]
    options = {} if interpret is None else {"interpret": interpret}
    chosen, weights = plgpu.kernel(choose_experts, out_type=made, grid=(1,), grid_names=("cta",), **options)(
        *given
    )
    return chosen.reshape(tokens, count), weights.reshape(tokens, count)


class _Dispatch:
    """Within the kernel: references by name, those of shared memory with `_s`."""

    def __init__(self, refs: dict[str, Any], *, cta: Any, count: int, block: int, interpreted: bool) -> None:
        self._refs, self._cta, self._count, self._block = refs, cta, count, block
        _, self._tokens, self._num_experts = refs["logits"].shape
        self._words = pl.cdiv(self._tokens, WORD)
        self._interpreted = interpreted
        self._gather: Any = functools.partial(numbers.gather, interpreted=interpreted)
        self._scatter: Any = functools.partial(numbers.scatter, interpreted=interpreted)
        self._barrier: Any = functools.partial(numbers.barrier, interpreted=interpreted)
        self._add_to: Any = functools.partial(numbers.add_to, interpreted=interpreted)
        self._bits: Any = functools.partial(numbers.count_bits, interpreted=interpreted)

    def clear(self) -> None:
        """The masks."""
        at = numbers.count_up(self._words * self._num_experts)
        self._scatter(self._refs["masks_s"], jnp.where(at < self._words * self._num_experts, at, -1), 0)

    def choose(self, ctas: int, wg: Any, normalize: bool) -> None:
        refs = self._refs
        of = Choice(
            refs["logits"], refs.get("bias"), refs["chosen_s"], refs["weights"], self._count, normalize
        )
        choose(of, self._cta, ctas, wg, WARPGROUPS, interpreted=self._interpreted)

    def wait_for_all(self, barrier: Any) -> None:
        self._barrier()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    def place(self) -> None:
        """Where experts' and tokens' rows are, by one warpgroup."""
        self._mark()
        self._place_experts()
        self._place_tokens()

    def _mark(self) -> None:
        """In each expert's mask the tokens that go there."""
        pair, number = self._pairs()
        token = lax.div(pair, i32(self._count))
        bit = lax.shift_left(jnp.full_like(token, 1), lax.rem(token, i32(WORD)))
        place = lax.div(token, i32(WORD)) * self._num_experts + number
        self._add_to(self._refs["masks_s"], jnp.where(number >= 0, place, -1), bit)
        self._barrier()

    def _pairs(self) -> tuple[Any, Any]:
        """(numbers of all choices, their experts; -1 where there is no token)"""
        pairs = self._tokens * self._count
        pair = numbers.count_up(pairs)
        within = jnp.minimum(pair, pairs - 1)
        there = pair < pairs
        if "there" in self._refs:
            there &= self._gather(self._refs["there"], lax.div(within, i32(self._count))) > 0
        return pair, jnp.where(there, self._gather(self._refs["chosen_s"], within), -1)

    def _place_experts(self) -> None:
        """Where each one's rows begin, and its blocks."""
        number = numbers.count_up(self._num_experts)
        is_one = number < self._num_experts
        place = jnp.where(is_one, number, -1)
        counts = self._bits(self._masks(number, 0))
        for word in range(1, self._words):
            counts += self._bits(self._masks(number, word))
        counts = jnp.where(is_one, counts, 0)
        held, blocks = up(counts, ALIGN), lax.div(up(counts, self._block), i32(self._block))
        up_to, ends = (
            numbers.running_sum(each, self._refs[scratch], interpreted=self._interpreted)[0]
            for each, scratch in ((held, "some_s"), (blocks, "others_s"))
        )
        first = up_to - held
        self._scatter(self._refs["firsts_s"], place, first)
        self._barrier()

        @pl.when(self._cta == 0)
        def _store() -> None:
            for name, value in (("first", first), ("counts", counts), ("ends", ends)):
                self._scatter(self._refs[name], place, value)
            for nth in range(pl.cdiv(self._tokens, self._block)):
                self._scatter(self._refs["expert"], jnp.where(nth < blocks, ends - blocks + nth, -1), number)

    def _place_tokens(self) -> None:
        """Which row each choice is: as many behind its expert's first one as earlier tokens chose that."""
        pairs = self._tokens * self._count
        pair, number = self._pairs()
        token = lax.div(pair, i32(self._count))
        row = self._gather(self._refs["firsts_s"], self._one_of(number))
        for word in range(self._words):
            within = token - word * WORD
            earlier = lax.shift_left(jnp.full_like(within, 1), jnp.clip(within, 0, WORD - 1)) - 1
            earlier = jnp.where(within < WORD, earlier, -1)
            row += self._bits(self._masks(number, word) & earlier)
        row = jnp.where(number >= 0, row, -1)
        place = jnp.where(pair < pairs, pair, -1)
        self._scatter(self._refs["places_s"], place, row)

        @pl.when(self._cta == 0)
        def _store() -> None:
            self._scatter(self._refs["position"], place, jnp.maximum(row, 0))

    def copy(self, ctas: int, wg: Any) -> None:
        """Rows of tokens, a warp's each, one CTA's after another's."""
        pairs, own = self._tokens * self._count, WARPS * (wg * ctas + self._cta)
        for first in range(0, pairs, ctas * WARPS * WARPGROUPS):
            copy_row(
                self._refs["x"], self._refs["places_s"], self._refs["rows"], first + own, self._count,
                interpreted=self._interpreted,
            )  # fmt: skip

    def _masks(self, number: Any, word: int) -> Any:
        return self._gather(self._refs["masks_s"], word * self._num_experts + self._one_of(number))

    def _one_of(self, number: Any) -> Any:
        return jnp.clip(number, 0, self._num_experts - 1)
