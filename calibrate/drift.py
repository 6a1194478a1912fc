"""Whether inputs want more of the cache than the budgets of their heads, and more than calibration's own samples did.

One number a sample: its overflow, the entries that its heads want beyond their budgets, of all that they want. Those
of calibration are taken with budgets from the other samples, since budgets are always roomy for what they were made from.
A window of live prompts is then tested against calibration by permutation: were both drawn alike, any choice of as many
of all these numbers could as well be the live one. The alarm goes off where next to none of such choices has as large a
mean. So the rate of false alarms of a window is `LEVEL` whatever the distribution, as long as prompts are independent and
like calibration's.

It asks for overflow, not for any difference: inputs that want less than calibration's, or other heads within their budgets,
are well served.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

LEVEL = 1e-3  # false alarms a window
WINDOW = 20  # prompts
LEAST = 8  # prompts before there is a verdict
CHOICES = 9999  # random ones of which the live one must be among the largest
LEAST_SAMPLES = 20  # of calibration: with fewer, one sample that was not like the others decides


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """`statistic`: mean overflow of the window; `alarm` where it is above `threshold`."""

    statistic: float
    threshold: float

    @property
    def alarm(self) -> bool:
        return self.statistic > self.threshold


def grouped(budgets: Float[np.ndarray, "L K"], group_of: Int[np.ndarray, "L K"]) -> Float[np.ndarray, "L K"]:
    """What each head really has: the largest budget in its group."""
    largest = np.zeros(int(group_of.max()) + 1)
    np.maximum.at(largest, group_of.reshape(-1), np.asarray(budgets, np.float64).reshape(-1))
    return largest[group_of]


def excess(
    shares: Float[np.ndarray, "*S L K"], budgets: Float[np.ndarray, "L K"]
) -> Float[np.ndarray, "*S L K"]:
    """What each head wants beyond its budget."""
    # A hair of slack, as in `calibrate.stability`: shares are multiples of 1 / candidates, budgets are float32.
    over = np.asarray(shares, np.float64) - budgets
    return np.where(over > 1e-6, over, 0.0)


def overflow(
    shares: Float[np.ndarray, "*S L K"], budgets: Float[np.ndarray, "L K"]
) -> Float[np.ndarray, "*S"]:
    """Entries that heads want beyond their budgets, of all that they want, by sample."""
    return excess(shares, budgets).sum((-2, -1)) / np.asarray(shares, np.float64).sum((-2, -1))


def calibrated_budgets(
    ratios: Float[np.ndarray, "S L K"], alpha: float, group_of: Int[np.ndarray, "L K"]
) -> Float[np.ndarray, "L K"]:
    """Budgets by Eq. 5 of the paper, as the groups of a plan round them up."""
    wide = np.asarray(ratios, np.float64)
    return grouped(np.minimum(1.0, wide.mean(axis=0) + alpha * wide.std(axis=0)), group_of)


def heldout_overflow(
    ratios: Float[np.ndarray, "S L K"], alpha: float, group_of: Int[np.ndarray, "L K"]
) -> Float[np.ndarray, " S"]:
    """`overflow` of each calibration sample beyond budgets from all the others."""
    rest = (np.delete(ratios, i, axis=0) for i in range(len(ratios)))
    return np.array(
        [
            overflow(sample, calibrated_budgets(others, alpha, group_of))
            for sample, others in zip(ratios, rest, strict=True)
        ]
    )


def judge(
    calibration: Float[np.ndarray, " S"],
    live: Sequence[float] | Float[np.ndarray, " n"],
    level: float = LEVEL,
) -> Verdict:
    """The permutation test: is the mean of `live` among the largest that a choice of as many of all has?

    Monte Carlo over `CHOICES` choices, always the same ones. The live one counts as one of them, and equal means count
    against an alarm, so that the rate of false alarms is at most `level`.
    """
    values = np.concatenate([np.asarray(calibration, np.float64), np.asarray(live, np.float64)])
    count = len(live)
    if not count or not len(calibration):
        raise ValueError("both samples need a value")
    means = values[_choices(len(values), count)].mean(axis=1)
    # With the live one, so many of CHOICES + 1 may be as large.
    allowed = int(level * (CHOICES + 1))
    if allowed < 1:
        raise ValueError(f"level must be at least {1 / (CHOICES + 1)}, found {level}")
    threshold = float(np.partition(means, CHOICES - allowed)[CHOICES - allowed])
    # The same numbers in another order are the same mean, whatever rounding says.
    return Verdict(statistic=float(np.mean(live)), threshold=threshold * (1 + 1e-12))


@functools.lru_cache(maxsize=2 * WINDOW)
def _choices(values: int, count: int) -> Int[np.ndarray, "C n"]:
    """`CHOICES` random subsets of `count` of so many values."""
    keys = np.random.default_rng(0).random((CHOICES, values))
    return np.argpartition(keys, count - 1, axis=1)[:, :count].astype(np.int32)
