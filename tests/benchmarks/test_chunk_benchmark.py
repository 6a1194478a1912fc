"""The benchmark of chunk attention: its compositions are right, and every kind of row is traced for a GPU."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import chunk_compositions, chunk_prefill, chunk_rows
from benchmarks.chunk_rows import SETS, Row
from pallas_kernels import chunk_prefill as cp
from tangram_jax import gpu_attention
from tangram_jax.gpu_attention import MaskType
from tests.benchmarks.lowering import as_measured

HISTORY = Row("GPT-OSS-20B", 64, 200, 0.5, page=16)
PACKED = Row("GPT-OSS-20B", 32, 200, 0.5, page=16, requests=3)
WINDOW = Row("GPT-OSS-20B", 64, 0, window=48)
ALONE = Row("GPT-OSS-20B", 64, 0)


def test_what_is_claimed_is_among_the_rows():
    assert {row.chunk for row in SETS["main"]} == {512, 2048, 8192}
    for model in chunk_rows.MODELS:
        assert Row(model, 8192, 102400, 1.0) in SETS["main"]
        assert Row(model, 2048, 25600, 0.25) in SETS["more"]
        assert any(row.model == model and row.requests == 8 for row in SETS["requests"])
    assert {(row.model, row.window) for row in SETS["windows"]} == set(chunk_rows.WINDOWS.items())
    every = [row for rows in SETS.values() for row in rows]
    assert len(every) == len(set(every))
    assert set(every) <= set(chunk_rows.ALL_ROWS)
    assert {row.shape.head_dim for row in SETS["main"]} == {64, 128, 256}


@pytest.mark.parametrize(
    "row", [HISTORY, PACKED, WINDOW, ALONE], ids=["history", "packed", "window", "alone"]
)
def test_operations_are_those_of_visible_entries(row):
    position = np.arange(row.behind + row.chunk)
    sees = position[row.behind :, None] >= position
    if row.window:
        sees &= position[row.behind :, None] - position < row.window
    entries = row.lengths().sum() * row.chunk + sees.sum() * row.shape.num_kv_heads * row.requests
    assert row.flops() == 4 * row.shape.head_dim * row.shape.group * entries


def plain(
    q,
    k,
    v,
    *,
    scale,
    mask_type,
    q_seqlen=None,
    kv_seqlen=None,
    sliding_window_length=None,
    return_residual=False,
):
    """cuDNN's attention as it is called here: q [B, T, N, D] -> out, and lse f32[B, N, T]."""
    assert (mask_type == MaskType.PADDING) == (kv_seqlen is not None)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2).astype(jnp.float32) for x in (k, v))
    s = jnp.einsum("btnd,bsnd->bnts", q.astype(jnp.float32), k) * scale
    at, to = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    if mask_type == MaskType.CAUSAL:
        sees = (to <= at) & (at - to < (sliding_window_length or len(to)))
    else:
        sees = to < kv_seqlen[:, None, None, None]
    s = jnp.where(sees, s, -jnp.inf)
    out = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(s), v).astype(q.dtype)
    return (out, jax.nn.logsumexp(s, axis=-1)) if return_residual else out


@pytest.mark.parametrize("row", [PACKED, WINDOW, ALONE], ids=["packed", "window", "alone"])
def test_baselines_and_reference_agree(row, monkeypatch):
    for module in (gpu_attention, chunk_compositions):
        monkeypatch.setattr(module, "cudnn_attention", plain)
    # History comes in several parts, some of them of no entries.
    monkeypatch.setattr(gpu_attention, "PART", 32)
    case = chunk_prefill.make_case(row)
    names = case.baselines()
    assert ("cudnn" in names) == (row.context == 0 and not row.window)

    @jax.jit
    def run(*arrays):
        plan = case.plan(*arrays[4:]).layer(0)
        want = cp.chunk_prefill_reference(*arrays[:4], plan, scale=case.scale)
        return want, [getattr(case, name)(*arrays) for name in names]

    (want, want_lse), results = run(*case.arrays)
    for name, found in zip(names, results, strict=True):
        if name == "parts" and not row.window:
            found = [jnp.concatenate(x) for x in zip(*found, strict=True)]
        if name == "cudnn":
            found = found, want_lse
        np.testing.assert_allclose(np.asarray(found[0], np.float32), np.asarray(want, np.float32), atol=2e-2)
        np.testing.assert_allclose(found[1], want_lse, atol=2e-3)


def test_command_line(monkeypatch, tmp_path):
    monkeypatch.setitem(chunk_prefill.SETS, "main", [HISTORY, ALONE])
    monkeypatch.setitem(chunk_prefill.SETS, "requests", [PACKED])
    monkeypatch.setitem(chunk_prefill.SETS, "windows", [WINDOW])
    path = tmp_path / "rows.csv"
    with as_measured() as programs:
        chunk_prefill.main(["--sets", "main,requests,windows", "--csv", str(path)])
    assert programs.traced == (2 + 2) + (2 + 3) + (2 + 2) + (2 + 1)  # plan, ours, and what applies
    with path.open(newline="") as file:
        history, alone, packed, window = csv.DictReader(file)
    us = 75 / 32 + 75
    for line in (history, alone, packed, window):
        assert float(line["us"]) == pytest.approx(us, abs=1e-3)
        assert float(line["kernel"]) == 20
        assert (
            float(line["parts / ours"]) == float(line["fastest / ours"]) == pytest.approx(75 / us, abs=1e-3)
        )
    assert float(history["TFLOP/s"]) == pytest.approx(HISTORY.flops() / us / 1e6, abs=1e-3)
    assert [line["cudnn us"] for line in (history, alone, packed, window)] == ["", "75.0", "", ""]
    assert [line["gather us"] for line in (alone, window)] == ["75.0", ""]
    assert history["of it cudnn"] == "40.0"


def test_a_baseline_that_fails_leaves_the_others(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no such graph")

    monkeypatch.setattr(chunk_prefill.Case, "gather", broken)
    with as_measured():
        result = chunk_prefill.measure(WINDOW) | chunk_prefill.measure(ALONE)
    assert "gather: Row(model='GPT-OSS-20B'" in capsys.readouterr().out
    assert result["gather us"] is None
    assert result["cudnn us"] == result["parts us"] == 75


def test_kernel_and_cudnn_are_lowered_for_a_gpu():
    with as_measured(lower=True) as programs:
        case = chunk_prefill.make_case(PACKED)
        plan = jax.eval_shape(case.plan, *case.arrays[4:])
        chunk_prefill.busy_us(jax.jit(case.ours), (*case.arrays[:4], plan))
        chunk_prefill.busy_us(jax.jit(case.gather), case.arrays)
    assert programs.kernels == [1, 0]
    assert programs.cudnn == [0, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sets", "main,long"], "no set long: there are main, more, windows"),
        (["--chunk", "100"], "no rows with --chunk 100: there are 32, 128, 256, 512"),
    ],
    ids=["set", "chunk"],
)
def test_wrong_names(words, message):
    with pytest.raises(SystemExit, match=message):
        chunk_prefill.main(words)
