"""Telling models of one name apart, and stamping an older profile."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibrate import stamp
from calibrate.identity import compare_weights, tokenizer_identity, weights_identity
from calibrate.measure import calibrate_ratios
from calibrate.run import calibrate
from calibrate.samples import calibration_samples
from models.registry import LoadedModel, load_model
from models.testing import random_params, tiny_config, tiny_tokenizer
from models.weights import assemble_params
from tangram_jax.profile import BudgetProfile
from tangram_jax.scorers import get_scorer
from tests.models.checkpoints import golden_tensors
from tests.models.quantised_models import CASES, quantised

CONFIG = tiny_config(num_layers=2)
PARAMS = random_params(CONFIG, 0)


def changed(share, norms=0.0, dtype=jnp.float32):
    """PARAMS with noise of so much of each weight's deviation."""
    rng = np.random.default_rng(0)

    def noisy(path, x):
        part = norms if "norm" in jax.tree_util.keystr(path) else share
        noise = (
            rng.standard_normal(x.shape) * np.asarray(x).std() if x.ndim > 1 else rng.standard_normal(x.shape)
        )
        return jnp.asarray(np.asarray(x) + part * noise, dtype)

    return jax.tree_util.tree_map_with_path(noisy, PARAMS)


def rescaled(noise):
    """PARAMS with factors moved from the norms into the projections, as AWQ does before it rounds."""
    rng = np.random.default_rng(1)
    layers = []
    for layer in changed(noise)["layers"]:
        factors = np.exp(rng.normal(0, 0.7, CONFIG.hidden_size)).astype(np.float32)
        moved = {
            "attn_norm": layer["attn_norm"] / factors,
            "qkv": layer["qkv"] * factors[:, None, None, None],
        }
        layers.append({**layer, **moved})
    return {"layers": layers}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (PARAMS, "same"),
        (changed(0, dtype=jnp.bfloat16), "same"),
        (changed(0.004), "same"),  # 8 bits
        (changed(0.08), "quantised"),  # 4 bits
        (rescaled(0.08), "quantised"),
        (changed(0.01, norms=0.1), "tuned"),
        (changed(0.08, norms=0.1), "tuned"),
        (random_params(CONFIG, 1), "other"),
        (random_params(tiny_config(num_layers=3), 0), "other"),
    ],
    ids=["itself", "bfloat16", "8 bits", "4 bits", "AWQ", "tuned", "tuned more", "other seed", "other depth"],
)
def test_weights_are_told_apart_by_how_much_they_differ(params, expected):
    then = json.loads(json.dumps(weights_identity(PARAMS, CONFIG)))
    now = weights_identity(params, CONFIG.replace(num_layers=len(params["layers"])))
    assert np.asarray(now["keys"]).shape == (len(params["layers"]), 16)
    assert compare_weights(then, now)[0] == compare_weights(now, then)[0] == expected
    assert compare_weights({}, now)[0] == "other"


def test_profiles_from_before_products():
    then = weights_identity(PARAMS, CONFIG)
    del then["products"]
    for params, expected in (
        (changed(0.08), "quantised"),
        (changed(0.08, norms=0.1), "tuned"),
        (rescaled(0), "other"),
    ):
        assert compare_weights(then, weights_identity(params, CONFIG))[0] == expected


@pytest.mark.parametrize("case", ["fp8 in blocks", "int-quantized"])
def test_quantised_checkpoints_are_the_model_that_they_were(case, tmp_path):
    whole = assemble_params(*golden_tensors(CASES[case][0]), "float32", progress=False)
    model = load_model(quantised(tmp_path, *CASES[case])[0], progress=False)
    then, now = (weights_identity(params, model.config) for params in (whole, model.params))
    sameness, difference = compare_weights(then, now)
    assert sameness in ("same", "quantised") and 0.002 < difference < 0.05


def test_the_values_are_those_of_keys():
    """Queries and values may change: budgets depend on them too, but one kind of weight tells models apart."""
    layers = [layer | {"qkv": layer["qkv"].at[:, :, [0, 1, 3]].set(7)} for layer in PARAMS["layers"]]
    assert weights_identity({"layers": layers}, CONFIG) == weights_identity(PARAMS, CONFIG)


def test_tokenizers():
    ours = tokenizer_identity(tiny_tokenizer())
    assert ours == tokenizer_identity(tiny_tokenizer(chat_template="other")) and ours["vocab_size"] == 264
    shifted = SimpleNamespace(
        vocab_size=264, encode=lambda text, **_: [i + 1 for i in tiny_tokenizer().encode(text)]
    )
    assert tokenizer_identity(shifted) != ours


def test_an_older_profile_is_stamped_only_for_the_model_that_it_was_measured_on(
    tmp_path, monkeypatch, capsys
):
    model = LoadedModel(CONFIG, PARAMS, tiny_tokenizer(), "tiny")
    samples = calibration_samples(model.tokenizer, 2, 48, seed=3)
    made = calibrate(PARAMS, CONFIG, get_scorer("keydiff"), samples, retention=0.5, seed=3).profile
    # One run with the values by hand: what the profile says of the weights is what stamping adds.
    assert made.provenance["weights"] == weights_identity(PARAMS, CONFIG)
    old = dataclasses.replace(made, provenance={k: v for k, v in made.provenance.items() if k != "weights"})
    path = tmp_path / "old.npz"
    old.save(path)
    monkeypatch.setattr(stamp, "load_model", lambda name, **_: model)
    assert stamp.main([str(path), "--model", "tiny"]) == 0
    new = BudgetProfile.load(path)
    assert new.digest == old.digest and new.retention == old.retention
    assert new.provenance["weights"] == made.provenance["weights"]
    assert new.provenance["tokenizer"] == tokenizer_identity(model.tokenizer)
    model.params = random_params(CONFIG, 1)
    assert stamp.main([str(path), "--model", "tiny"]) == 2
    assert "gives other shares than the profile says" in capsys.readouterr().err
    assert BudgetProfile.load(path) == new
    for edit in ({"sample_tokens": 0}, {"seed": None}, {"method": 5}, {"method_options": None}):
        dataclasses.replace(old, provenance=old.provenance | edit).save(path)
        assert stamp.main([str(path), "--model", "tiny"]) == 2
        assert "does not say how it was measured" in capsys.readouterr().err
    BudgetProfile.uniform(2, 4, 0.5).save(path)
    assert stamp.main([str(path), "--model", "tiny"]) == 2
    assert "only a profile from `python -m calibrate`" in capsys.readouterr().err


def test_a_profile_with_sinks_and_a_window_of_its_own_is_stamped():
    model = LoadedModel(CONFIG, PARAMS, tiny_tokenizer(), "tiny")
    (sample,) = calibration_samples(model.tokenizer, 1, 48)
    ratios = calibrate_ratios(PARAMS, CONFIG, sample.tokens, get_scorer("keydiff"), 0.5, sinks=0, window=9)
    found = {
        "method": "keydiff",
        "method_options": {},
        "sample_tokens": 48,
        "seed": 0,
        "sinks": 0,
        "window": 9,
    }
    profile = BudgetProfile.from_ratios(ratios[None], 0.5, provenance=found)
    assert "weights" in stamp.stamped(profile, model).provenance
    for fault, part in (
        ({"window": None}, "other shares"),
        ({"sinks": 40}, "does not say how it was measured"),
    ):
        with pytest.raises(ValueError, match=part):
            stamp.stamped(dataclasses.replace(profile, provenance=found | fault), model)
