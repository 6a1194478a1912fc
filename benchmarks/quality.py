"""What compression costs on a real model: NLL of held-out text, divergence from full KV, and a needle question.

  python -m benchmarks.quality                       the default model with its shipped profile
  python -m benchmarks.quality --needle-only         only the needle question
  python -m benchmarks.quality --bytes               full KV and per-head budgets in float32, and the same in bytes
  python -m benchmarks.quality --fp8                 the same with the model's weights in float32, and in FP8
  python -m benchmarks.quality --profile FILE --scorer NAME --samples 60 --chunk 256

Text: a context (1,536 tokens) is prefilled in chunks and compressed as it goes, as serving does it (where no head keeps
less than 128 entries; here it is 36, the plan's own least); then the next 256 tokens are scored under teacher forcing, in
one chunk that sees the compressed context. "uniform" gets the retention that the per-head layout really reaches, so both
hold the same number of entries. The divergence is that of the next-token distribution from full KV, KL(full || compressed),
in nats; it varies far less than the NLL.

Needle: a fact in held-out prose of 2,000 tokens, at several depths. "aware": the question is in the prompt that is
compressed; "agnostic": the text is compressed first, and the question comes as a further chunk. Greedy answer of 24
tokens, counted as right if it contains the gold answer.

All intervals are 95%: bootstrap over samples, Wilson's for shares of questions.
Nothing here is calibrated on: the texts are the held-out ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tangram_jax as tj
from benchmarks.needles import Needle, make_needles
from benchmarks.quality_setup import ANSWER_TOKENS, Setup
from calibrate import shipped_profile
from calibrate.run import versions
from calibrate.samples import TextSample, distinct, heldout_samples
from models.registry import DEFAULT_MODEL, LoadedModel, load_model
from models.tokenizer import Tokenizer
from serve.args import ServeConfig

RESAMPLES = 10_000
FP8 = {"weights": "fp8", "dynamic": "fp8-dynamic"}


@jax.jit
def _log_softmax(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits, axis=-1)


@jax.jit
def _nll_and_divergence(
    log_probs: jax.Array, full: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean NLL of `targets` i32[T] and mean KL(full || this), in nats a token."""
    nll = -jnp.take_along_axis(log_probs, targets[:, None], axis=1).mean()
    return nll, (jnp.exp(full) * (full - log_probs)).sum(axis=-1).mean()


def make_setups(
    model: LoadedModel,
    profile: tj.BudgetProfile,
    arguments: argparse.Namespace,
    in_fp8: LoadedModel | None = None,
) -> list[Setup]:
    """Full KV, then per-head budgets and uniform ones of the same size, for each asked form of the profile.

    Instead of uniform ones the same in bytes, or with the weights of the model `in_fp8`.
    """
    scorer = tj.get_scorer(arguments.scorer)
    longest = max(arguments.context + arguments.continuation, arguments.needle_tokens) + arguments.chunk
    shape = (profile.num_layers, profile.num_kv_heads)

    def setup(label: str, budgets: tj.BudgetProfile) -> Setup:
        plan = tj.CachePlan.build(
            budgets, arguments.heads_per_page, arguments.page_size, arguments.cluster,
            sliding=tj.SlidingLayers.of(model.config, ANSWER_TOKENS),
        )  # fmt: skip
        return Setup(label, plan, scorer, model.config, model.params, longest, arguments.chunk)

    def other(floats: Setup) -> Setup:
        changes: dict[str, Any] = {"label": f"{floats.label}, in bytes", "dtype": jnp.uint8}
        if in_fp8:
            changes = {"params": in_fp8.params, "config": in_fp8.config}
            changes["label"] = f"{floats.label}, FP8 ({arguments.fp8})"
        return replace(floats, against=floats, results={}, **changes)

    setups = [setup("full KV", tj.BudgetProfile.uniform(*shape, 1.0))]
    forms = {
        f"normalised to {profile.retention:g}": profile.normalized(),
        f"with margin (alpha {profile.alpha:g})": profile,
    }
    for name, form in list(forms.items())[: 1 + arguments.margin]:
        per_head = setup(f"per-head, {name}", form)
        if arguments.bytes or in_fp8:
            setups += [per_head]
            continue
        same = per_head.plan.entries(arguments.context) / (arguments.context * form.budgets.size)
        uniform = setup(f"uniform, {same:.3f}", tj.BudgetProfile.uniform(*shape, same))
        per_head.against = uniform
        setups += [uniform, per_head]
    if not (arguments.bytes or in_fp8):
        return setups
    return [form for x in setups for form in (x, other(x))]


