"""`python -m calibrate` from options to files, on the tiny model; and the profiles that are shipped."""

import dataclasses
import errno
import json
import os
import resource
import tempfile

import jax
import matplotlib.image
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import calibrate
from calibrate.__main__ import main, parser
from calibrate.plots import _title, write_pictures
from calibrate.run import calibrate as run_samples
from calibrate.run import reached_retention
from calibrate.samples import heldout_samples
from models import registry
from models.registry import DEFAULT_MODEL, LoadedModel
from models.testing import random_params, tiny_config, tiny_tokenizer
from tangram_jax.grouping import heads_per_page_for
from tangram_jax.profile import BudgetProfile
from tangram_jax.scorers import get_scorer


def assert_said(part: str, text: str) -> None:
    """Lines are broken at spaces, or within a long path."""
    assert "".join(part.split()) in "".join(text.split())


@pytest.fixture
def tiny_model(monkeypatch):
    config = tiny_config()
    model = LoadedModel(config, random_params(config, 0), tiny_tokenizer(), "tiny")
    monkeypatch.setattr(registry, "load_model", lambda name, **options: model)
    return model


def test_command_writes_profile_report_and_pictures(tiny_model, tmp_path, capsys):
    out, plots = tmp_path / "profile.npz", tmp_path / "plots"
    options = ["--samples", "4", "--heldout", "3", "--sample-tokens", "96", "--method", "expected-attention"]
    assert (
        main([*options, "--retention", "0.25", "--seed", "7", "--out", str(out), "--plots", str(plots)]) == 0
    )
    profile = BudgetProfile.load(out)
    assert profile.budgets.shape == (4, 4) and profile.ratios.shape == (4, 4, 4)
    assert (profile.retention, profile.alpha) == (0.25, 2.0)
    np.testing.assert_allclose(profile.ratios.mean(axis=2), 0.25, atol=0.01)
    found = profile.provenance
    assert (found["model"], found["method"], found["samples"], found["seed"]) == (
        "tiny",
        "expected_attention",
        4,
        7,
    )
    assert found["method_options"] == {"future": 512, "eps": 0.01, "skip": 4}
    assert found["model_shape"] == {
        "layers": 4, "compressed_layers": [0, 1, 2, 3], "heads": 8, "kv_heads": 4, "head_dim": 16,
    }  # fmt: skip
    assert {"jax", "numpy", "python", "tangram-jax"} <= found["versions"].keys()
    json.dumps(dict(found), allow_nan=False)
    for name in ("retention.png", "budgets.png", "groups.png"):
        height, width = matplotlib.image.imread(plots / name).shape[:2]
        assert width > 500 and height > 200
        assert (plots / name).stat().st_size < 200_000
    report = capsys.readouterr().out
    for part in ("Retention really reached", "adjacent", "model", "Spearman", "held-out needs within"):
        assert part in report


def test_reached_retention_by_hand():
    profile = BudgetProfile(budgets=np.array([[0.25, 1.0], [0.25, 0.5]]), retention=0.5)
    rows = {row.layout: row for row in reached_retention(profile, 64, heads_per_page=2, page_size=16)}
    assert rows["ungrouped"].entries == rows["ungrouped"].memory == 0.5
    assert rows["adjacent, Hp 2"].entries == 0.75
    assert rows["model, Hp 2"].entries == (0.25 + 1.0) / 2
    assert {name: row.groups for name, row in rows.items()} == {
        "ungrouped": 4,
        "adjacent, Hp 2": 2,
        "layer, Hp 2": 2,
        "model, Hp 2": 2,
    }


