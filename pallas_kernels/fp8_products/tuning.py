"""Tuning of the products with FP8 weights, frozen records for each generation of GPUs, by compute capability."""

import dataclasses

import jax

from pallas_kernels.fp8_products.packing import BYTES, TILE
from pallas_kernels.support import num_sms, record_for

LEAST_TOKENS = 8  # of a block; tokens that are no multiple are padded
MOST_TOKENS = 256  # of a matrix instruction; a block of more takes two
WIDEST = 320  # tokens of a block, whose sums are in registers
SHARED = 228 * 1024  # bytes of an SM's shared memory
OTHER = 2 * 1024  # of it, what a CTA takes beside its buffers
MOST_SPLITS = 8  # CTAs of a cluster that any GPU has
SPLITS = (2, 4)  # of the depth; clusters of four leave some SMs without work,
SHARE_OF_FOUR = 0.85  # so they have fewer CTAs at once
MOST_SPLIT_TOKENS = 256  # beyond, a token's results are the same bits however many there are
FIXED = 64  # of a unit's time, in tokens, what does not grow with them: blocks of 256 are 1.2 times as fast as of 128
LEAST_NARROW = 65  # tokens that are worth being made FP8 too: up to 64 may have a layer's kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the chip, the shape of the weights and how many tokens there are."""

    rows: int  # tokens of a block
    warpgroups: int = (
        1  # computing ones of a CTA, 64 columns each, sharing the tokens; as many as divide the columns
    )
    per_sm: int = 1  # CTAs of an SM
    splits: int = 1  # of the depth, CTAs of a cluster; as many as divide the depth
    deep: int = 4  # tiles along the depth that a step loads, at most; as many as divide a split's depth
    stores: int = 1  # of a part's results, one after another through the same shared memory
    num_ctas: int | None = None  # without splits

    @property
    def part(self) -> int:
        """Tokens of a block that a matrix instruction takes."""
        return _rows(self.rows, -(-self.rows // MOST_TOKENS))

    @property
    def stored(self) -> int:
        """Tokens that are stored at once; with splits, that each CTA finishes."""
        return _rows(self.part, self.splits if self.splits > 1 else self.stores)

    def for_tokens(self, count: int) -> "Tuning":
        """Blocks with no more rows than there are of so many tokens.

        Of an array with one tile of rows copies know no place along these: what a block has beyond would be stored there.
        """
        return dataclasses.replace(self, rows=min(self.rows, _rows(count, 1)))

    def gates(self, across: int) -> bool:
        """Whether a CTA has gates and what they let through, of weights of so many tiles across."""
        return across % 2 == 0 and self.warpgroups == 2 and self.splits == 1 and self.part > LEAST_TOKENS

    def for_gates(self, across: int) -> "Tuning":
        """The same for a gated product, whose results leave in two goes. Raises ValueError where `gates` says no."""
        if not self.gates(across):
            raise ValueError(
                f"gated products of {across} tiles need two warpgroups and no splits, not {self}"
            )
        return dataclasses.replace(self, stores=2)

    def for_weights(self, across: int, deep: int) -> "Tuning":
        """What divides weights of so many tiles."""
        return dataclasses.replace(
            self, warpgroups=_divisor(across, self.warpgroups), splits=_divisor(deep, self.splits)
        )

    def steps(self, deep: int, size: int = 2) -> tuple[int, int]:
        """(Tiles along the depth of a step, steps under way), `for_weights`, with tokens of numbers of so many bytes."""
        deep //= self.splits
        step = _divisor(deep, self.deep)
        out = self.warpgroups * self.stored * TILE * (2 + 4 * (self.splits - 1))
        of_step = step * (self.warpgroups * BYTES + self.rows * TILE * size)
        stages = (SHARED // self.per_sm - OTHER - out) // of_step
        return step, max(2, min(stages, deep // step + 1))

    def ctas(self) -> int:
        """CTAs of a call."""
        return num_sms() * self.per_sm if self.num_ctas is None else self.num_ctas


# By the tokens of a whole block, ascending. With few tokens the memory's pace counts: many loads under way, and bytes that
# become bfloat16 in several warpgroups at once.
TUNING = {
    "9.0": (
        Tuning(rows=LEAST_TOKENS, per_sm=4),
        Tuning(rows=16, per_sm=3),
        Tuning(rows=32, per_sm=2),
        Tuning(rows=64, per_sm=2, deep=2),
        Tuning(rows=128, warpgroups=2, deep=2),
        Tuning(rows=256, warpgroups=2, deep=1),
    ),
}


# The same for tokens in FP8: two tiles a matrix product are rows of 128 bytes, with one it is 0.85 times as fast.
NARROW = {
    "9.0": (
        Tuning(rows=128, warpgroups=2, deep=4),
        Tuning(rows=256, warpgroups=2, deep=2, stores=2),
    ),
}


def tuning_for(
    tokens: int, across: int, deep: int, device: jax.Device | None = None, *, narrow: bool = False
) -> Tuning:
    """For so many tokens, `narrow` if they are in FP8, and tiles of weights, on the device, by default the first."""
    records = record_for(NARROW if narrow else TUNING, device)
    large, largest = records[-2:]
    small = next((r for r in records[:-1] if r.rows >= tokens), None)
    if small is not None:
        record = _even(small, tokens, 1)
    else:
        whole, fewer = -(-tokens // largest.rows), tokens // largest.rows
        choices = [_even(largest, tokens, whole)]
        if 0 < fewer < whole:  # blocks a little larger, in place of one for the last few tokens
            wider = _even(largest, tokens, fewer)
            # Tokens in FP8 come with as many scales as whole blocks have.
            choices += [wider] if wider.rows <= WIDEST and fewer * wider.rows <= whole * largest.rows else []
        choices.append(_even(large, tokens, -(-tokens // large.rows)))
        # What takes less time, in rounds of units of work.
        record = min(choices, key=lambda r: -(-_units(r, tokens, across) // r.ctas()) * (r.rows + FIXED))
    # Where there are CTAs for more units of work: fewer columns a CTA, or fewer of the depth.
    if narrow:
        most = 2 if deep // 4 % 2 else 4  # an even number of tiles, as two a matrix product are faster
        return _split(_fewer_columns(record, tokens, across), tokens, across, deep, most)
    return _fewer_columns(_split(record, tokens, across, deep), tokens, across)


def _split(record: Tuning, tokens: int, across: int, deep: int, most: int = 4) -> Tuning:
    if tokens > MOST_SPLIT_TOKENS:
        return record
    for splits, share in zip(SPLITS, (1, SHARE_OF_FOUR), strict=True):
        fits = _units(record, tokens, across) * splits <= record.ctas() * share
        if fits and deep % splits == 0 and splits <= most:
            record = dataclasses.replace(record, splits=splits)
    return record


def _fewer_columns(record: Tuning, tokens: int, across: int) -> Tuning:
    """Half as many, of a CTA that has two computing warpgroups'."""
    two = record.warpgroups == 2 and across % 2 == 0
    fits = 2 * _units(record, tokens, across) * record.splits <= record.ctas()
    return dataclasses.replace(record, warpgroups=1) if two and fits else record


def _units(record: Tuning, tokens: int, across: int) -> int:
    """Units of work without splits."""
    return -(-tokens // record.rows) * (across // _divisor(across, record.warpgroups))


def _rows(tokens: int, blocks: int) -> int:
    """Of each of so many blocks."""
    return -(-tokens // (blocks * LEAST_TOKENS)) * LEAST_TOKENS


def _even(record: Tuning, tokens: int, blocks: int) -> Tuning:
    """The record, with blocks as even as may be."""
    return dataclasses.replace(record, rows=_rows(tokens, blocks))


def _divisor(number: int, most: int) -> int:
    """The largest up to `most`."""
    return max(n for n in range(1, most + 1) if number % n == 0)
