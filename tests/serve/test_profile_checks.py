"""Which profile a server takes, and what it says of one that was not measured on what it serves."""

import numpy as np
import pytest

from calibrate.identity import tokenizer_identity, weights_identity
from models.config import RopeScaling
from models.registry import LoadedModel
from models.rope import rope_record
from models.testing import random_params, tiny_config, tiny_tokenizer
from serve.args import SCORERS, ConfigError, ServeConfig
from serve.profiles import check_provenance, choose_profile
from tangram_jax.profile import BudgetProfile

CONFIG = tiny_config(num_layers=2)
PARAMS = random_params(CONFIG, 0)
MODEL = LoadedModel(CONFIG, PARAMS, tiny_tokenizer(), "tiny")
MEASURED = {
    "model": "tiny",
    "method": "kv_compress",
    "weights": weights_identity(PARAMS, CONFIG),
    "tokenizer": tokenizer_identity(MODEL.tokenizer),
}


def said(caplog, provenance, scorer="expected_attention"):
    """What the server logs of a profile with this provenance: [(level, message)]."""
    caplog.clear()
    caplog.set_level("INFO")
    profile = BudgetProfile(budgets=np.full((2, 4), 0.5), retention=0.5, provenance=provenance)
    check_provenance(profile, MODEL, scorer)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def noisy(key_noise, norm_noise):
    """What `MEASURED` would say of weights that differ from ours by so much."""
    rng, there = np.random.default_rng(0), weights_identity(PARAMS, CONFIG)
    return {
        name: (np.array(there[name]) * (1 + part * rng.standard_normal((2, 16)))).tolist()
        for name, part in (("keys", key_noise), ("norms", norm_noise))
    }


def test_nothing_is_said_of_the_right_profile_nor_of_one_that_says_nothing(caplog):
    for provenance in (MEASURED, {}, {"model": "tiny", "method": "kv_compress"}, {"method": "uniform"}):
        assert said(caplog, provenance) == []
    assert said(caplog, MEASURED | {"weights": noisy(0.003, 0.001)}) == []


@pytest.mark.parametrize(
    ("weights", "level", "part"),
    [
        (noisy(0.1, 0), "INFO", "another precision than those of tiny"),
        (noisy(0.05, 0.1), "WARNING", "before tiny was tuned further"),
        (weights_identity(random_params(CONFIG, 1), CONFIG), "WARNING", "on another model than tiny is now"),
        ({"keys": [[1.0]], "norms": "?"}, "WARNING", "on another model than tiny is now"),
        ({"keys": [[10**400]], "norms": []}, "WARNING", "on another model than tiny is now"),
    ],
    ids=["quantised", "tuned", "other", "garbage", "huge"],
)
def test_other_weights_under_the_same_name_are_named(caplog, weights, level, part):
    ((found, message),) = said(caplog, MEASURED | {"weights": weights})
    assert found == level and part in message
    assert level == "INFO" or "python -m calibrate --model tiny --out profile.npz" in message


def test_another_tokenizer_is_named(caplog):
    tokenizer = MEASURED["tokenizer"] | {"vocab_size": 5}
    ((level, message),) = said(caplog, MEASURED | {"tokenizer": tokenizer})
    assert level == "WARNING" and "another tokenizer than tiny" in message


def test_another_scorer_is_named_unless_the_profile_is_for_all(caplog):
    assert said(caplog, MEASURED | {"method": "snapkv"}, "snapkv") == []
    for scorer in SCORERS:
        assert said(caplog, MEASURED, scorer) == []
    ((level, message),) = said(caplog, MEASURED | {"method": "snapkv"}, "keydiff")
    assert level == "WARNING" and "--scorer is keydiff" in message and "write --scorer snapkv" in message


def test_a_profile_of_another_model_is_named(tmp_path, caplog):
    config = tiny_config(num_layers=2)
    shape = (config.num_layers, config.num_kv_heads)
    quantised = ("tiny-FP8", "tiny-FP8-dynamic", "hub/tiny-GPTQ-Int4", "tiny-AWQ", "tiny-quantized.w4a16")
    same = [(name, 0) for name in ("hub/Tiny", "/models/tiny-Q4_K_M.GGUF", *quantised)]
    for made_for, warnings in (("other/base", 1), *same):
        profile = BudgetProfile(budgets=np.full(shape, 0.5), retention=0.5, provenance={"model": made_for})
        profile.save(tmp_path / "p.npz")
        caplog.clear()
        choose_profile(ServeConfig(profile=str(tmp_path / "p.npz")), config, "tiny")
        assert len(caplog.records) == warnings, made_for
        assert all(
            "calibrated for other/base, not for tiny" in record.getMessage() for record in caplog.records
        )


def test_a_profile_measured_under_other_frequencies_is_named(tmp_path, caplog):
    config = tiny_config(num_layers=2)
    stretched = config.replace(rope_scaling=RopeScaling(kind="factors", factors=(1.0, 2.0) * 4))
    windowed = config.replace(sliding_window=9, sliding_layers=(0,), sliding_rope_theta=100.0)
    for made_under, served, warnings in (
        (config, config, 0), (stretched, stretched, 0), (config, stretched, 1), (stretched, config, 1),
        (config, config.replace(rope_theta=1e6), 1), (windowed, windowed, 0),
        (windowed, windowed.replace(sliding_rope_theta=7.0), 1), (windowed, windowed.replace(sliding_window=8), 1),
    ):  # fmt: skip
        profile = BudgetProfile(
            budgets=np.full((len(served.full_layers), 4), 0.5),
            retention=0.5,
            provenance={"rope": rope_record(made_under)},
        )
        profile.save(tmp_path / "p.npz")
        caplog.clear()
        choose_profile(ServeConfig(profile=str(tmp_path / "p.npz")), served, "tiny")
        assert len(caplog.records) == warnings
        assert all("other RoPE frequencies" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("frequencies", [{"a": 1}, ["a"], [[1.0], [2.0, 3.0]], [10**400], None, True])
def test_frequencies_that_are_no_numbers_are_others(frequencies, tmp_path, caplog):
    config = tiny_config(num_layers=2)
    record = rope_record(config) | {"frequencies": frequencies}
    profile = BudgetProfile(budgets=np.full((2, 4), 0.5), retention=0.5, provenance={"rope": record})
    profile.save(tmp_path / "p.npz")
    choose_profile(ServeConfig(profile=str(tmp_path / "p.npz")), config, "tiny")
    assert ["other RoPE frequencies" in record.getMessage() for record in caplog.records] == [True]


def test_a_shipped_profile_of_another_shape_is_left_out(tmp_path, caplog):
    """A pruned model in a directory named like the default one could not be served, whatever the options."""
    name = "/pruned/SmolLM2-135M-Instruct"
    assert choose_profile(ServeConfig(), CONFIG, name) == BudgetProfile.uniform(2, 4, 1.0)
    left_out, full = [record.getMessage() for record in caplog.records]
    assert "it is for (30, 3) (layers, KV heads), this one has (2, 4)" in left_out
    assert f"No profile for {name}: keeping the full KV cache" in full
    assert choose_profile(ServeConfig(retention=0.5), CONFIG, name) == BudgetProfile.uniform(2, 4, 0.5)
    BudgetProfile.uniform(30, 3, 0.5).save(tmp_path / "p.npz")
    with pytest.raises(ConfigError, match=r"is for \(30, 3\)"):
        choose_profile(ServeConfig(profile=str(tmp_path / "p.npz")), CONFIG, name)
