"""The benchmarks of decode attention from the command line to the CSV file, their programs traced for a GPU and not run."""

import csv

import pytest

from benchmarks import ragged_decode, ragged_decode_baselines, ragged_rows, torch_peers
from benchmarks.ragged_rows import Row
from tests.benchmarks.lowering import as_measured

SMALL = [
    Row("GPT-OSS-20B", 2, 2048, 0.25, "ragged"),
    Row("Qwen3-30B-A3B", 2, 2048, 1.0, "equal", page=16),
    Row("GPT-OSS-20B", 128, 131_072, 1.0, "equal"),
]


@pytest.fixture(autouse=True)
def no_roof(monkeypatch):
    for module in (ragged_decode, ragged_decode_baselines):
        monkeypatch.setattr(module, "read_roof", lambda: 4600.0)


def run(main, tmp_path, *words):
    path = tmp_path / "rows.csv"
    main([*words, "--csv", str(path)])
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows(monkeypatch, tmp_path):
    """Rows that differ in their lengths alone share one program."""
    monkeypatch.setattr(ragged_rows, "GRID_ROWS", SMALL)
    monkeypatch.setattr(ragged_decode, "GRID_ROWS", [*SMALL, Row("GPT-OSS-20B", 2, 512, 0.5, "ragged")])
    with as_measured() as programs:
        lines = run(ragged_decode.main, tmp_path, "--grid")
    assert programs.traced == 4
    assert [line["requests"] for line in lines] == ["2", "2", "128", "2"]
    megabytes = 128 * 131_072 * 8 * 2 * 64 * 2 / 1e6
    assert float(lines[2]["MB"]) == pytest.approx(megabytes)
    assert float(lines[2]["of roof"]) == pytest.approx(megabytes * 1e6 / 4600e3 / 10, rel=1e-4)
    assert {line["roof GB/s"] for line in lines} == {"4600.0"}


def test_kernels_are_lowered_for_a_gpu():
    row = Row("GPT-OSS-20B", 1, 2048, 0.25, "ragged", slots=3, new=True)
    with as_measured(lower=True) as programs:
        result = ragged_decode.measure(row, ragged_decode.Pools([row]), 4600.0)
    assert programs.kernels == [1]
    assert result["us"] == 10.0


def test_divisions(monkeypatch, tmp_path):
    monkeypatch.setattr(
        ragged_decode, "DIVISION_ROWS", [Row("Llama-3.1-8B", 4, 8192, 0.25, "ragged", mix="lognormal")]
    )
    names = ["equal shares", "uniform splits", "split map", "host plan"]  # `test_ragged_rows` makes them
    monkeypatch.setattr(ragged_decode.ragged_divisions, "plans", lambda x: {name: x.plan() for name in names})
    with as_measured() as programs:
        (line,) = run(ragged_decode.main, tmp_path, "--divisions")
    assert programs.traced == 5  # four ways, and the plan of a step
    times = {name: float(line[name]) for name in names}
    assert set(times.values()) == {10.0}
    host, device = float(line["planned on host"]), float(line["planned on device"])
    assert host > 0
    assert device == pytest.approx(75 / 32, abs=1e-4)
    assert line["best"] == "uniform splits"  # the first of two that plan nothing
    ratios = {name: float(line[f"{name} / best"]) for name in times}
    assert ratios["uniform splits"] == ratios["split map"] == 1.0
    assert ratios["equal shares"] == pytest.approx(1 + device / 10, abs=1e-3)
    assert ratios["host plan"] == pytest.approx(1 + host / 10, rel=1e-3)


