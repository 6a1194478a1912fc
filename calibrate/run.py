"""Calibration of one model: runs the samples, builds the profile, and checks it on held-out text."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calibrate.identity import weights_identity
from calibrate.measure import SINKS, aside, calibrate_ratios
from calibrate.samples import TextSample, distinct
from calibrate.stability import Stability, measure_stability
from models.config import ModelConfig
from models.rope import rope_record
from models.transformer import check_tokens
from tangram_jax.plan import CachePlan, Cluster
from tangram_jax.profile import BudgetProfile
from tangram_jax.scorers import Scorer


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A profile and what is known about it. `heldout` is f32[samples, L, K] like `profile.ratios`, or None."""

    profile: BudgetProfile
    heldout: np.ndarray | None
    stability: Stability


def calibrate(
    params: Any,
    config: ModelConfig,
    scorer: Scorer,
    samples: Sequence[TextSample],
    heldout: Sequence[TextSample] = (),
    *,
    retention: float,
    alpha: float = 2.0,
    seed: int = 0,
    on_sample: Callable[[], None] = lambda: None,
    recorded: Mapping[str, Any] | None = None,
) -> Calibration:
    """Budgets of every head from `samples`, checked on `heldout`; all samples must have the same number of tokens.

    A held-out sample that comes twice counts once, as intervals are over different ones. `on_sample` is called after every
    sample that is measured. `seed` is recorded, and fixes the split in halves. `recorded`: more for the provenance, what
    only the caller knows (e.g. `tokenizer_identity`, a digest of own texts).

    Raises ValueError on samples of several lengths or with tokens that the model does not know, FloatingPointError where the
    scores of a sample are not numbers.
    """
    heldout = distinct(heldout)
    lengths = {len(sample.tokens) for sample in (*samples, *heldout)}
    if not samples or len(lengths) != 1:
        raise ValueError(f"samples must all have one length, found {sorted(lengths) or 'no samples'}")
    for sample in (*samples, *heldout):
        check_tokens(config, sample.tokens)
    measure = jax.jit(partial(calibrate_ratios, config=config, scorer=scorer, retention=retention))

    def ratios(texts: Sequence[TextSample]) -> np.ndarray:
        out = []
        for number, text in enumerate(texts):
            out.append(np.asarray(measure(params, tokens=jnp.asarray(text.tokens))))
            if np.isnan(out[-1]).any():
                layer = config.full_layers[int(np.isnan(out[-1]).any(axis=1).argmax())]
                raise FloatingPointError(
                    f"layer {layer} gives scores that are not numbers for sample {number}: the weights are damaged, or "
                    "too large for their dtype"
                )
            on_sample()
        return np.stack(out)

    measured = ratios(samples)
    measured_heldout = ratios(heldout) if heldout else None
    bare = BudgetProfile.from_ratios(measured, retention, alpha)
    stability = measure_stability(bare, measured, measured_heldout, seed)
    provenance = {
        "model": config.name,
        "model_shape": {
            "layers": config.num_layers,
            "compressed_layers": list(config.full_layers),
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        },
        "rope": rope_record(config),
        "method": scorer.name,
        "method_options": dataclasses.asdict(scorer),  # type: ignore[call-overload]
        "dtype": str(params["embed"].dtype),
        "samples": len(samples),
        "sample_tokens": lengths.pop(),
        "sample_kinds": dict(sorted(Counter(sample.kind for sample in samples).items())),
        "heldout_samples": len(heldout),
        "seed": seed,
        "sinks": SINKS,
        "window": aside(scorer),
        "stability": dataclasses.asdict(stability),
        "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "weights": weights_identity(params, config),
        **(recorded or {}),
    }
    profile = BudgetProfile.from_ratios(measured, retention, alpha, provenance)
    return Calibration(profile, measured_heldout, stability)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("tangram-jax", "jax", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            found[package] = "unknown"
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reached:
    """Retention that one cache layout really reaches, as fractions of the full KV cache."""

    layout: str
    groups: int
    entries: float  # entries of real heads, after grouping
    memory: float  # bytes of the pages owned, empty columns and half-full pages included
    entries_normalized: float
    memory_normalized: float


def reached_retention(
    profile: BudgetProfile, tokens: int, *, heads_per_page: int = 4, page_size: int = 16
) -> list[Reached]:
    """What `profile` and its normalised form keep of `tokens` prompt tokens under each way of grouping heads."""

    def kept(profile: BudgetProfile, cluster: Cluster, width: int) -> tuple[CachePlan, float, float]:
        plan = CachePlan.build(profile, width, page_size, cluster, min_entries=0)  # the budgets alone
        full = profile.budgets.size * tokens
        return plan, plan.entries(tokens) / full, plan.pages(tokens) * width * page_size / full

    rows: list[Reached] = []
    layouts: list[tuple[Cluster, int]] = [("adjacent", 1)]
    layouts += [("adjacent", heads_per_page), ("layer", heads_per_page), ("model", heads_per_page)]
    for cluster, width in layouts:
        plan, entries, memory = kept(profile, cluster, width)
        _, entries_normalized, memory_normalized = kept(profile.normalized(), cluster, width)
        name = "ungrouped" if not rows else f"{cluster}, Hp {width}"
        rows.append(
            Reached(
                layout=name,
                groups=plan.num_groups,
                entries=entries,
                memory=memory,
                entries_normalized=entries_normalized,
                memory_normalized=memory_normalized,
            )
        )
    return rows
