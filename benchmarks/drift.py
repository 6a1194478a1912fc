"""Does the alarm on drift (`python -m serve --drift-interval`) go off when it should, and only then?

  python -m benchmarks.drift                            the default model and its shipped profile, on a CPU
  python -m benchmarks.drift --heldout 40               sooner, with wider margins
  python -m benchmarks.drift --shares FILE              measured shares are kept in FILE (.npz), or taken from there

Held-out texts in calibration's mix must not raise it; of the other kinds (`benchmarks/drift_inputs.py`) the table says
whether they do, how much of a window they must be, and how much they overflow. Windows are drawn at random from the
samples, without putting any back, so windows of a kind share samples: shares of windows say less than their number suggests.

"distance" is another statistic, for comparison: the distance of the window's mean shares from the calibrated means, head by
head in standard deviations, root mean square, under the same permutation test.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.drift_inputs import inputs
from calibrate import shipped_profile
from calibrate.drift import (
    CHOICES,
    LEAST,
    LEVEL,
    WINDOW,
    calibrated_budgets,
    heldout_overflow,
    judge,
    overflow,
)
from calibrate.measure import calibrate_ratios, recorded_aside
from calibrate.run import versions
from calibrate.samples import MIX
from models.registry import DEFAULT_MODEL, load_model
from tangram_jax.plan import CachePlan
from tangram_jax.profile import BudgetProfile
from tangram_jax.scorers import get_scorer

HELDOUT = "held-out texts"
LEVELS = (0.01, 0.05, 0.2, 0.5)


def measure(model: Any, profile: BudgetProfile, heldout: int, others: int) -> dict[str, np.ndarray]:
    """f32[count, L, K] by kind of input, measured as `profile` was; "seconds" f64[] is the median of a sample."""
    found = profile.provenance
    scorer = get_scorer(found["method"], **found["method_options"])
    how: dict[str, Any] = {"scorer": scorer, "retention": profile.retention, **recorded_aside(found, scorer)}
    run = jax.jit(partial(calibrate_ratios, config=model.config, **how))
    out, seconds = {}, []
    for kind, tokens in inputs(model.tokenizer, found["sample_tokens"], heldout, others).items():
        shares = []
        for sample in track(tokens, kind, console=Console(stderr=True)):
            began = time.perf_counter()
            shares.append(np.asarray(run(model.params, tokens=sample)))
            seconds.append(time.perf_counter() - began)
        out[kind] = np.stack(shares)
    return out | {"seconds": np.asarray(np.median(seconds))}


def distance_alarm(calibration: np.ndarray, live: np.ndarray, rng: np.random.Generator) -> tuple[float, bool]:
    """The distance of means, and whether it is among the largest `LEVEL` of random choices of as many samples."""
    spread = calibration.std(axis=0) + 0.01
    pool = (np.concatenate([calibration, live]) / spread).reshape(len(calibration) + len(live), -1)

    def distances(chosen: np.ndarray) -> np.ndarray:  # bool[choices, samples]
        inside = chosen @ pool / chosen.sum(axis=1, keepdims=True)
        outside = ~chosen @ pool / (~chosen).sum(axis=1, keepdims=True)
        return np.sqrt(np.square(inside - outside).mean(axis=1))

    order = rng.random((CHOICES, len(pool))).argsort(axis=1)
    found = distances(np.arange(len(pool))[None] >= len(calibration))[0]
    return float(found), bool((1 + (distances(order < len(live)) >= found).sum()) / (CHOICES + 1) <= LEVEL)


def alarms(
    draw: Callable[[], np.ndarray], calibration: np.ndarray, windows: int, level: float = LEVEL
) -> float:
    """Of so many windows of overflows, the share that raises an alarm."""
    return float(np.mean([judge(calibration, draw(), level).alarm for _ in range(windows)]))


def figures(profile: BudgetProfile, shares: dict[str, np.ndarray], windows: int) -> dict[str, Any]:
    """All that the tables say, by kind of input; those of one kind of held-out text by themselves, too."""
    assert profile.ratios is not None
    rng = np.random.default_rng(0)
    plan = CachePlan.build(profile)
    budgets = calibrated_budgets(profile.ratios, profile.alpha, plan.group_of)
    calibration = heldout_overflow(profile.ratios, profile.alpha, plan.group_of)
    ordinary = overflow(shares[HELDOUT], budgets)
    mix = np.array([MIX[i % len(MIX)] for i in range(len(ordinary))])
    kinds = {kind: x for kind, x in shares.items() if kind != "seconds"}
    kinds |= {f"{HELDOUT}: {kind}": shares[HELDOUT][mix == kind] for kind in sorted(set(mix.tolist()))}

    def window(values: np.ndarray, count: int) -> np.ndarray:
        return rng.choice(values, count, replace=False)

    rows = {}
    for kind, x in kinds.items():
        values = overflow(x, budgets)
        if (size := min(WINDOW, len(values))) < LEAST:
            continue
        distance, far = distance_alarm(profile.ratios, x[:size], rng)
        rows[kind] = {
            "samples": len(values),
            "overflow": float(values.mean()),
            "overflow_low": float(values.min()),
            "overflow_high": float(values.max()),
            "heads": float((x > budgets + 1e-6).mean()),
            "alarms": alarms(partial(window, values, size), calibration, windows),
            "alarms_least": alarms(partial(window, values, LEAST), calibration, windows),
            "distance": distance,
            "distance_alarm": far,
        }
        if not kind.startswith(HELDOUT):
            for part in (4, 2):  # of a window, the rest held-out texts
                few = WINDOW // part

                def mixed(values: np.ndarray = values, few: int = few) -> np.ndarray:
                    return np.concatenate([window(values, few), window(ordinary, WINDOW - few)])

                rows[kind][f"alarms_1_in_{part}"] = alarms(mixed, calibration, windows)
    ways = [rng.permutation(ordinary) for _ in range(max(1, windows // len(ordinary)))]
    stream = np.concatenate(ways)
    sliding = [
        judge(calibration, stream[max(0, i - WINDOW) : i]).alarm for i in range(LEAST, len(stream) + 1)
    ]
    return {
        "calibration_overflow": {"mean": float(calibration.mean()), "high": float(calibration.max())},
        "kinds": rows,
        # More often than by LEVEL, so that so few samples can show whether the rate is kept.
        "heldout_by_level": {
            str(level): alarms(partial(window, ordinary, WINDOW), calibration, windows, level)
            for level in LEVELS
        },
        "sliding": {
            "prompts": len(stream),
            "alarms": int(sum(b and not a for a, b in zip([False, *sliding], sliding, strict=False))),
            "prompts_in_alarm": int(sum(sliding)),
        },
    }


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Alarms in windows of {WINDOW} (and of {LEAST}) prompts, level {LEVEL:g}")
    for name in ("input", "samples", "overflow, % (least to most)", "heads over, %", "alarms", f"of {LEAST}"):
        table.add_column(name, justify="left" if name == "input" else "right")
    for name in ("a quarter", "half", "distance", "its alarm"):
        table.add_column(name, justify="right")
    for kind, row in found["kinds"].items():
        low, mean, high = (100 * row[name] for name in ("overflow_low", "overflow", "overflow_high"))
        mixed = [f"{row[name]:.3f}" if name in row else "" for name in ("alarms_1_in_4", "alarms_1_in_2")]
        table.add_row(
            kind, str(row["samples"]), f"{mean:.2f} ({low:.2f} to {high:.2f})", f"{100 * row['heads']:.1f}",
            f"{row['alarms']:.3f}", f"{row['alarms_least']:.3f}", *mixed, f"{row['distance']:.2f}",
            "yes" if row["distance_alarm"] else "no",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"Calibration samples overflow budgets from the others by {100 * found['calibration_overflow']['mean']:.2f}% on "
        f"average, {100 * found['calibration_overflow']['high']:.2f}% at most. Held-out texts as a stream, in "
        f"{found['sliding']['prompts']} prompts: {found['sliding']['alarms']} alarms, in force for "
        f"{found['sliding']['prompts_in_alarm']} prompts. Alarms of held-out windows at other levels: "
        + ", ".join(f"{rate:.3f} at {level}" for level, rate in found["heldout_by_level"].items())
        + f". A measurement took {found['seconds']:.1f} s (median).",
        highlight=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drift", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--profile", type=Path, help="default: the one that is shipped for the model")
    parser.add_argument("--heldout", type=int, default=100, help="held-out texts (default 100)")
    parser.add_argument("--others", type=int, default=20, help="samples of each other kind (default 20)")
    parser.add_argument("--windows", type=int, default=1000, help="drawn of each kind (default 1000)")
    parser.add_argument(
        "--shares", type=Path, help="file of measured shares: read if it is there, else written"
    )
    parser.add_argument("--out", type=Path, help="write the figures here (.json)")
    arguments = parser.parse_args(argv)
    path = arguments.profile or shipped_profile(arguments.model)
    if path is None or min(arguments.heldout, arguments.others) < WINDOW:
        parser.error(f"give --profile FILE, and at least {WINDOW} samples of each kind")
    profile = BudgetProfile.load(path)
    if profile.ratios is None or "sample_tokens" not in profile.provenance:
        parser.error(f"{path} does not say how it was measured: calibrate again")
    if arguments.shares and arguments.shares.exists():
        with np.load(arguments.shares) as archive:
            shares = dict(archive)
    else:
        shares = measure(load_model(arguments.model), profile, arguments.heldout, arguments.others)
        if arguments.shares:
            np.savez_compressed(arguments.shares, **shares)  # type: ignore[arg-type]
    found = figures(profile, shares, arguments.windows) | {"seconds": float(shares["seconds"])}
    found |= {"model": arguments.model, "window": WINDOW, "level": LEVEL, "versions": versions()}
    _show(found, Console(width=150))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
