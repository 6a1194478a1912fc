"""The benchmark of whole steps: what a step is compared with, from the command line to the rows; no step is run."""

import json
import sys

import jax
import pytest

from benchmarks import decode_step
from benchmarks.decode_ways import WAYS, on_any_gpu
from benchmarks.gpu_program import as_on_hopper
from models.routing import likeliest, router_logits
from models.testing import tiny_gpt_oss_config
from pallas_kernels import (
    decode_layer,
    dense_products,
    expert_products,
    fp8_products,
    layer_products,
    ragged_decode,
    read_once,
)
from pallas_kernels.layer_products import by_tile, device_ops, phases
from pallas_kernels.layer_products import mosaic_gpu as layer_kernel
from pallas_kernels.norms import rms_norm
from pallas_kernels.ragged_decode import plan as decode_plan
from tangram_jax import cuda_graphs

REPLACED = {
    "xla-products": [(layer_products, "tuning_for"), (dense_products, "tuning_for")],
    "apart": [(decode_layer, "tuning_for")],
    "products-apart": [(layer_products, "tuning_for")],
    "heads-apart": [(ragged_decode, "makes_heads")],
    "by-token": [(layer_kernel, "adds_by_tile")],
    "norms-apart": [(dense_products.Tuning, "leaves_squares")],
    "wide-tokens": [(fp8_products, "LEAST_NARROW")],
    "dispatch-apart": [(expert_products, "check_dispatch")],
    "in-a-row": [(cuda_graphs, "SIDE_BY_SIDE")],
    "ordinary-loads": [(read_once, "EVICT_FIRST"), (device_ops, "forget"), (by_tile, "forget")],
    "xla-plan": [(decode_plan, "_has_kernel")],
    "last-idle": [(phases, "spread"), (layer_products, "tuning_for")],
}


@pytest.mark.parametrize("name", WAYS)
def test_what_a_way_replaces_is_there_again_after_it(name):
    before = [getattr(*place) for place in REPLACED[name]]
    with WAYS[name][0]():
        assert all(getattr(*place) is not value for place, value in zip(REPLACED[name], before, strict=True))
    assert [getattr(*place) for place in REPLACED[name]] == before


def run(monkeypatch, tmp_path, *words):
    """The rows of a command whose steps take 2 ms in the engine's way, and 1 ms more for each part that is replaced."""

    def measure(params, config, batch, tokens, retention, *rest):
        replaced = sum(getattr(*place) is not value for place, value in ours.items())
        return {"batch": batch, "retention": retention, "ms": 2.0 + replaced}

    ours = {place: getattr(*place) for places in REPLACED.values() for place in places}
    monkeypatch.setattr(decode_step, "measure", measure)
    monkeypatch.setattr(decode_step, "read_roof", lambda: 3200.0)
    monkeypatch.setattr(decode_step, "random_weights", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["decode_step", *words, "--out", str(tmp_path / "rows.json")])
    decode_step.main()
    return json.loads((tmp_path / "rows.json").read_text())["rows"]


def test_rows_are_compared_with_the_engines_way(monkeypatch, tmp_path):
    rows = run(monkeypatch, tmp_path, "--cases", "3", "--last-idle", "--ordinary-loads")
    assert [row.get("way") for row in rows] == [None, "ordinary-loads", "last-idle"] * 2
    assert [row.get("times as long") for row in rows] == [None, 2.5, 2.0] * 2
    assert [row["retention"] for row in rows] == [1.0] * 3 + [0.25] * 3


def test_three_loads():
    columns = 4096, 4096, 14336, 6144
    with as_on_hopper(), on_any_gpu(layer_products.tuning.TUNING):
        assert [layer_products.tuning_for(tokens, *columns).ahead for tokens in (1, 32, 64)] == [4, 4, 3]
        with WAYS["last-idle"][0]():
            assert layer_products.tuning_for(32, *columns).ahead == 3


def test_one_comparison_at_a_time(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--xla-plan", "--bytes")
    assert (
        "--xla-plan is compared with nothing else: leave out --drafts and --bytes" in capsys.readouterr().err
    )


def test_there_are_tokens_in_fp8_to_compare_with(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--fp8", "--wide-tokens")
    assert "--wide-tokens: only --fp8 dynamic has tokens in FP8 to compare with" in capsys.readouterr().err


def test_tokens_of_random_weights_go_to_all_experts():
    """With random biases most would go to the same few, and less would be read than the floor counts."""
    config = tiny_gpt_oss_config(num_experts=32, experts_per_token=4, experts_mxfp4=True, expert_size=64)
    params = decode_step.random_weights(config)
    for path, leaf in jax.tree.leaves_with_path(params):
        assert bool((leaf == 0).all()) == path[-1].key.endswith("bias"), path
    layer = params["layers"][0]
    x = rms_norm(params["embed"][:32], layer["mlp_norm"], config.norm_eps, 0.0)
    chosen = likeliest(router_logits(x, layer["router"], layer["router_bias"]), 4)[1]
    assert len(set(chosen.ravel().tolist())) > 28
