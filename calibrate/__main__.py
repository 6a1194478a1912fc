"""Command line: `python -m calibrate --model NAME_OR_PATH --out profile.npz`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.errors import JaxRuntimeError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from calibrate import DEFAULT_METHOD
from calibrate.identity import tokenizer_identity
from calibrate.measure import SINKS, aside
from calibrate.own_texts import OwnTexts
from calibrate.places import conflicts, save, unwritable
from calibrate.run import Calibration, calibrate, reached_retention
from calibrate.samples import TextSample, calibration_samples, distinct, heldout_samples
from models.overrides import parse_overrides
from tangram_jax.grouping import most_heads_per_page
from tangram_jax.scorers import SCORERS, Scorer, get_scorer

REPORT_TOKENS = 4096
OUT_OF_MEMORY = "Write a smaller --sample-tokens, --dtype bfloat16 or --quantization fp8"
# Offline a wide window of queries costs nothing, and it sees what more of the future will look at.
DEFAULT_OPTIONS: dict[str, dict[str, float]] = {DEFAULT_METHOD: {"window": 256}}


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    out = argparse.ArgumentParser(
        prog="python -m calibrate",
        description="Measure how much of its KV cache each attention head of a model needs; write a budget profile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    out.add_argument(
        "--model", default="smollm2-135m-instruct", help="short name, directory, GGUF file or hub name"
    )
    out.add_argument(
        "--hf-overrides",
        type=parse_overrides,
        metavar="JSON",
        help="fields that replace those of config.json",
    )
    out.add_argument(
        "--method",
        default=DEFAULT_METHOD,
        help=f"scorer that compares heads: {', '.join(SCORERS)}; serving may use another",
    )
    out.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the method, e.g. window=256 (the default for kv_compress); may be repeated",
    )
    out.add_argument("--retention", type=float, default=0.5, help="kept fraction to calibrate at, in (0, 1]")
    out.add_argument("--samples", type=int, default=50, help="calibration samples")
    out.add_argument(
        "--heldout", type=int, default=20, help="held-out samples for the stability check; 0: none"
    )
    out.add_argument("--sample-tokens", type=int, default=1536, help="tokens of every sample")
    out.add_argument("--alpha", type=float, default=2.0, help="margin in standard deviations (paper, Eq. 5)")
    out.add_argument(
        "--texts",
        type=Path,
        metavar="DIR",
        help="take samples from the .txt and .jsonl files in here instead of the shipped texts",
    )
    out.add_argument("--seed", type=int, default=0, help="which samples are drawn")
    out.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    out.add_argument(
        "--quantization", choices=("fp8",), help="of the weights, where they do not fit in memory otherwise"
    )
    out.add_argument(
        "--heads-per-page",
        type=int,
        default=argparse.SUPPRESS,
        help="for the report and pictures of head groups (default: 4, 2 or 1, the most that divides the model's KV heads; "
        "`python -m serve` takes fewer where groups of so many would hold much more than their heads' budgets)",
    )
    out.add_argument("--out", type=Path, required=True, metavar="FILE", help="profile to write (.npz)")
    out.add_argument("--plots", type=Path, metavar="DIR", help="write pictures here")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    2 for bad options, like argparse, and for want of memory; 1 where not all files are where they were asked for; 130 if
    interrupted.
    """
    arguments = parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        return _run(arguments, console)
    except KeyboardInterrupt:
        console.print("calibrate: interrupted; the profile is written after the last sample", style="red")
        return 130
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        console.print(f"calibrate: {error}\n{OUT_OF_MEMORY}", style="red", markup=False)
        return 2


def _run(arguments: argparse.Namespace, console: Console) -> int:
    try:
        _validate(arguments)
        scorer = _scorer(arguments.method, arguments.option)
        least = SINKS + aside(scorer) + 1
        if arguments.sample_tokens < least:
            raise ValueError(
                f"--sample-tokens must be at least {least} for {scorer} (sinks and window are aside)"
            )
        own = OwnTexts.read(arguments.texts) if arguments.texts else None
        from models.registry import load_model  # after the options are known to be good

        model = load_model(
            arguments.model,
            dtype=arguments.dtype,
            overrides=arguments.hf_overrides,
            keep_mxfp4=True,
            quantization=arguments.quantization,
        )
        limit = model.config.max_positions
        if arguments.sample_tokens > limit:
            raise ValueError(f"--sample-tokens must be at most {limit}, the model's positions")
        kv_heads = model.config.num_kv_heads
        heads_per_page = getattr(arguments, "heads_per_page", most_heads_per_page(kv_heads))
        if heads_per_page > kv_heads:
            raise ValueError(f"--heads-per-page must be at most {kv_heads}, the model's KV heads")
        size, seed = arguments.sample_tokens, arguments.seed
        recorded: dict[str, Any] = {"tokenizer": tokenizer_identity(model.tokenizer)}
        if arguments.quantization:
            recorded["quantization"] = arguments.quantization
        if own is not None:
            samples, heldout = own.samples(model.tokenizer, arguments.samples, arguments.heldout, size, seed)
            recorded["texts"] = own.provenance
        else:
            samples = calibration_samples(model.tokenizer, arguments.samples, size, seed)
            heldout = (
                heldout_samples(model.tokenizer, arguments.heldout, size, seed) if arguments.heldout else []
            )
        heldout = _told_apart(samples, heldout, console)
    except (ValueError, OSError) as error:
        console.print(f"calibrate: {error}", style="red", markup=False)
        return 2
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(
                f"Calibrating {model.name} ({scorer.name})", total=len(samples) + len(heldout)
            )
            result = calibrate(
                model.params,
                model.config,
                scorer,
                samples,
                heldout,
                retention=arguments.retention,
                alpha=arguments.alpha,
                seed=seed,
                on_sample=lambda: progress.advance(task),
                recorded=recorded,
            )
    except (ValueError, FloatingPointError) as error:
        console.print(f"calibrate: {error}", style="red", markup=False)
        return 2
    saved = save(result.profile, arguments.out, console)
    _report(result, Console(), heads_per_page)
    if saved is not None:
        print(f"wrote {saved}")
    if arguments.plots:
        from calibrate.plots import write_pictures

        try:
            for path in write_pictures(result.profile, arguments.plots, heads_per_page=heads_per_page):
                print(f"wrote {path}")
        except OSError as error:
            console.print(f"calibrate: no more pictures: {error}", style="red", markup=False)
            return 1
    return 0 if saved == arguments.out else 1


