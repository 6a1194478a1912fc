"""What `benchmarks.quality` cannot measure, which it says before it measures anything; its needles."""

import json

import numpy as np
import pytest

from benchmarks import quality
from benchmarks.needles import make_needles
from models.registry import LoadedModel
from models.testing import random_params, tiny_config, tiny_tokenizer
from tangram_jax.profile import BudgetProfile
from tests.serve.harmony_template import harmony_tokenizer
from tests.serve.thought_templates import thought_tokenizer

CONFIG = tiny_config(num_layers=1)
PARAMS = random_params(CONFIG, 0)


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs it on a tiny model with so many options; `command.tokenizer` is the model's."""
    BudgetProfile.uniform(1, 4, 0.5).save(tmp_path / "p.npz")
    small = ["--samples", "1", "--context", "60", "--continuation", "10", "--chunk", "32", "--needles", "1"]

    def run(*options):
        model = LoadedModel(CONFIG, PARAMS, run.tokenizer, "tiny")
        monkeypatch.setattr(quality, "load_model", lambda name, **_: model)
        profile = ["--profile", str(tmp_path / "p.npz"), "--out", str(tmp_path / "out.json")]
        return quality.main([*profile, *small, "--needle-tokens", "260", *options])

    run.tokenizer = tiny_tokenizer()
    return run


@pytest.fixture
def unmeasured(monkeypatch):
    """Nothing is measured."""
    monkeypatch.setattr(quality, "make_setups", None)


def test_one_sample_has_no_interval(command, tmp_path, capsys):
    assert command("--needles", "0", "--scorer", "keydiff") == 0
    said = capsys.readouterr().out
    assert "1 held-out sample: 60 tokens" in said and "[" not in said
    setups = json.loads((tmp_path / "out.json").read_text())["setups"]
    assert [len(setup["nll"]) for setup in setups] == [1, 1, 1]
    assert quality.interval([1.0, 3.0])[0] == 2.0 and not np.isnan(quality.interval([1.0, 3.0])).any()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--context", "4087"], "--context and --continuation must be at most 4096 together"),
        (["--needle-tokens", "4073"], "--needle-tokens must be at most 4072"),
        (["--needle-tokens", "100"], "no needles: the question with one word of text has"),
    ],
)
def test_sizes_that_cannot_be(command, unmeasured, capsys, options, part):
    assert command(*options) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--samples", "0"], "--samples must be at least 1 (--needle-only leaves them out)"),
        (["--needle-only", "--needles", "0"], "--needles must be at least 1"),
        (["--needles", "-1"], "--needles must be at least 0"),
        (["--chunk", "0"], "--chunk must be at least 1"),
    ],
)
def test_numbers_of_nothing(command, capsys, options, part):
    with pytest.raises(SystemExit, match="2"):
        command(*options)
    assert part in capsys.readouterr().err


def test_a_model_without_a_chat_template_has_no_needles(command, unmeasured, monkeypatch, capsys):
    """It was found after hours of measuring text, which were lost."""
    monkeypatch.setattr(type(command.tokenizer), "has_chat_template", False)
    assert command() == 2
    assert (
        "no needles: the model has no chat template to ask in (write --needles 0" in capsys.readouterr().err
    )


def test_a_profile_of_another_model(command, unmeasured, tmp_path, capsys):
    BudgetProfile.uniform(2, 4, 0.5).save(tmp_path / "other.npz")
    assert command("--profile", str(tmp_path / "other.npz")) == 2
    assert "the profile is for (2, 4) (layers, KV heads), tiny has (1, 4)" in capsys.readouterr().err


def test_needles_have_the_size_that_is_asked_for():
    tokenizer = tiny_tokenizer()
    for needle in make_needles(tokenizer, 3, 600):
        text = tokenizer.decode(needle.context.tolist())
        assert 580 < len(needle.context) + len(needle.question) <= 600
        assert f"office is {needle.answer}." in text
    with pytest.raises(ValueError, match=r"the book ends after \d+ tokens: ask for fewer than 500000"):
        make_needles(tokenizer, 4, 500_000)


@pytest.mark.parametrize(
    ("tokenizer", "ending"),
    [
        (thought_tokenizer("qwen"), "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (thought_tokenizer("r1 special"), "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (harmony_tokenizer(), "<|start|>assistant<|channel|>final<|message|>"),
        (tiny_tokenizer(), "<|im_start|>assistant\n"),
    ],
    ids=["qwen", "r1", "harmony", "none"],
)
def test_a_needle_is_answered_without_thoughts(tokenizer, ending):
    """Of 24 tokens thoughts left none, and every budget found nothing."""
    (needle,) = make_needles(tokenizer, 1, 600)
    text = tokenizer.decode(needle.question.tolist(), skip_special_tokens=False)
    assert text.split("number only.")[1].partition("assistant")[2] == ending.partition("assistant")[2]
    assert text.endswith(ending)
    assert len(needle.context) + len(needle.question) <= 600
