"""How far a profile can be trusted: does the ranking of heads hold on other samples, and are budgets wide enough?"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.special import stdtrit

from tangram_jax.profile import BudgetProfile

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its 95% interval; its ends are NaN where one sample says nothing of it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "not defined"
        return f"{self.value:.3f}" + ("" if np.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stability:
    """Rank correlations are Spearman's over all L * K heads; intervals are over the held-out samples."""

    halves: float  # mean shares of one half of the calibration samples against the other half
    heldout: Interval | None  # mean calibration shares against mean held-out shares
    heldout_single: Interval | None  # the same against one held-out sample, averaged over samples
    covered: Interval | None  # share of held-out (sample, head) needs within the head's budget
    overflow: Interval | None  # entries wanted beyond the budgets, as a share of all wanted entries


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of two arrays of equal size; equal values share their mean rank. NaN if constant."""
    ranks = [_ranks(x.reshape(-1)) for x in (np.asarray(a), np.asarray(b))]
    centred = [r - r.mean() for r in ranks]
    norm = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return float((centred[0] * centred[1]).sum() / norm) if norm > 0 else float("nan")


def measure_stability(
    profile: BudgetProfile, ratios: np.ndarray, heldout: np.ndarray | None, seed: int = 0
) -> Stability:
    """Stability of `profile`, made from `ratios` f32[samples, L, K], on `heldout` f32[samples, L, K] (or None).

    The two halves are random but fixed by `seed`.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(ratios))
    middle = len(ratios) // 2
    halves = float("nan")
    if middle:
        halves = spearman(ratios[order[:middle]].mean(axis=0), ratios[order[middle:]].mean(axis=0))
    if heldout is None or not len(heldout):
        return Stability(halves=halves, heldout=None, heldout_single=None, covered=None, overflow=None)
    mean = ratios.mean(axis=0)
    draws = rng.integers(len(heldout), size=(RESAMPLES, len(heldout)))
    single = np.array([spearman(mean, sample) for sample in heldout])
    # A hair of slack: needs are multiples of 1 / candidates, budgets are float32.
    within = (heldout <= profile.budgets + 1e-6).mean(axis=(1, 2))
    wanted = heldout.sum(axis=(1, 2))
    beyond = np.maximum(heldout - profile.budgets, 0).sum(axis=(1, 2))
    return Stability(
        halves=halves,
        heldout=_correlation(mean, heldout),
        heldout_single=_interval(float(single.mean()), single[draws].mean(axis=1), len(heldout)),
        covered=_interval(float(within.mean()), within[draws].mean(axis=1), len(heldout)),
        overflow=_interval(
            float(beyond.sum() / wanted.sum()),
            beyond[draws].sum(axis=1) / wanted[draws].sum(axis=1),
            len(heldout),
        ),
    )


def _correlation(mean: np.ndarray, heldout: np.ndarray) -> Interval:
    """Spearman's correlation of `mean` with the mean of all samples, by a jackknife on Fisher's scale.

    A bootstrap would add the noise of the samples' mean once more, which only lowers a correlation: its interval often lies
    below the value itself.
    """
    count, value = len(heldout), spearman(mean, heldout.mean(axis=0))
    if count < 2 or np.isnan(value):
        return Interval(value=value, low=np.nan, high=np.nan)
    without = [spearman(mean, np.delete(heldout, i, axis=0).mean(axis=0)) for i in range(count)]
    z, *others = np.arctanh(np.clip([value, *without], -1 + 1e-9, 1 - 1e-9))
    error = np.sqrt((count - 1) * np.var(others))
    low, high = np.tanh(z + np.array([-1, 1]) * stdtrit(count - 1, 0.975) * error)
    return Interval(value=value, low=float(low), high=float(high))


def _ranks(x: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _interval(value: float, resampled: np.ndarray, count: int) -> Interval:
    """By a bootstrap over `count` samples."""
    if count < 2 or np.isnan(resampled).all():  # budgets that are all equal have no ranking
        return Interval(value=value, low=np.nan, high=np.nan)
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return Interval(value=value, low=float(low), high=float(high))