def _told_apart(samples: list[TextSample], heldout: list[TextSample], console: Console) -> list[TextSample]:
    """The held-out samples that are different; says so where some are not, or most of the others."""

    def warn(different: int, given: list[TextSample], kind: str, what: str) -> None:
        console.print(
            f"calibrate: only {different} of {len(given)} {kind} are different: with more text, or a smaller "
            f"--sample-tokens, {what} more",
            style="yellow",
            markup=False,
        )

    if 2 * (different := len(distinct(samples))) < len(samples):
        warn(different, samples, "samples", "the margin of the budgets says")
    if len(apart := distinct(heldout)) < len(heldout):
        warn(len(apart), heldout, "held-out samples", "their intervals say")
    return apart


def _scorer(method: str, options: Sequence[str]) -> Scorer:
    """The scorer with its calibration defaults and the given NAME=VALUE options."""
    values = dict(DEFAULT_OPTIONS.get(method.lower().replace("-", "_"), {}))
    for option in options:
        name, _, text = option.partition("=")
        try:
            value = float(text)
            values[name] = int(value) if value.is_integer() else value
        except ValueError:
            raise ValueError(f"--option must be NAME=NUMBER, found {option!r}") from None
    return get_scorer(method, **values)


def _validate(arguments: argparse.Namespace) -> None:
    """One error that names every bad option."""
    checks = (
        (0 < arguments.retention <= 1, "--retention is the kept fraction and must lie in (0, 1]"),
        (arguments.samples >= 1, "--samples must be at least 1"),
        (arguments.heldout >= 0, "--heldout must not be negative"),
        (arguments.seed >= 0, "--seed must not be negative"),
        (0 <= arguments.alpha < float("inf"), "--alpha must be a finite number >= 0"),
        (getattr(arguments, "heads_per_page", 1) >= 1, "--heads-per-page must be at least 1"),
    )
    problems = [message for good, message in checks if not good]
    problems += conflicts(arguments.out, arguments.plots)
    problems = problems or unwritable(arguments.out, arguments.plots)  # now, not after hours of work
    if problems:
        raise ValueError("; ".join(problems))


def _report(result: Calibration, console: Console, heads_per_page: int) -> None:
    profile, stability = result.profile, result.stability
    console.print(
        f"Retention asked for {profile.retention:g}; budgets after Eq. 5 (alpha {profile.alpha:g}) ask for "
        f"{profile.mean_budget:.3f}, normalised for {profile.normalized().mean_budget:.3f}.",
        highlight=False,
    )
    shape = profile.provenance["model_shape"]
    if aside := shape["layers"] - len(shape["compressed_layers"]):
        console.print(
            f"{aside} layers with a sliding window are not compressed and not counted.", highlight=False
        )
    table = Table(title=f"Retention really reached at {REPORT_TOKENS} tokens, of the full KV cache")
    table.add_column("layout")
    for name in ("groups", "entries", "bytes", "normalised", "bytes"):
        table.add_column(name, justify="right")
    for row in reached_retention(profile, REPORT_TOKENS, heads_per_page=heads_per_page):
        shares = (row.entries, row.memory, row.entries_normalized, row.memory_normalized)
        table.add_row(row.layout, str(row.groups), *(f"{share:.3f}" for share in shares))
    console.print(table)
    lines = [
        f"Spearman rank correlation of heads, one half of the samples against the other: {stability.halves:.3f}"
    ]
    if result.heldout is not None:
        count = len(result.heldout)
        lines += [
            f"against the mean of {count} held-out sample{'s' * (count > 1)}: {stability.heldout}",
            f"against single held-out samples, averaged: {stability.heldout_single}",
            f"held-out needs within the budget (sample, head): {stability.covered}",
            f"held-out entries beyond the budgets: {stability.overflow}",
        ]
        if count > 1:
            lines.append(
                "Brackets: 95% intervals over held-out samples (bootstrap; of the correlation of means by a jackknife)."
            )
    console.print("\n".join(lines), highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