def check(model: LoadedModel, profile: tj.BudgetProfile, arguments: argparse.Namespace) -> None:
    """Raises ValueError where the profile is of another model, or prompts would have more tokens than it has positions."""
    limit = model.config.max_positions
    shape = (len(model.config.full_layers), model.config.num_kv_heads)
    if profile.budgets.shape != shape:
        raise ValueError(
            f"the profile is for {profile.budgets.shape} (layers, KV heads), {model.name} has {shape}: give another"
        )
    if not arguments.needle_only and arguments.context + arguments.continuation > limit:
        raise ValueError(
            f"--context and --continuation must be at most {limit} together, the model's positions"
        )
    if arguments.needles and arguments.needle_tokens > limit - ANSWER_TOKENS:
        raise ValueError(
            f"--needle-tokens must be at most {limit - ANSWER_TOKENS}: with an answer these are the model's positions"
        )


def prompts(model: LoadedModel, arguments: argparse.Namespace) -> tuple[list[TextSample], list[Needle]]:
    """The samples and questions that are asked for. Raises ValueError where they cannot be made, before hours of work."""
    tokenizer, seed = model.tokenizer, arguments.seed
    length = arguments.context + arguments.continuation
    samples: list[TextSample] = []
    if not arguments.needle_only:
        samples = distinct(heldout_samples(tokenizer, arguments.samples, length, seed))
    try:
        return samples, make_needles(tokenizer, arguments.needles, arguments.needle_tokens, seed)
    except ValueError as error:
        raise ValueError(f"no needles: {error} (write --needles 0 to leave them out)") from error


def measure_text(samples: list[TextSample], setups: list[Setup], context_tokens: int) -> None:
    """Appends "nll", "kl" and "kind" of every sample to the setups' results. The first setup is the reference."""
    for sample in track(samples, "text", console=Console(stderr=True)):
        context, rest = np.split(sample.tokens, [context_tokens])
        reference = None
        for setup in setups:
            setup.start()
            first = setup.prefill(context)
            following = setup.continuation(rest)
            log_probs = _log_softmax(jnp.concatenate([first[None], following[:-1]]))
            reference = log_probs if reference is None else reference
            nll, divergence = _nll_and_divergence(log_probs, reference, rest)
            for key, value in (("nll", float(nll)), ("kl", float(divergence)), ("kind", sample.kind)):
                setup.results.setdefault(key, []).append(value)


def measure_needles(needles: list[Needle], setups: list[Setup], tokenizer: Tokenizer) -> None:
    """Appends whether each needle was found, under "aware" and "agnostic", to the setups' results."""
    for needle in track(needles, "needles", console=Console(stderr=True)):
        for setup in setups:
            for mode, parts in _prompts(needle).items():
                setup.start()
                for part in parts:
                    logits = setup.prefill(part)
                text = tokenizer.decode(setup.answer(logits))
                setup.results.setdefault(mode, []).append(needle.answer.lower() in text.lower())


def _prompts(needle: Needle) -> dict[str, list[np.ndarray]]:
    return {
        "aware": [np.concatenate([needle.context, needle.question])],
        "agnostic": [needle.context, needle.question],
    }


def interval(values: Any, seed: int = 0) -> tuple[float, float, float]:
    """Mean of `values` f[samples] and its 95% bootstrap interval over samples, NaN where one says nothing of it."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), np.nan, np.nan
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def _text(values: Any, digits: int = 4) -> str:
    value, low, high = interval(values)
    return f"{value:.{digits}f}" + ("" if np.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]")


def answered(values: Sequence[float]) -> str:
    """How many of some questions were answered, with Wilson's 95% interval of the share, which is sound at 0 and 1 too."""
    hits, count, z = sum(values), len(values), 1.959964
    middle = (hits + z * z / 2) / (count + z * z)
    half = z * np.sqrt(hits * (count - hits) / count + z * z / 4) / (count + z * z)
    return f"{hits:g} of {count} [{max(middle - half, 0.0):.2f}, {min(middle + half, 1.0):.2f}]"


def report(setups: list[Setup], arguments: argparse.Namespace, console: Console) -> None:
    """Tables of what was measured."""
    full = setups[0].results
    tokens = arguments.context
    if "nll" in full:
        count = len(full["nll"])
        table = Table(
            title=f"{count} held-out sample{'s' * (count > 1)}: {tokens} tokens compressed, "
            f"the next {arguments.continuation} scored"
        )
        for name in ("budgets", "entries", "bytes", "NLL", "NLL - full KV", "KL(full || this)"):
            table.add_column(name)
        for setup in setups:
            entries = setup.plan.entries(tokens) / (tokens * setup.plan.group_of.size)
            more = np.subtract(setup.results["nll"], full["nll"])
            row = (setup.results["nll"], more, setup.results["kl"])
            table.add_row(setup.label, f"{entries:.3f}", f"{setup.memory(tokens):.3f}", *map(_text, row))
        console.print(table)
        for setup in setups:
            for key in ("nll", "kl"):
                if setup.against is None:
                    continue
                less = np.subtract(setup.against.results[key], setup.results[key])
                wins = int((less > 0).sum())
                console.print(f"{key} of {setup.against.label} minus {setup.label}: {_text(less)}")
                console.print(f"    the latter better in {wins} of {count} samples")
    if "aware" in full:
        count = len(full["aware"])
        table = Table(title=f"{count} needle questions at {arguments.needle_tokens} tokens: share answered")
        for name in ("budgets", "question compressed too", "question after compression"):
            table.add_column(name)
        for setup in setups:
            table.add_row(setup.label, *(answered(setup.results[mode]) for mode in ("aware", "agnostic")))
        console.print(table)


