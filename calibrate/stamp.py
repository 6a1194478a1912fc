"""Records in an older profile which model it was measured on: `python -m calibrate.stamp FILE --model NAME`.

Budgets stay as they are. So that it does not certify what it does not know, the first calibration sample is measured again,
and has to come out as the profile says.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from calibrate.identity import tokenizer_identity, weights_identity
from calibrate.measure import calibrate_ratios, recorded_aside
from calibrate.samples import calibration_samples
from models.registry import load_model
from tangram_jax.profile import BudgetProfile
from tangram_jax.scorers import get_scorer

TOLERANCE = 0.02  # of a share: another version of JAX may break a few ties otherwise


def stamped(profile: BudgetProfile, model: Any) -> BudgetProfile:
    """`profile` with what identifies `model`, a LoadedModel. Raises ValueError if it was not measured on this model."""
    found = profile.provenance
    needed = {"method", "method_options", "sample_tokens", "seed"} - found.keys()
    if profile.ratios is None or needed or "texts" in found:
        raise ValueError("only a profile from `python -m calibrate` over the shipped texts can be checked")
    if profile.budgets.shape != (len(model.config.full_layers), model.config.num_kv_heads):
        raise ValueError(f"{model.name} has other layers or heads than the profile")
    try:
        scorer = get_scorer(str(found["method"]), **found["method_options"])
        tokens, seed = int(found["sample_tokens"]), int(found["seed"])
        not_ranked = recorded_aside(found, scorer)
        if tokens <= sum(not_ranked.values()):
            raise ValueError(f"samples of {tokens} tokens")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the profile does not say how it was measured ({error}): calibrate again"
        ) from error
    (sample,) = calibration_samples(model.tokenizer, 1, tokens, seed)
    again = calibrate_ratios(
        model.params, model.config, jnp.asarray(sample.tokens), scorer, profile.retention, **not_ranked
    )
    off = float(np.abs(np.asarray(again) - profile.ratios[0]).max())
    if not off <= TOLERANCE:
        raise ValueError(
            f"{model.name} gives other shares than the profile says, by up to {off:.3f}: calibrate again"
        )
    identity = {
        "weights": weights_identity(model.params, model.config),
        "tokenizer": tokenizer_identity(model.tokenizer),
        "stamped": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return dataclasses.replace(profile, provenance={**found, **identity})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 where the profile is not of the model."""
    parser = argparse.ArgumentParser(prog="python -m calibrate.stamp", description=__doc__)
    parser.add_argument("profile", type=Path, metavar="FILE", help="profile to add to, in place")
    parser.add_argument("--model", required=True, help="as for `python -m calibrate`")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args(argv)
    try:
        profile = BudgetProfile.load(arguments.profile)
        new = stamped(profile, load_model(arguments.model, dtype=arguments.dtype))
        new.save(arguments.profile)
    except (ValueError, OSError) as error:
        print(f"calibrate.stamp: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.profile}; budgets are as before: {new.digest == profile.digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
