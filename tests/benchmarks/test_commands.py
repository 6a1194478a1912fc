"""Benchmarks that README calls without arguments take none."""

import importlib
import json
import sys

import pytest

from benchmarks import (
    decode_step,
    greedy_match,
    keep,
    paper_figures,
    ragged_decode,
    torch_peers,
    weight_stream,
)


def test_greedy_match_compares_with_the_tokens_on_file():
    args = greedy_match.parse([])
    assert args.run is greedy_match.compare
    assert args == greedy_match.parse(["compare"])
    assert len(json.loads(args.golden.read_text())["cases"]) == len(greedy_match.LENGTHS)
    assert greedy_match.parse(["serve"]).golden == args.golden
    with pytest.raises(SystemExit):
        greedy_match.parse(["golden"])  # where to?


def test_paper_figures(monkeypatch, tmp_path):
    """Measured, written, drawn; then drawn again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_peers, "installed", lambda name: False)
    monkeypatch.setattr(paper_figures, "read_roof", lambda: 4600.0)
    monkeypatch.setattr(paper_figures, "kernel_us", lambda x, plan: (10.0 + x.lengths.std() * 1e-3, 10.0))
    monkeypatch.setattr(paper_figures, "make_inputs", lambda row: Inputs(row))
    monkeypatch.setattr(paper_figures, "figure_13", lambda model: measured_13(model))
    paper_figures.main([])
    data = json.loads((tmp_path / "figures.json").read_text())
    assert [row["requests"] for row in data["figure_4c"]] == list(paper_figures.REQUESTS)
    for row in data["figure_4c"]:
        for name, ratio in row["ragged / equal"].items():
            assert ratio == row["ragged"][name] / row["equal"][name] > 1
    pictures = sorted((tmp_path / "docs").iterdir())
    assert [path.name for path in pictures] == ["figure_13.png", "figure_4c.png"]
    paper_figures.main(["--plot-only", "figures.json", "--folder", "again"])
    assert len(list((tmp_path / "again").iterdir())) == 2


@pytest.mark.parametrize("module", [decode_step, keep, ragged_decode, weight_stream])
def test_measuring_kernels_needs_a_gpu(module, monkeypatch):
    """They computed for hours on a CPU, and ended without a time."""
    monkeypatch.setattr("sys.argv", [module.__name__])
    with pytest.raises(SystemExit, match="kernels of an NVIDIA GPU, and JAX finds only cpu"):
        module.main()


def test_help_of_the_peer_that_is_not_installed(monkeypatch, capsys):
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("sys.argv", ["cpu_speed_transformers", "--help"])
    monkeypatch.delitem(sys.modules, "benchmarks.cpu_speed_transformers", raising=False)
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module("benchmarks.cpu_speed_transformers").main()
    assert "--directory DIRECTORY --steps STEPS --threads THREADS" in " ".join(
        capsys.readouterr().out.split()
    )


class Inputs:
    kv_bytes = 10**6

    def __init__(self, row):
        self.lengths = row.lengths()

    def plan(self, splits):
        return splits


def measured_13(model):
    return {"model": model} | dict.fromkeys(
        ("uniform splits", "split map", "equal shares", "plan on device", "plan on host"), 1.0
    )