def save(path: Path, setups: list[Setup], arguments: argparse.Namespace, profile: tj.BudgetProfile) -> None:
    """All numbers, sample by sample, with what they were measured with."""
    record = {
        "arguments": {key: str(value) for key, value in vars(arguments).items()},
        "profile": dict(profile.provenance),
        "versions": versions(),
        "setups": [
            {
                "label": setup.label,
                "entries": setup.plan.entries(arguments.context)
                / (arguments.context * setup.plan.group_of.size),
                "bytes": setup.memory(arguments.context),
                "scorer": setup.scorer.name,
                **{
                    k: [round(v, 6) if isinstance(v, float) else v for v in x]
                    for k, x in setup.results.items()
                },
            }
            for setup in setups
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--model", default=DEFAULT_MODEL)
    out.add_argument("--profile", type=Path, help="default: the profile shipped for the model")
    out.add_argument("--scorer", default=ServeConfig().scorer, help="what ranks entries, in all forms alike")
    out.add_argument(
        "--retention", type=float, help="normalise the profile to this retention instead of its own"
    )
    out.add_argument("--margin", action="store_true", help="also the budgets as calibrated, margin included")
    compared = out.add_mutually_exclusive_group()
    compared.add_argument(
        "--bytes", action="store_true", help="compare caches of bytes with those of float32"
    )
    compared.add_argument(
        "--fp8",
        nargs="?",
        const="weights",
        choices=FP8,
        help="compare the products' weights in FP8 with those of float32; dynamic: many tokens too",
    )
    out.add_argument("--samples", type=int, default=40)
    out.add_argument("--context", type=int, default=1536)
    out.add_argument("--continuation", type=int, default=256)
    out.add_argument("--chunk", type=int, default=512)
    out.add_argument("--needles", type=int, default=30)
    out.add_argument("--needle-tokens", type=int, default=2000)
    out.add_argument("--needle-only", action="store_true")
    out.add_argument("--heads-per-page", type=int, default=1)
    out.add_argument("--page-size", type=int, default=16)
    out.add_argument("--cluster", default="layer")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--out", type=Path, help="write every number as JSON")
    return out


def problems(arguments: argparse.Namespace) -> list[str]:
    """What is wrong with the options."""
    sizes = ("context", "continuation", "chunk", "needle_tokens")
    found = [f"--{name.replace('_', '-')} must be at least 1" for name in sizes if vars(arguments)[name] < 1]
    if arguments.samples < 1 and not arguments.needle_only:
        found.append("--samples must be at least 1 (--needle-only leaves them out)")
    if arguments.needles < arguments.needle_only:
        found.append(f"--needles must be at least {int(arguments.needle_only)}")
    if arguments.seed < 0:
        found.append("--seed must not be negative")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for what cannot be measured."""
    options = parser()
    arguments = options.parse_args(argv)
    if found := problems(arguments):
        options.error("; ".join(found))
    path = arguments.profile or shipped_profile(arguments.model)
    if path is None:
        print(f"no profile is shipped for {arguments.model}: give --profile FILE", file=sys.stderr)
        return 2
    try:
        profile = tj.BudgetProfile.load(path)
        if arguments.retention is not None:
            profile = replace(profile, retention=arguments.retention)
        model = load_model(arguments.model)
        check(model, profile, arguments)
        samples, needles = prompts(model, arguments)
    except (ValueError, OSError) as error:
        print(f"benchmarks.quality: {error}", file=sys.stderr)
        return 2
    in_fp8 = load_model(arguments.model, quantization=FP8[arguments.fp8]) if arguments.fp8 else None
    setups = make_setups(model, profile, arguments, in_fp8)
    if samples:
        measure_text(samples, setups, arguments.context)
        if arguments.out:  # a run that is cut short keeps the first part
            save(arguments.out, setups, arguments, profile)
    if needles:
        measure_needles(needles, setups, model.tokenizer)
        if arguments.out:
            save(arguments.out, setups, arguments, profile)
    report(setups, arguments, Console(width=150))
    return 0


if __name__ == "__main__":
    sys.exit(main())
