"""The products that the kernel works through, one after another, and what of each is a CTA's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_products.packing import TILE
from pallas_kernels.gates import Gate
from pallas_kernels.layer_products.tuning import COLUMNS, STEP, TOKENS, Tuning, gate_columns, splits
from pallas_kernels.layer_products.weights import Routing

i32 = jnp.int32
STRIDE = 32  # of counters, so that each has a cache line
MOST_PHASES = 5
HALVES = COLUMNS // TILE  # of a tile's columns, where weights are in FP8
ATTENDED = (
    2 * MOST_PHASES * STRIDE
)  # of the counter of CTAs whose attention is done, if that is a part of the kernel
# Of counters of CTAs that have left their sums, one for each tile, in the two products whose parts are added up by tiles.
TILES = ATTENDED + STRIDE
MOST_TILES, TILE_STRIDE = 132, 8
COUNTERS = TILES + 2 * MOST_TILES * TILE_STRIDE
ROWS = 4  # tokens of a tile that a warpgroup adds up at a time, a warp each


@dataclasses.dataclass(frozen=True)
class Addition:
    """Parts of a product added up and to the `residual`, for one token after another: `total`, and its norm `normed`.

    Names are keys of the kernel's operands and results. `post`: weights of a norm of the product itself. `norm`: of the
    total's; None where nothing follows. `spent`: rows of tokens, made by the kernel,
    that nobody reads after it.
    """

    residual: str
    total: str
    post: str | None = None
    norm: str | None = None
    normed: str | None = None
    spent: tuple[str, ...] = ()
    by_tile: bool = False  # by each tile's CTAs: see `by_tile`
    squares: str | None = (
        None  # their sums of each tile, of which the factor is made that `normed` lacks then
    )

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(name for name in (self.residual, self.post, self.norm) if name)

    @property
    def made(self) -> tuple[str, ...]:
        return tuple(name for name in (self.total, self.normed) if name)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One product: `source` [T, depth] times `weights` [depth, columns], or [depth, 2 columns] with gates first.

    Names are keys of the kernel's operands and results. What becomes of it goes to `out`: f32[splits, rows, columns], the
    parts of a split depth, with what is made of them; or [T, columns], let through by gates.
    """

    number: int
    source: str
    weights: str
    out: str
    depth: int
    columns: int
    gate: Gate | None = None
    splits: int = 1
    addition: Addition | None = None
    step: int = STEP  # of the depth
    wide: int = COLUMNS  # of a tile's columns
    token_loads: int = 1  # of each step
    chooses: int = 0  # the best columns of so many
    experts: int = 0  # how many chosen ones the weights are of, side by side in the depth or in the columns
    # Gates of more tiles than CTAs have a phase before them, of the gates and then the values of the last tiles: their
    # depth is split, and `opens` is the gate of what their parts are added up to.
    opens: Gate | None = None
    others: int = 0  # tiles of gates that are another phase's
    scaled: tuple[str, int] | None = None  # by norms' factors: sums of squares, and of how many tiles
    forgets: str | None = None  # rows of tokens that nobody reads any more once this phase's are there

    @property
    def pieces(self) -> int:
        """Of `wide` columns, that a tile has."""
        return 2 if self.gate else 1

    @property
    def tiles(self) -> int:
        return self.columns // self.wide

    def tile_of_weights(self, tile: Any, piece: Any) -> Any:
        """Where a piece of a tile lies in the weights' columns."""
        if self.opens:
            return tile + jnp.where(tile < self.tiles // 2, self.others, 2 * self.others)
        return piece * (self.tiles + self.others) + tile

    def place(self, tile: Any, deep: Any) -> tuple[Any, Any, Any]:
        """(Which of the chosen experts, tile, step along the depth) within its weights."""
        if self.gate:
            each = self.tiles // self.experts
            return lax.div(tile, i32(each)), lax.rem(tile, i32(each)), deep
        each = self.depth // self.step // self.experts
        return lax.div(deep, i32(each)), tile, lax.rem(deep, i32(each))

    @property
    def ctas(self) -> int:
        return self.tiles * self.splits

    @property
    def left(self) -> int:
        """Place of the counter of warpgroups that have left their sums."""
        return 2 * self.number * STRIDE

    @property
    def by_tile(self) -> bool:
        """Whether each tile's CTAs add up its parts."""
        return self.addition is not None and self.addition.by_tile

    def left_of(self, tile: Any) -> Any:
        """Place of the counter of a tile's CTAs that have left their sums."""
        return TILES + (MOST_TILES * (self.number > 0) + tile) * TILE_STRIDE

    @property
    def added(self) -> int:
        """Place of the counter of tokens whose parts are added up, or which have chosen."""
        return (2 * self.number + 1) * STRIDE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tokens: int
    tuning: Tuning
    phases: tuple[Phase, ...]
    eps: float
    offset: float
    interpreted: bool  # one phase, and nothing waits for others
    attends: bool = False  # all CTAs attend before the first product
    routing: Routing | None = None  # of a mixture of experts

    @property
    def warpgroups(self) -> int:
        """That compute: each has some of the tokens, or of weights in FP8 in the end some of a tile's columns."""
        if self.tuning.fp8:
            return HALVES
        return -(-self.tokens // TOKENS)

    def tile_rows(self, phase: Phase) -> int:
        """Tokens that each of a tile's CTAs adds up, or fewer."""
        return -(-self.tokens // (ROWS * phase.splits)) * ROWS

    def adding(self, phase: Phase) -> int:
        """CTAs of a tile that add some up."""
        return -(-self.tokens // self.tile_rows(phase))

    def additions(self, phase: Phase) -> int:
        """How many arrive when they have added up a phase's parts."""
        return phase.tiles * self.adding(phase) if phase.by_tile else self.tokens

    @property
    def slot_rows(self) -> int:
        """Of tokens in a slot: a matrix instruction reads on into the next one, of which nothing is kept.

        The interpreter would see a race in that.
        """
        return -(-self.tokens // TOKENS) * TOKENS if self.interpreted else -(-self.tokens // 8) * 8

    @property
    def scales(self) -> bool:
        """Whether norms' factors come behind products."""
        return any(phase.scaled for phase in self.phases)

    def waiting_for_choice(self, phase: Phase) -> int:
        """Warpgroups: those that load weights in all CTAs, and those that load tokens for the next phase."""
        return self.tuning.ctas + self.phases[phase.number + 1].ctas

    def awaited(self, phase: Phase) -> list[tuple[int, int, int]]:
        """(Counter, what it has to reach, how many wait for that) before a phase's tokens are there."""
        if phase.number == 0:
            return [(ATTENDED, self.tuning.ctas, phase.ctas)] if self.attends else []
        before = self.phases[phase.number - 1]
        if before.opens:  # the same tokens, but not all CTAs have some of both
            return self.awaited(before)
        if before.chooses:
            return [(before.added, self.tokens, self.waiting_for_choice(before))]
        if before.addition:
            both = self.phases[phase.number + 1].ctas if phase.opens else 0
            return [(before.added, self.additions(before), phase.ctas + both)]
        awaited = [(before.left, self.warpgroups * before.ctas, phase.ctas)]
        if before.others:
            awaited.append((self.phases[before.number - 1].added, self.tokens, phase.ctas))
        return awaited

    @property
    def wides(self) -> list[int]:
        """Columns of the tiles of weights."""
        return sorted({phase.wide for phase in self.phases})

    @property
    def last(self) -> int:
        return self.phases[-1].number


@dataclasses.dataclass(frozen=True)
class Share:
    """What of a phase is a CTA's: steps of one split of one tile, or none."""

    tile: Any
    split: Any
    first: Any  # step
    steps: Any
    active: Any

    @classmethod
    def all_of(cls, cfg: Config, refs: dict[str, Any], cta: Any) -> list["Share"]:
        """Of every phase; of the heads none where the `following` layer, i32[1], is none."""
        shares = [cls.of(phase, cta, cfg.tuning.ctas) for phase in cfg.phases]
        if "following" in refs:
            there = refs["following"][0] > 0
            last = shares[-1]
            shares[-1] = dataclasses.replace(
                last, steps=jnp.where(there, last.steps, 0), active=last.active & there
            )
        return shares

    @classmethod
    def of(cls, phase: Phase, cta: Any, ctas: int) -> "Share":
        """A CTA's, one of `ctas`."""
        number, active = spread(cta, phase.ctas, ctas)
        tile, split = lax.rem(number, i32(phase.tiles)), lax.div(number, i32(phase.tiles))
        first, end = (lax.div((split + n) * (phase.depth // phase.step), i32(phase.splits)) for n in (0, 1))
        return cls(tile, split, first, jnp.where(active, end - first, 0), active)


def spread(cta: Any, working: int, ctas: int) -> tuple[Any, Any]:
    """(Its number among those that work, whether it does), where so many of all CTAs have work.

    Idle ones lie evenly between the others. The last ones would share a part of the chip, and the others crowd the paths to
    the rest of it.
    """
    idle = i32(ctas - working)
    before, after = (lax.div((cta + n) * idle, i32(ctas)) for n in (0, 1))
    return cta - before, after == before


def adds_by_tile(x: jax.Array, post_norms: bool) -> bool:
    """Whether tiles' CTAs can add up their parts, to a residual stream x [T, E].

    What has no norm's factor yet may be too large for float16, and a norm of the product itself needs all of a token.
    """
    tokens, width = x.shape
    return x.dtype == jnp.bfloat16 and not post_norms and tokens <= TOKENS and width <= MOST_TILES * COLUMNS


def added_by_tile(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The same phases with parts added up by each tile's CTAs, and norms' factors behind products of what is normalised."""
    squares: dict[str, tuple[str, int]] = {}
    changed = []
    for phase in phases:
        phase = dataclasses.replace(phase, scaled=squares.get(phase.source))
        if how := phase.addition:
            # Other tiles' CTAs may still read what went through the gates: the heads' are the ones that forget it.
            spent = tuple(name for name in how.spent if name != phase.source)
            how = dataclasses.replace(how, by_tile=True, spent=spent)
            if normed := how.normed:
                squares[normed] = f"{normed}_squares", phase.tiles
                how = dataclasses.replace(how, squares=squares[normed][0])
            phase = dataclasses.replace(phase, addition=how)
        changed.append(phase)
    *others, last = changed
    if not last.addition:  # the heads, whose tokens are there when all have read what went through the gates
        last = dataclasses.replace(last, forgets="opened")
    return (*others, last)


def phases_of(
    attended: int,
    width: int,
    inner: int,
    heads: int,
    gate: Gate,
    post_norms: bool,
    tuning: Tuning,
) -> tuple[Phase, ...]:
    """From attention's result to the end of the layer, and to the next one's heads, if they are not 0 columns."""
    out_post, down_post = ("out_post", "down_post") if post_norms else (None, None)
    after_out = Addition("x", "middle", out_post, "norm", "h")
    norm, normed = ("next_norm", "h_next") if heads else (None, None)
    after_down = Addition("middle", "x_new", down_post, norm, normed, ("h", "opened", "middle"))

    def product(source: str, weights: str, depth: int, columns: int, **rest: Any) -> Phase:
        parts = splits(depth, columns, tuning.ctas)
        how: dict[str, Any] = {"splits": parts, "step": tuning.step} | rest
        return Phase(0, source, weights, f"{weights}_parts", depth, columns, **how)

    last = max(inner // COLUMNS - tuning.ctas, 0) * COLUMNS  # of gates, that are all CTAs'
    first = inner - last
    phases = [product("attended", "out", attended, width, addition=after_out)]
    if last:
        phases += [product("h", "gate_up", width, 2 * last, opens=gate, others=first // COLUMNS)]
    gates = Phase(0, "h", "gate_up", "opened", width, first, gate, **gates_of(inner, tuning))
    phases += [dataclasses.replace(gates, others=last // COLUMNS)]
    phases += [product("opened", "down", inner, width, addition=after_down)]
    if heads:
        phases += [product("h_next", "heads", width, heads)]
    return tuple(dataclasses.replace(phase, number=n) for n, phase in enumerate(phases))


def gates_of(columns: int, tuning: Tuning) -> dict[str, Any]:
    """Of `Phase`: narrow and deep tiles where these give more CTAs work."""
    if not tuning.narrow_gates:
        return {"step": tuning.step}
    wide = gate_columns(columns, tuning.ctas)
    deep = COLUMNS // wide
    return {"step": STEP * deep, "wide": wide, "token_loads": deep}


def mixture_phases(
    attended: int,
    width: int,
    inner: int,
    heads: int,
    gate: Gate,
    tuning: Tuning,
    experts: int,
    routing: Routing,
) -> tuple[Phase, ...]:
    """The same of one token and a mixture of experts, `inner` numbers each.

    The chosen ones' gates lie side by side, and what is let through meets `down` as one depth: so that product adds up the
    experts, whose weights are factors of what is let through.
    """
    norm, normed = ("next_norm", "h_next") if heads else (None, None)
    after_out = Addition("x", "middle", None, "norm", "h")
    after_down = Addition("middle", "x_new", None, norm, normed, ("h", "opened", "middle"))

    def product(number: int, source: str, weights: str, depth: int, columns: int, **rest: Any) -> Phase:
        parts = splits(depth, columns, tuning.ctas)
        return Phase(number, source, weights, f"{weights}_parts", depth, columns, splits=parts, **rest)

    behind = routing.experts * inner
    phases = (
        product(0, "attended", "out", attended, width, addition=after_out),
        product(1, "h", "router", width, experts, chooses=routing.experts),
        Phase(
            2, "h", "gate_up", "opened", width, behind, gate, experts=routing.experts, **gates_of(behind, tuning)
        ),
        product(3, "opened", "down", behind, width, addition=after_down, experts=routing.experts),
    )  # fmt: skip
    return (*phases, product(4, "h_next", "heads", width, heads)) if heads else phases
