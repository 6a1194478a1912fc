"""BudgetProfile: Eq. 5, normalisation, validation, files."""

import copy
import dataclasses
import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tangram_jax.profile import FORMAT_VERSION, BudgetProfile


def example_ratios(samples: int = 6, layers: int = 3, heads: int = 4) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.05, 0.95, (samples, layers, heads)).astype(np.float32)


def test_budgets_follow_equation_5_by_hand():
    ratios = np.array([[[0.2, 0.9]], [[0.4, 0.7]]])  # mean .3, .8; population std .1, .1
    profile = BudgetProfile.from_ratios(ratios, retention=0.5, alpha=2.0)
    np.testing.assert_allclose(profile.mean, [[0.3, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(profile.std, [[0.1, 0.1]], rtol=1e-6)  # ddof=1 would give .1414
    np.testing.assert_allclose(profile.budgets, [[0.5, 1.0]], rtol=1e-6)
    assert profile.budgets.dtype == np.float32
    assert (profile.retention, profile.alpha, profile.provenance["samples"]) == (0.5, 2.0, 2)


def test_the_number_of_samples_is_that_of_the_ratios():
    """Not that of a profile whose provenance is taken over."""
    other = BudgetProfile.from_ratios(example_ratios(), 0.5, provenance={"model": "tiny"})
    profile = BudgetProfile.from_ratios(example_ratios(2), 0.5, provenance=other.provenance)
    assert profile.provenance == {"model": "tiny", "samples": 2}


def test_alpha_zero_is_the_mean_and_one_sample_has_no_margin():
    ratios = example_ratios()
    np.testing.assert_allclose(
        BudgetProfile.from_ratios(ratios, 0.5, alpha=0).budgets, ratios.mean(0), rtol=1e-6
    )
    np.testing.assert_array_equal(BudgetProfile.from_ratios(ratios[:1], 0.5).budgets, ratios[0])


def test_uniform():
    profile = BudgetProfile.uniform(3, 2, 0.07)
    np.testing.assert_array_equal(profile.budgets, np.full((3, 2), 0.07, np.float32))
    assert (profile.num_layers, profile.num_kv_heads) == (3, 2)
    assert profile.mean_budget == pytest.approx(0.07)


def test_normalized_by_hand():
    profile = BudgetProfile(budgets=np.array([[0.8, 0.4, 0.4, 0.4], [1.0, 0.1, 0.1, 0.2]]), retention=0.4)
    expected = [
        [0.64, 0.32, 0.32, 0.32],
        [1.0, 0.15, 0.15, 0.3],  # 1.6 in all: the first stops at 1, the others share 0.6 as 1:1:2
    ]
    np.testing.assert_allclose(profile.normalized().budgets, expected, rtol=1e-6)
    assert profile.normalized().provenance["normalized"] is True


def test_normalized_with_zero_heads():
    profile = BudgetProfile(budgets=np.array([[0.0, 0.0], [1.0, 0.0]]), retention=0.75)
    np.testing.assert_allclose(profile.normalized().budgets, [[0.75, 0.75], [1.0, 0.5]], rtol=1e-6)


@given(
    hnp.arrays(
        np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.floats(0, 1, width=32)
    ),
    st.floats(0.01, 1.0),
)
def test_normalized_reaches_retention_and_keeps_the_ranking(budgets, retention):
    profile = BudgetProfile(budgets=budgets, retention=retention)
    scaled = profile.normalized().budgets
    np.testing.assert_allclose(scaled.mean(axis=1, dtype=np.float64), retention, rtol=1e-4, atol=1e-6)
    assert scaled.min() >= 0 and scaled.max() <= 1
    for before, after in zip(budgets, scaled, strict=True):
        assert (np.diff(after[np.argsort(before, kind="stable")]) >= -1e-6).all()


def test_save_and_load_give_the_same_profile(tmp_path):
    provenance = {"model": "tiny", "method": "snapkv", "versions": {"jax": "0"}}
    profile = BudgetProfile.from_ratios(example_ratios(), 0.25, alpha=1.5, provenance=provenance)
    path = tmp_path / "deep" / "profile"  # no suffix is added
    profile.save(path)
    loaded = BudgetProfile.load(path)
    assert loaded == profile and hash(loaded) == hash(profile)
    assert loaded.provenance == {**provenance, "samples": 6}
    np.testing.assert_array_equal(loaded.ratios, profile.ratios)
    assert BudgetProfile.uniform(2, 2, 0.5) != profile


def test_digest_tells_budgets_apart():
    one, other = BudgetProfile.uniform(4, 2, 0.5), BudgetProfile.uniform(2, 4, 0.5)
    assert one.digest != other.digest
    assert one.digest == dataclasses.replace(one, provenance={"note": "x"}).digest
    assert one != dataclasses.replace(one, alpha=1.0)  # the same plan by another margin


def test_a_save_goes_to_the_file_that_a_link_leads_to_and_replaces_nothing_else(tmp_path):
    profile, real, link, pipe = (
        BudgetProfile.uniform(1, 1, 0.5),
        *(tmp_path / n for n in ("real", "link", "pipe")),
    )
    real.write_bytes(b"")
    link.symlink_to(real)
    os.mkfifo(pipe)
    profile.save(link)
    assert link.is_symlink() and BudgetProfile.load(real) == profile
    with pytest.raises(OSError, match="is no file, and would be replaced"):
        profile.save(pipe)
    assert pipe.is_fifo() and {path.name for path in tmp_path.iterdir()} == {"real", "link", "pipe"}
    real.unlink()
    real.symlink_to(link)
    with pytest.raises(OSError, match="symbolic links"):  # not Python's RuntimeError
        profile.save(link)
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link", "pipe"}


def test_a_save_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "p.npz"
    profile = BudgetProfile.uniform(2, 2, 0.5)
    profile.save(path)

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="no space left"):
        BudgetProfile.uniform(2, 2, 0.7).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert BudgetProfile.load(path) == profile


def test_arrays_are_read_only():
    profile = BudgetProfile.from_ratios(np.full((2, 2, 2), 0.5), 0.5)
    for one in (profile, copy.deepcopy(profile), pickle.loads(pickle.dumps(profile))):
        assert one == profile and hash(one) == hash(profile)
        for array in (one.budgets, one.mean, one.std, one.ratios):
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 1.0


@pytest.mark.parametrize(
    ("ratios", "options", "message"),
    [
        (np.zeros((2, 3)), {}, r"\[samples, L, K\], found shape \(2, 3\)"),
        (np.zeros((0, 2, 3)), {}, "non-empty"),
        (np.full((2, 2, 2), 1.5), {}, r"\[0, 1\], found 1.5"),
        (np.full((2, 2, 2), -0.5), {}, r"\[0, 1\], found -0.5"),
        (np.full((2, 2, 2), np.nan), {}, "8 values that are not finite"),
        (np.full((2, 2, 2), "x"), {}, "must be numbers"),
        (np.zeros((2, 2, 2)), {"retention": 0.0}, r"retention is the kept fraction and must lie in \(0, 1\]"),
        (np.zeros((2, 2, 2)), {"retention": float("nan")}, "retention"),
        (np.zeros((2, 2, 2)), {"alpha": -1.0}, "alpha"),
        (np.zeros((2, 2, 2)), {"provenance": {"x": object()}}, "plain JSON"),
    ],
)
def test_bad_input_is_named(ratios, options, message):
    with pytest.raises(ValueError, match=message):
        BudgetProfile.from_ratios(ratios, **{"retention": 0.5, **options})


def test_shapes_must_fit_together():
    with pytest.raises(ValueError, match="std must have the shape of budgets"):
        BudgetProfile(budgets=np.ones((2, 2)), std=np.ones((2, 3)), retention=0.5)
    with pytest.raises(ValueError, match="ratios must be"):
        BudgetProfile(budgets=np.ones((2, 2)), ratios=np.ones((5, 2, 3)), retention=0.5)
    with pytest.raises(ValueError, match="at least one layer"):
        BudgetProfile.uniform(0, 2, 0.5)


def test_files_that_are_no_profiles(tmp_path):
    with pytest.raises(FileNotFoundError):
        BudgetProfile.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("not a zip")
    np.savez(tmp_path / "other.npz", budgets=np.ones((2, 2)))
    np.save(tmp_path / "array.npy", np.ones((2, 2)))
    (tmp_path / "empty.npz").write_bytes(b"")
    good = dict(mean=np.ones((2, 2)), std=np.ones((2, 2)), budgets=np.ones((2, 2)))
    np.savez(tmp_path / "header.npz", header=json.dumps({"format": FORMAT_VERSION}), **good)
    np.savez(tmp_path / "words.npz", header="words", **good)
    header = {"format": FORMAT_VERSION, "retention": None, "alpha": 1.0, "provenance": {}}
    np.savez(tmp_path / "none_given.npz", header=json.dumps(header), **good)
    np.savez(tmp_path / "huge.npz", header=json.dumps(header | {"retention": 10**400}), **good)
    BudgetProfile.uniform(2, 2, 0.5).save(tmp_path / "damaged.npz")
    damaged = bytearray((tmp_path / "damaged.npz").read_bytes())
    damaged[60:90] = bytes(30)
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=f"{path.name} is not a budget profile"):
            BudgetProfile.load(path)
    with pytest.raises(ValueError, match=r"\(it is no .npz archive\): make one with `python -m calibrate`"):
        BudgetProfile.load(tmp_path / "text.npz")
    np.savez(tmp_path / "list.npz", header="[1]", **good)
    with pytest.raises(ValueError, match="profile format None"):
        BudgetProfile.load(tmp_path / "list.npz")


def test_a_file_that_was_edited_is_refused_and_an_older_one_is_not(tmp_path):
    path = tmp_path / "p.npz"
    profile = BudgetProfile.from_ratios(
        example_ratios(), 0.25, provenance={"model": "tiny", "score": float("nan")}
    )

    def rewrite(change):
        profile.save(path)
        with np.load(path) as archive:
            data = dict(archive)
        header = json.loads(str(data["header"]))
        change(header, data)
        np.savez(path, **data | {"header": np.array(json.dumps(header))})
        return BudgetProfile.load(path)

    def older(header, data):
        del header["digest"]

    assert rewrite(lambda header, data: None).digest == rewrite(older).digest == profile.digest
    edits = {
        "budgets": lambda header, data: data["budgets"].__setitem__((0, 0), 0.5),
        "ratios": lambda header, data: data.pop("ratios"),
        "retention": lambda header, data: header.__setitem__("retention", 0.5),
        "model": lambda header, data: header["provenance"].__setitem__("model", "large"),
    }
    for name, edit in edits.items():
        with pytest.raises(ValueError, match="was damaged or edited after it was saved"):
            rewrite(edit)
            pytest.fail(name)
    changed = dataclasses.replace(profile, budgets=profile.budgets / 2)  # the way to change one
    changed.save(path)
    assert BudgetProfile.load(path).digest == changed.digest
