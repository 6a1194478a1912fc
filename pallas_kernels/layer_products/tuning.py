"""How a layer's products are cut, one frozen record for each generation of GPUs, by compute capability."""

import dataclasses

import jax

from pallas_kernels.support import measured_on, num_sms, record_for

TOKENS = 64  # rows of a matrix instruction, a computing warpgroup's
COLUMNS = 128  # of a tile: with fewer the memory gives shorter stretches of rows, and less
STEP = 64  # of the depth, that a step loads; of weights in FP8 twice as many, the same bytes
MULTIPLE = 8  # of tokens, if there are more: rows of a tile of shared memory
MOST_TOKENS = 128
LINKED = (2,)  # numbers of linked devices on which shares of the matrices have run, with so many tokens
MOST_LINKED, MOST_LINKED_FP8 = 64, 40
LEAST_STEPS = 4  # of a split
MOST_TOKEN_SLOTS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on how many tokens there are. Slots hold a step each and fill shared memory."""

    ctas: int  # all at once on the device: they wait for each other
    weight_slots: int  # at least those of two steps of gates, which are read while the next one's come
    token_slots: int
    # Loads of weights under way: more make others wait, and what barriers store and read.
    ahead: int = 3
    early: int = 2  # the same for products that have not begun
    by_tile: bool = False  # parts are added up by each tile's CTAs where that can be (`phases.adds_by_tile`)
    narrow_gates: bool = False  # where twice as many tiles of half as many columns are no more than CTAs
    fp8: bool = False  # the weights are: two warpgroups take turns at their slots
    by_warp: bool = False  # of these: each warp multiplies with matrix instructions of its own

    @property
    def step(self) -> int:
        """Of the depth."""
        return 2 * STEP if self.fp8 else STEP

    def __post_init__(self) -> None:
        if self.weight_slots < 4 or self.token_slots < 2:
            raise ValueError(f"4 slots of weights and 2 of tokens are the least, got {self}")
        if self.narrow_gates and (self.fp8 or self.token_slots < 4):  # of two steps of two loads
            raise ValueError(f"narrow gates are not of FP8 weights, and take 4 slots of tokens, got {self}")
        if self.fp8 and self.weight_slots % 2:
            raise ValueError(f"two warpgroups take turns at slots of FP8 weights: an even number, got {self}")
        if not 1 <= min(self.early, self.ahead) <= max(self.early, self.ahead) <= self.weight_slots:
            raise ValueError(
                f"1 to {self.weight_slots} loads can be under way, as many as there are slots, got {self}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What depends on the chip."""

    least_ctas: float = 0.45  # of the multiprocessors, that have work in every product
    least_weights: int = 6 << 23  # numbers
    # Tokens with narrow gates, which twice as many CTAs read; more were not measured, but for linked devices' shares.
    most_narrow: int = 32
    most_narrow_linked: int = 64
    most_far_ahead: int = 32  # tokens with four loads under way; with more four were slower, or not measured
    most_fp8: int = 40  # tokens with weights in FP8; with more it was measured on fewer kinds
    most_by_warp: int = 16  # tokens with weights in FP8; with 24 it is as fast as by warpgroups
    kinds: tuple[str, ...] = ("H100", "H200")  # parts of the names of devices on which it was measured
    kinds_many: tuple[str, ...] = (
        "H100",
    )  # with more than TOKENS: products by themselves are faster on an H200
    kinds_fp8_many: tuple[str, ...] = ("H200",)
    kinds_mixture: tuple[str, ...] = ("H100", "H200")  # for layers with experts


TUNING = {"9.0": Generation()}


def can_take(tokens: int, fp8: bool = False) -> bool:
    """Whether the kernel can have so many, of FP8 weights one warpgroup's at most."""
    return 1 <= tokens <= (TOKENS if fp8 else MOST_TOKENS) and (tokens <= MULTIPLE or tokens % MULTIPLE == 0)