def test_bad_options_are_one_clear_error(tmp_path, capsys):
    assert main(["--retention", "0", "--samples", "0", "--out", str(tmp_path)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    for part in ("--retention is the kept fraction", "--samples must", "directory"):
        assert part in message
    for options, part in (
        (["--method", "snapkv", "--sample-tokens", "36"], "--sample-tokens must be at least 37 for SnapKV"),
        (["--sample-tokens", "260"], "--sample-tokens must be at least 261 for KVCompress(window=256"),
        (["--option", "window"], "--option must be NAME=NUMBER, found 'window'"),
        (["--option", "width=3"], "kv_compress does not know width"),
        (["--option", "window=2.5"], "window must be a whole number, found 2.5"),
        (["--option", "pool=99999999999"], "pool must be at most 1048576, found 1e+11"),
        (
            ["--method", "expected_attention", "--option", "eps=1e300"],
            "eps must be at most 3.4028234663852886e+38",
        ),
        (["--seed", "-1"], "--seed must not be negative"),
    ):
        assert main([*options, "--out", str(tmp_path / "x.npz")]) == 2
        assert part in " ".join(capsys.readouterr().err.split())
    assert main(["--method", "h2o", "--out", str(tmp_path / "x.npz")]) == 2
    assert "unknown scorer 'h2o'" in capsys.readouterr().err
    overrides = ["--hf-overrides", '{"rope_theta": 5}']
    assert main([*overrides, "--out", str(tmp_path / "x.npz")]) == 2
    assert "GGUF file, which has no config.json to override" in " ".join(capsys.readouterr().err.split())
    for model, part in (("no such model", "unknown model"), ("~no-such-user/x", "Write the path without ~")):
        assert main(["--model", model, "--out", str(tmp_path / "x.npz")]) == 2
        assert part in " ".join(capsys.readouterr().err.split())


def test_heads_per_page_by_default(tiny_model, tmp_path, capsys):
    """Groups of one head would say nothing of groups; the server takes these where budgets differ much."""
    text = " ".join(parser().format_help().split())
    assert "(default: 4, 2 or 1, the most that divides the model's KV heads;" in text
    assert "default: what `python -m serve`" not in text
    options = ["--samples", "2", "--heldout", "0", "--sample-tokens", "96", "--method", "snapkv"]
    assert main([*options, "--out", str(tmp_path / "x.npz")]) == 0
    assert "layer, Hp 4" in capsys.readouterr().out
    assert heads_per_page_for(BudgetProfile.load(tmp_path / "x.npz")) == 1


def test_shipped_texts_that_are_all_alike_are_told(tiny_model, tmp_path, capsys, monkeypatch):
    """Of code there are modules alone: samples as long as one begin at its start."""
    make = calibrate.__main__.calibration_samples
    same = make(tiny_model.tokenizer, 1, 96) * 3
    monkeypatch.setattr("calibrate.__main__.calibration_samples", lambda *_: same)
    options = ["--samples", "3", "--heldout", "0", "--sample-tokens", "96", "--method", "snapkv"]
    assert main([*options, "--out", str(tmp_path / "p.npz")]) == 0
    assert "only 1 of 3 samples are different" in " ".join(capsys.readouterr().err.split())


def test_heldout_samples_count_once(tiny_model):
    made = heldout_samples(tiny_model.tokenizer, 3, 96)
    scorer = get_scorer("snapkv")
    once, twice = (
        run_samples(tiny_model.params, tiny_model.config, scorer, made[:1], heldout, retention=0.5)
        for heldout in (made, [*made, *made[:2], made[0]])
    )
    assert len(twice.heldout) == 3 and twice.profile == once.profile


def test_samples_longer_than_the_model(tiny_model, tmp_path, capsys):
    assert main(["--sample-tokens", "5000", "--out", str(tmp_path / "x.npz")]) == 2
    assert "at most 4096" in " ".join(capsys.readouterr().err.split())


def test_more_heads_a_page_than_the_model_has(tiny_model, tmp_path, capsys):
    assert main(["--heads-per-page", "5", "--out", str(tmp_path / "x.npz")]) == 2
    assert "--heads-per-page must be at most 4" in " ".join(capsys.readouterr().err.split())


def test_places_that_cannot_be_written_are_named_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for flags in (
        ["--out", f"{tmp_path}/file/p.npz"],
        ["--out", f"{tmp_path}/p.npz", "--plots", f"{tmp_path}/file"],
    ):
        assert main(flags) == 2
        assert_said(f"{flags[-2]}: {tmp_path}/file cannot be made", capsys.readouterr().err)
    os.mkfifo(tmp_path / "pipe")
    assert main(["--out", f"{tmp_path}/pipe"]) == 2
    assert_said(
        f"--out must be a file, {tmp_path}/pipe is none and would be replaced", capsys.readouterr().err
    )


def test_places_that_are_no_file_are_told_before_the_work(tiny_model, tmp_path, capsys):
    """Each was found after the work, two with the profile lost."""
    (tmp_path / "loop.npz").symlink_to(tmp_path / "loop.npz")
    (tmp_path / "away.npz").symlink_to("/proc/nowhere/x.npz")
    for out, plots, part in (
        ("loop.npz", None, f"--out: {tmp_path}/loop.npz cannot be written to: {os.strerror(errno.ELOOP)}"),
        ("p.npz", "loop.npz", f"--plots: {tmp_path}/loop.npz cannot be written to"),
        ("away.npz", None, "--out: /proc/nowhere cannot be made"),
        ("same", "same", f"--plots: {tmp_path}/same is the file of --out or below it"),
        ("p.npz", "p.npz/plots", "plots is the file of --out or below it"),
        ("plots/groups.png", "plots", "would be replaced by the picture of that name"),
        ("x" * 256, None, os.strerror(errno.ENAMETOOLONG)),
        ("new/" + "x" * 256, None, os.strerror(errno.ENAMETOOLONG)),
    ):
        command = ["--out", f"{tmp_path}/{out}"] + (["--plots", f"{tmp_path}/{plots}"] if plots else [])
        assert main(command) == 2
        assert_said(part, capsys.readouterr().err)


def test_the_longest_name(tiny_model, tmp_path):
    """That of the file it is written to first was longer than a name may be."""
    out = tmp_path / ("é" * 125 + ".npz")
    options = ["--samples", "2", "--heldout", "0", "--sample-tokens", "96", "--method", "keydiff"]
    assert main([*options, "--out", str(out)]) == 0
    assert list(tmp_path.iterdir()) == [out] and BudgetProfile.load(out).num_layers == 4


def test_a_full_disk_is_told_before_the_work(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))
    try:
        assert main(["--out", f"{tmp_path}/p.npz"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = " ".join(capsys.readouterr().err.split())  # where it is broken depends on the length of the path
    assert f"--out: {tmp_path} cannot be written to: {os.strerror(errno.EFBIG)}" in said
    assert not list(tmp_path.iterdir())


def test_what_was_measured_is_kept_where_its_place_has_gone(tiny_model, tmp_path, capsys, monkeypatch):
    """Hours of work: the profile, and then the pictures, have nowhere to go."""
    spare, out, plots = tmp_path / "spare", tmp_path / "out" / "p.npz", tmp_path / "plots"
    spare.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    measured = []

    def then_gone(*arguments, **options):
        measured.append(run_samples(*arguments, **options))
        for folder in (out.parent, plots):
            folder.rmdir()
            folder.write_text("")
        return measured[0]

    monkeypatch.setattr("calibrate.__main__.calibrate", then_gone)
    options = ["--samples", "2", "--heldout", "0", "--sample-tokens", "96", "--method", "snapkv"]
    assert main([*options, "--out", str(out), "--plots", str(plots)]) == 1
    (kept,) = spare.glob("calibrate-*/profile.npz")
    assert BudgetProfile.load(kept) == measured[0].profile
    said = capsys.readouterr()
    for part in (
        f"{out} cannot be written: ",
        f"the profile is in {kept} instead",
        f"no more pictures: [Errno {errno.EEXIST}]",
    ):
        assert_said(part, said.err)
    assert "Spearman" in said.out and said.out.endswith(f"wrote {kept}\n")


def test_an_interrupted_run_leaves_an_earlier_profile(tiny_model, tmp_path, capsys, monkeypatch):
    out = tmp_path / "p.npz"
    BudgetProfile.uniform(4, 4, 0.25).save(out)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("calibrate.__main__.calibrate", interrupted)
    assert main(["--sample-tokens", "64", "--option", "window=1e1", "--out", str(out)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert BudgetProfile.load(out) == BudgetProfile.uniform(4, 4, 0.25)
    assert list(tmp_path.iterdir()) == [out]


def test_no_room_for_a_sample_is_told(tiny_model, tmp_path, capsys, monkeypatch):
    """It was JAX's traceback. What else goes wrong on a device still is one."""
    faults = ["RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.", "INTERNAL: lost"]

    def failing(*_, **__):
        raise JaxRuntimeError(faults.pop(0))

    monkeypatch.setattr("calibrate.__main__.calibrate", failing)
    command = ["--sample-tokens", "64", "--option", "window=10", "--out", str(tmp_path / "p.npz")]
    assert main(command) == 2
    assert_said(
        "Out of memory allocating 8 bytes. Write a smaller --sample-tokens, ", capsys.readouterr().err
    )
    with pytest.raises(JaxRuntimeError, match="lost"):
        main(command)
    assert not list(tmp_path.iterdir())


def test_texts_that_are_too_short_are_one_clear_error(tiny_model, tmp_path, capsys, monkeypatch):
    config = tiny_model.config.replace(max_positions=10**6)
    longer = LoadedModel(config, tiny_model.params, tiny_model.tokenizer, "tiny")
    monkeypatch.setattr(registry, "load_model", lambda name, **options: longer)
    assert main(["--sample-tokens", "900000", "--out", str(tmp_path / "p.npz")]) == 2
    assert "are too short for 900000 tokens" in capsys.readouterr().err.replace("\n", " ")


def test_weights_that_give_no_numbers_give_no_profile(tiny_model, tmp_path, capsys):
    tiny_model.params = jax.tree.map(lambda x: x * np.nan, tiny_model.params)
    options = ["--samples", "2", "--heldout", "0", "--sample-tokens", "96", "--method", "snapkv"]
    assert main([*options, "--out", str(tmp_path / "p.npz")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "layer 0 gives scores that are not numbers for sample 0" in said
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_model_is_told_before_the_work(tiny_model, tmp_path, capsys):
    """A token beyond the vocabulary was measured as the last one."""
    tiny_model.config = tiny_model.config.replace(vocab_size=100)
    options = ["--samples", "2", "--heldout", "0", "--sample-tokens", "96", "--method", "snapkv"]
    assert main([*options, "--out", str(tmp_path / "p.npz")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is none of model tiny, whose vocabulary has 100: expected ids from 0 to 99" in said
    assert not list(tmp_path.iterdir())


def test_pictures_go_where_a_string_says(tmp_path):
    paths = write_pictures(BudgetProfile.uniform(2, 4, 0.5), str(tmp_path / "plots"))
    assert [path.is_file() for path in paths] == [True] * 3


def test_pictures_of_a_model_with_dollars_in_its_name(tmp_path):
    profile = dataclasses.replace(BudgetProfile.uniform(2, 4, 0.5), provenance={"model": "a$b_{$c"})
    assert len(write_pictures(profile, tmp_path)) == 3
    assert _title(profile) == r"a\$b_{\$c, retention 0.5"


def test_shipped_profile_of_the_default_model():
    path = calibrate.shipped_profile(DEFAULT_MODEL)
    assert path is not None and path == calibrate.shipped_profile("HuggingFaceTB/SmolLM2-135M-Instruct")
    profile = BudgetProfile.load(path)
    assert profile.budgets.shape == (30, 3) and profile.retention == 0.5
    found = profile.provenance
    assert found["model"] == DEFAULT_MODEL and found["samples"] == 50
    expected = BudgetProfile.from_ratios(profile.ratios, 0.5, profile.alpha)
    np.testing.assert_array_equal(profile.budgets, expected.budgets)


def test_no_shipped_profile():
    assert calibrate.shipped_profile("meta-llama/Llama-3.1-8B") is None
    assert calibrate.shipped_profile("") is None