def test_empty_slots_skew_and_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(
        ragged_decode, "EMPTY_ROWS", [Row("Llama-3.1-8B", 1, 2048, 0.25, "ragged", slots=4, new=True)]
    )
    monkeypatch.setattr(ragged_decode, "SKEW_ROWS", [Row("Llama-3.1-8B", 2, 2048, 0.25, "ragged")])
    monkeypatch.setattr(ragged_decode, "DEFAULT_ROWS", SMALL[:1])
    with as_measured():
        (line,) = run(ragged_decode.main, tmp_path, "--empty")
        assert line["times as long"] == line["without empty slots"][:1] + ".0" == "1.0"
        (tmp_path / "rows.csv").unlink()
        (line,) = run(ragged_decode.main, tmp_path, "--skew")
        assert line["skew"] == "ragged" and line["times equal"] == line["equal us"][:1] + ".0" == "1.0"
        (tmp_path / "rows.csv").unlink()
        (line,) = run(ragged_decode.main, tmp_path, "--bytes")
    assert float(line["MB"]) == pytest.approx(2 * 2048 * 8 * 0.25 * 2 * 65 / 1e6, rel=0.01)
    assert line["times as fast"] == "1.0"


def test_baselines(monkeypatch, tmp_path, capsys):
    def broken(x, equal):
        raise RuntimeError("no kernel for such heads")

    monkeypatch.setattr(ragged_decode_baselines, "ROWS", [*SMALL, Row("GPT-OSS-20B", 2, 512, 0.5, "ragged")])
    monkeypatch.setattr(torch_peers, "installed", lambda name: name == "flashinfer")
    monkeypatch.setitem(ragged_decode_baselines.PEERS, "FlashInfer", broken)
    monkeypatch.setitem(
        ragged_decode_baselines.PEERS, "Pallas-Triton", lambda x, equal: {"Pallas-Triton": 30.0}
    )
    monkeypatch.setattr(ragged_decode_baselines.ragged_peers, "flat", flat)
    monkeypatch.setattr(ragged_decode_baselines.ragged_peers, "_around_us", lambda q: 5.0)
    with as_measured():
        lines = run(ragged_decode_baselines.main, tmp_path)
    out = capsys.readouterr().out
    assert "against FlashInfer, Pallas-Triton, XLA gather" in out
    assert out.count("no kernel for such heads") == 2  # once for each head dimension
    assert "skipped: Row(model='GPT-OSS-20B', requests=128" in out
    assert [line["page"] for line in lines] == ["64", "16", "64"]
    assert {line["Pallas-Triton/ours"] for line in lines} == {"3.0"}
    assert {line["XLA gather"] for line in lines} == {str(75 / 8 - 5)}
    assert (
        {line["fastest/ours"] for line in lines} == {line["XLA gather/ours"] for line in lines} == {"0.4375"}
    )


def flat(x):
    """`ragged_peers.flat` of a pool that there is not."""
    import jax
    import jax.numpy as jnp

    batch, heads = x.lengths.shape
    pages = jax.ShapeDtypeStruct((x.num_pages, *x.pool.shape[3:]), jnp.bfloat16)
    table = jnp.zeros((batch * heads, -(-int(x.lengths.max()) // x.page_size)), jnp.int32)
    return x.q.reshape(batch * heads, *x.q.shape[2:]), pages, pages, table, jnp.asarray(x.lengths.reshape(-1))


def test_ratios():
    result = {
        "ours": 10.0,
        "our plan": 1.0,
        "FlashInfer": 12.0,
        "its plan": 60.0,
        "FlashInfer joint": 11.0,
        "SDPA": None,
    }
    assert ragged_decode_baselines.ratios(result) == {
        "FlashInfer/ours": 1.2,
        "FlashInfer joint/ours": 1.1,
        "fastest/ours": 1.1,
        "with plans": 72 / 11,
    }


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (ragged_decode.main, ["--model", "Llama"], "no rows of --model Llama: there are Llama-3.1-8B"),
        (ragged_decode_baselines.main, ["--peers", "FA4"], "no peer FA4: there are FlashInfer"),
    ],
    ids=["model", "peer"],
)
def test_wrong_names(main, words, message):
    with pytest.raises(SystemExit, match=message):
        main(words)


def test_bytes_do_not_go_with_divisions(capsys):
    with pytest.raises(SystemExit):
        ragged_decode.main(["--bytes", "--divisions"])
    assert "--bytes goes with the default rows" in capsys.readouterr().err
