"""Calibration under `jax.jit`, without the command line and without the server.

Shares are measured for a batch of samples in one jitted call, and become a budget profile and a cache layout:

    python examples/calibrate_jit.py                               # a tiny random model, nothing is downloaded
    python examples/calibrate_jit.py --model smollm2-135m-instruct # real weights

Only `calibrate`, `models` and `tangram_jax` are needed; nothing is imported from `serve`.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from calibrate import calibrate_ratios
from calibrate.measure import SINKS, aside
from calibrate.samples import calibration_samples
from models.registry import LoadedModel, load_model
from models.testing import random_params, tiny_config, tiny_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Calibrate under jax.jit.")
    parser.add_argument("--model", help="a model name or path (default: a tiny random model)")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--retention", type=float, default=0.5)
    arguments = parser.parse_args()
    if arguments.samples < 1 or not 0 < arguments.retention <= 1:
        parser.error("--samples must be at least 1, and --retention above 0 and at most 1")
    scorer = tj.get_scorer("snapkv")
    least = SINKS + aside(scorer) + 1
    if arguments.tokens < least:
        parser.error(
            f"--tokens must be at least {least}: the first {SINKS} and last {least - SINKS - 1} are not ranked"
        )

    if arguments.model:
        model = load_model(arguments.model)
    else:
        config = tiny_config()
        model = LoadedModel(config, random_params(config, 0), tiny_tokenizer(), config.name)

    if arguments.tokens > (limit := model.config.max_positions):
        parser.error(f"--tokens must be at most {limit}, the model's positions")
    samples = calibration_samples(model.tokenizer, arguments.samples, arguments.tokens)
    tokens = jnp.asarray(np.stack([sample.tokens for sample in samples]))  # i32[samples, n]

    one = partial(calibrate_ratios, config=model.config, scorer=scorer, retention=arguments.retention)

    @jax.jit
    def ratios_of(params: dict, tokens: jax.Array) -> jax.Array:
        """Kept shares f32[samples, L, K]; `map` runs sample after sample, so memory does not grow with them."""
        return jax.lax.map(lambda row: one(params, tokens=row), tokens)

    ratios = ratios_of(model.params, tokens)
    provenance = {"model": model.name, "method": "snapkv", "sample_tokens": arguments.tokens}
    profile = tj.BudgetProfile.from_ratios(ratios, arguments.retention, provenance=provenance)
    plan = tj.CachePlan.build(profile.normalized(), heads_per_page=4, page_size=16, cluster="model")
    print(f"kept shares {ratios.shape}, mean {float(ratios.mean()):.3f}")
    print(f"budgets ask for {profile.mean_budget:.3f}, normalised for {profile.normalized().mean_budget:.3f}")
    print(f"{plan.num_groups} head groups keep {plan.retention():.3f} of the full cache")
    with np.printoptions(precision=2, suppress=True):
        print("budgets [L, K]:", profile.budgets, sep="\n")


if __name__ == "__main__":
    main()
