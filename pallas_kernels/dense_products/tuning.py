"""How the dense products are cut, one frozen record for each generation of GPUs, by compute capability."""

import dataclasses

import jax

from pallas_kernels.support import measured_on, num_sms, record_for

TOKENS = 64  # rows of a matrix instruction, a computing warpgroup's
MULTIPLE = 8  # of tokens, if there are more
MOST_TOKENS = 128  # whose sums two warpgroups' registers hold; with more XLA's products are as fast
STEP = 64  # of the depth, that a step loads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What depends on the shape of the weights and how many tokens there are."""

    columns: int  # of the weights, a CTA's; of gated ones as many gates, and as many others
    splits: int = 1  # of the depth, each a CTA of a cluster, which adds the parts up

    def leaves_squares(self, columns: int) -> bool:
        """Whether `added_products` can be cut so: an even number of CTAs finishes some of the columns each."""
        return columns // self.columns * self.splits % 2 == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What depends on the chip."""

    shared_bytes: int = 227 * 1024  # of an SM's shared memory, what a CTA may take
    columns: tuple[int, ...] = (128, 64)
    splits: tuple[int, ...] = (1, 2)  # clusters of four leave many SMs without work
    least_tokens: int = 40  # with fewer XLA's products keep that pace as well, but for those with
    few_numbers: int = 15 << 20  # at most, whose depth it splits, with one more kernel for the sum
    least_ctas: float = 0.6  # of the multiprocessors
    least_weights: int = 1 << 23  # numbers; smaller matrices were not measured
    kinds: tuple[str, ...] = ("H100", "H200")  # parts of the names of devices on which it was measured
    kinds_few: tuple[str, ...] = ("H200",)  # for few tokens


TUNING = {"9.0": Generation()}


def tuning_for(
    tokens: int, depth: int, columns: int, *, gated: bool = False, device: jax.Device | None = None
) -> Tuning | None:
    """For so many tokens and weights [depth, columns]; None if the kernel cannot cut them, or XLA's products are as fast.

    All CTAs have a multiprocessor of their own, and each the same share of the weights: so many CTAs are best, and among
    equals those with fewer splits.
    """
    generation, halves = record_for(TUNING, device), 2 if gated else 1
    choices = []
    for splits in generation.splits if not gated else (1,):
        for wide in generation.columns:
            ctas = columns // (wide * halves) * splits
            if columns % (wide * halves) == depth % (STEP * splits) == 0 and ctas <= num_sms():
                choices.append((-ctas, splits, Tuning(columns=wide, splits=splits)))
    numbers = depth * columns
    small = numbers < generation.least_weights
    if not choices or small or not takes(tokens, numbers, device) or not can_take(tokens):
        return None
    ctas, _, tuning = min(choices, key=lambda choice: choice[:2])
    return tuning if -ctas >= generation.least_ctas * num_sms() else None


def takes(tokens: int, numbers: int | None = None, device: jax.Device | None = None) -> bool:
    """Whether products of about so many tokens are worth the kernel on the device, by default the first.

    numbers: of the weights; None: of any.
    """
    device = jax.devices()[0] if device is None else device
    generation = record_for(TUNING, device)
    few = numbers is not None and generation.least_weights <= numbers <= generation.few_numbers
    least = 1 if few and measured_on(generation.kinds_few, device) else generation.least_tokens
    return measured_on(generation.kinds, device) and least <= tokens <= MOST_TOKENS


def can_take(tokens: int) -> bool:
    """Whether the kernel can have so many."""
    return 1 <= tokens <= MOST_TOKENS and (tokens <= MULTIPLE or tokens % MULTIPLE == 0)


def warpgroups(tokens: int) -> int:
    """That compute, for so many tokens."""
    return -(-tokens // TOKENS)