def tuning_for(
    tokens: int,
    attended: int,
    width: int,
    inner: int,
    heads: int,
    device: jax.Device | None = None,
    *,
    fp8: bool = False,
    linked: bool = False,
    mixture: tuple[int, int] | None = None,
) -> Tuning | None:
    """Of layers with so many numbers from attention, in the residual stream, behind the gates and of heads, for each token.

    `fp8`: the weights are. `linked`: each of several devices has a share of so many columns. `mixture`: so many experts, and
    how many of them are chosen; the gates are those of each.

    None where the kernel cannot cut its matrices, or products by themselves may be faster.
    """
    device = jax.devices()[0] if device is None else device
    generation = record_for(TUNING, device)
    if mixture:
        columns = attended, width, inner, heads
        return _mixture_tuning(generation, device, *columns, *mixture) if tokens == 1 else None
    ctas = num_sms()
    kinds = generation.kinds if tokens <= TOKENS else generation.kinds_many
    if fp8 and tokens > generation.most_fp8:
        kinds = generation.kinds_fp8_many
    if not measured_on(kinds, device) or not can_take(tokens, fp8) or tokens > ctas:
        return None
    if width % COLUMNS or inner % COLUMNS or heads % COLUMNS or attended % (2 * STEP if fp8 else STEP):
        return None
    if (attended + 3 * inner + heads) * width < generation.least_weights:
        return None
    cut = [(attended, width), (inner, width)] + [(width, heads)] * (heads > 0)
    few = tokens <= TOKENS
    narrow = tokens <= (generation.most_narrow_linked if linked else generation.most_narrow) and not fp8
    gates = inner // (gate_columns(inner, ctas) if narrow else COLUMNS)
    if gates > ctas:  # the last ones are a product of their own
        cut.append((width, 2 * (inner - ctas * COLUMNS)))
    used = [min(gates, ctas), *(columns // COLUMNS * splits(depth, columns, ctas) for depth, columns in cut)]
    if not all(generation.least_ctas * ctas <= count <= ctas for count in used):
        return None
    return Tuning(
        ctas=ctas,
        weight_slots=weight_slots(tokens, fp8),
        token_slots=token_slots(tokens, fp8),
        ahead=4 if fp8 or tokens <= generation.most_far_ahead else 3,
        early=2 if few else 1,
        narrow_gates=narrow,
        by_tile=few,
        fp8=fp8,
        by_warp=fp8 and tokens <= generation.most_by_warp,
    )


def _mixture_tuning(
    generation: Generation,
    device: jax.Device,
    attended: int,
    width: int,
    inner: int,
    heads: int,
    experts: int,
    chosen: int,
) -> Tuning | None:
    """Of one token's products with as many `experts` as a tile has columns, each numbered by a thread."""
    if not measured_on(generation.kinds_mixture, device) or experts != COLUMNS:
        return None
    if width % COLUMNS or inner % COLUMNS or heads % COLUMNS or attended % STEP:
        return None
    ctas = num_sms()
    if max(width, heads, chosen * inner) // COLUMNS > ctas:
        return None
    return Tuning(ctas=ctas, weight_slots=11, token_slots=token_slots(1), narrow_gates=True, by_tile=True)


def weight_slots(tokens: int, fp8: bool) -> int:
    """As many as there is room for beside tokens, and sums of weights in FP8 that are exchanged."""
    if tokens <= MULTIPLE:
        return 12
    if fp8:
        return 10 if tokens <= 48 else 8
    return 11 if tokens <= TOKENS else 8


def token_slots(tokens: int, fp8: bool = False) -> int:
    """As many as there is room for: the latency of their loads is what a product begins with."""
    room, rows = (4 if tokens <= TOKENS else 10) * TOKENS, -(-tokens // MULTIPLE) * MULTIPLE
    if tokens > TOKENS:  # what matrix instructions read on behind the last slot
        room -= -(-tokens // TOKENS) * TOKENS - rows
    steps = min(room // rows, MOST_TOKEN_SLOTS)
    return steps // 2 if fp8 else steps


def gate_columns(columns: int, ctas: int) -> int:
    """Of a tile of gates, half as many if there are CTAs for these tiles: few CTAs do not take in what the memory gives."""
    return COLUMNS // 2 if columns // (COLUMNS // 2) <= ctas else COLUMNS


def splits(depth: int, columns: int, ctas: int) -> int:
    """Of the depth, so that as many CTAs as there are have work."""
    return max(1, min(ctas // (columns // COLUMNS), depth // STEP // LEAST_STEPS))
