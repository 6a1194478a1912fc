"""Which budgets a server takes, and whether they were measured on what it serves."""

import logging
import re
from pathlib import Path

from calibrate import DEFAULT_METHOD, shipped_profile
from calibrate.identity import compare_weights, tokenizer_identity, weights_identity
from models.config import ModelConfig
from models.registry import LoadedModel
from models.rope import same_rope
from serve.args import SCORERS, ConfigError, ServeConfig
from tangram_jax.profile import BudgetProfile

log = logging.getLogger("tangram.engine")

# What their makers append to names: -Q4_K_M, -FP8-dynamic, -GPTQ-Int4, -quantized.w4a16.
_QUANTISATION = re.compile(
    r"([-.](i?q\d\w*|b?f16|f32|fp8|dynamic|block|kv|awq|gptq|int\d|\dbit|quantized|w\da\d+))+$"
)


def choose_profile(config: ServeConfig, model: ModelConfig, name: str) -> BudgetProfile:
    """The profile that was asked for, else the shipped one, else uniform budgets.

    Raises ConfigError when the profile is for another model, ValueError for a file that is damaged or was edited.
    """
    shape = (len(model.full_layers), model.num_kv_heads)
    path = Path(config.profile) if config.profile else shipped_profile(name)
    profile = BudgetProfile.load(path) if path else None
    if profile is not None and profile.budgets.shape != shape:
        if config.profile:
            raise ConfigError(
                f"--profile {path} is for {profile.budgets.shape} (layers, KV heads), {name} has {shape}: "
                f"calibrate one with `python -m calibrate --model {name} --out FILE`"
            )
        log.warning(
            "The profile that is shipped for a model of the name of %s is left out: it is for %s (layers, KV heads), this "
            "one has %s",
            name,
            profile.budgets.shape,
            shape,
        )
        profile = None
    if profile is None:
        if config.retention is None:
            log.warning(
                "No profile for %s: keeping the full KV cache. Make one with `python -m calibrate --model %s "
                "--out profile.npz` and start with --profile profile.npz",
                name,
                name,
            )
        return BudgetProfile.uniform(*shape, config.retention or 1.0)
    made_for = str(profile.provenance.get("model", ""))
    if config.profile and made_for and _short(made_for) != _short(name):
        log.warning(
            "--profile %s was calibrated for %s, not for %s: budgets of another model cost quality",
            path,
            made_for,
            name,
        )
    made_under = profile.provenance.get("rope")  # older profiles do not say
    if made_under is not None and not same_rope(made_under, model):
        log.warning(
            "The profile %s was calibrated with other RoPE frequencies, or another window, than %s has now: calibrate "
            "with the same --hf-overrides as you serve",
            path,
            name,
        )
    return profile


def check_provenance(profile: BudgetProfile, model: LoadedModel, scorer: str) -> None:
    """Warn where `profile` was not measured on these weights, with this tokenizer, or for this scorer.

    Older profiles do not say, and are taken as they are.
    """
    found, name = profile.provenance, model.name
    again = f"calibrate one with `python -m calibrate --model {name} --out profile.npz`"
    if "weights" in found:
        sameness, difference = compare_weights(found["weights"], weights_identity(model.params, model.config))
        if sameness == "other":
            log.warning(
                "The profile was measured on another model than %s is now, whatever its name: budgets of another model cost "
                "quality, %s",
                name,
                again,
            )
        elif sameness == "tuned":
            log.warning(
                "The profile was measured before %s was tuned further, or on another version of it (weights differ by up to "
                "%.0f%%): its heads may need other budgets, %s",
                name,
                100 * difference,
                again,
            )
        elif sameness == "quantised":
            log.info(
                "The profile was measured on weights of another precision than those of %s, or tuned by an adapter (they "
                "differ by up to %.0f%%)",
                name,
                100 * difference,
            )
    if "tokenizer" in found and found["tokenizer"] != tokenizer_identity(model.tokenizer):
        log.warning(
            "The profile was measured with another tokenizer than %s has (its vocabulary, or how it cuts texts): %s",
            name,
            again,
        )
    method = found.get("method")
    if method in SCORERS and method not in (scorer, DEFAULT_METHOD):
        log.warning(
            "The profile was measured with the scorer %s, and --scorer is %s, which may want other budgets: write "
            "--scorer %s, or calibrate with --method %s, or with the default, which is meant for all",
            method,
            scorer,
            method,
            scorer,
        )


def _short(name: str) -> str:
    """Of a hub name, directory or GGUF file, without the quantisation, for comparison."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".gguf")
    return _QUANTISATION.sub("", last)
