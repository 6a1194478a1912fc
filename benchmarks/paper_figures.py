"""Figures 4c and 13 of the TANGRAM paper on this GPU, beside the paper's own figures.

  python -m benchmarks.paper_figures                   measure, write figures.json, draw docs/figure_4c.png and figure_13.png
  python -m benchmarks.paper_figures --plot-only FILE  draw what was measured before

4c, the straggler: time of decode attention when heads have skewed budgets, over its time when all heads have equal budgets
and the same total. Llama-3.1-8B's shape, 32K tokens a request, 25% kept; 1.0 is a division that skew costs nothing.

13, decode attention of one token in all layers: 4 requests of 100K tokens, 25% kept, four ways to divide one kernel's work:
* planned at run time: equal shares planned on the host for every layer and copied to the device before the layer runs;
* uniform splits: the same number of CTAs for every head, as many as fill the GPU once;
* ahead of time: the paper's split map (Algorithm 1), no planning;
* equal shares: planned on the device, once for all layers; the plan's own kernels are counted.
Sliding-window layers (Gemma-3, GPT-OSS) hold a window, whole. Host planning is added to the kernels' time: an engine that
planned a layer while the one before runs would hide part of it, at most the kernels' time.

Budgets are lognormal (sigma 0.8) around the retention, drawn anew for each layer. Kernel times are the profiler's.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tangram_jax as tj
from benchmarks.gpu_timing import read_roof, trace_kernels
from benchmarks.host_plan import host_plan
from benchmarks.ragged_divisions import host_plan_us, split_map, uniform_splits
from benchmarks.ragged_inputs import kernel_us, make_inputs, make_plan, pool_shape, random_pool
from benchmarks.ragged_rows import Row, capped
from pallas_kernels import ragged_decode as rd
from pallas_kernels.ragged_decode.plan import default_unit
from pallas_kernels.ragged_decode.shapes import SHAPES, Shape
from pallas_kernels.support import num_sms

REQUESTS = (1, 2, 4, 8, 16, 32)
RETENTION, SIGMA, PAGE = 0.25, 0.8, 64
BATCH, CONTEXT = 4, 102_400

# TANGRAM, Figures 4c and 13, on an A100-80GB.
PAPER_STRAGGLER = (1.4, 1.7)
PAPER_MS = {  # planned at run time, uniform splits, ahead of time
    "Llama-3.1-8B": (13.3, 9.1, 5.5),
    "Qwen3-4B": (11.5, 7.9, 5.7),
    "Gemma-3-12B": (22.0, 19.6, 18.5),
    "GPT-OSS-20B": (10.5, 8.6, 7.6),
}


@dataclasses.dataclass(frozen=True)
class Layers:
    """How many layers a model has; every `period`-th attends to everything, the others to a window."""

    count: int
    period: int = 1
    window: int = 0

    def is_full(self, layer: int) -> bool:
        return layer % self.period == self.period - 1


MODELS = {
    "Llama-3.1-8B": Layers(32),
    "Qwen3-4B": Layers(36),
    "Gemma-3-12B": Layers(48, period=6, window=1024),
    "GPT-OSS-20B": Layers(24, period=2, window=128),
    "Qwen3-30B-A3B": Layers(48),
}


# Figure 4c


def straggler(requests: int, with_flashinfer: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"requests": requests}
    for skew in ("ragged", "equal"):
        x = make_inputs(Row("Llama-3.1-8B", requests, 32_768, RETENTION, skew, PAGE))
        ways: dict[str, Any] = {
            "uniform splits": uniform_splits(x.lengths.size),
            "split map": split_map(x.lengths.mean(axis=0), requests),
            "equal shares": None,
        }
        times = {name: kernel_us(x, x.plan(splits=splits))[0] for name, splits in ways.items()}
        if with_flashinfer:
            from benchmarks.torch_peers import FlashInfer, torch_busy_us

            times["FlashInfer"] = torch_busy_us(FlashInfer.by_head(x))
        result |= {"MB": x.kv_bytes / 1e6, skew: times}
    over = {name: us / result["equal"][name] for name, us in result["ragged"].items()}
    return result | {"ragged / equal": over}


# Figure 13


@dataclasses.dataclass
class Step:
    """Decode attention of all layers: arguments of `plan_decode` and of the kernel."""

    shape: Shape
    layers: int
    budgets: np.ndarray  # f32[L, K]
    lengths: np.ndarray  # i32[B, L * K]
    first: np.ndarray  # i32[L * K]
    table: np.ndarray  # i32[B, R]
    pool: jax.Array
    q: jax.Array
    options: dict[str, Any]

    def plan(self, splits: int | tuple[int, ...] | None = None) -> rd.DecodePlan:
        return make_plan(
            self.lengths, self.table, self.first, np.zeros_like(self.first),
            page_size=PAGE, num_layers=self.layers, splits=splits,
        )  # fmt: skip

    def attend(self, q: jax.Array, pool: jax.Array, plan: rd.DecodePlan) -> jax.Array:
        return rd.ragged_decode(q, pool, plan, scale=self.shape.head_dim**-0.5, **self.options)[0]


def make_step(model: str) -> Step:
    """Random budgets, pages in random order, one head per page."""
    shape, layers = SHAPES[model], MODELS[model]
    heads = shape.num_kv_heads
    rng = np.random.default_rng(0)
    budgets = capped(rng.lognormal(0.0, SIGMA, size=(layers.count, heads)), RETENTION)
    for layer in range(layers.count):
        if not layers.is_full(layer):
            budgets[layer] = min(1.0, layers.window / CONTEXT)
    kept = np.ceil(budgets.reshape(-1) * CONTEXT - 1e-6).astype(np.int32)
    pages = -(-kept // PAGE)
    first = np.concatenate([[0], np.cumsum(pages)[:-1]]).astype(np.int32)
    num_pages = BATCH * int(pages.sum())
    table = rng.permutation(num_pages).astype(np.int32).reshape(BATCH, -1)
    pool = random_pool(pool_shape(num_pages, PAGE, shape.head_dim, False))
    q = jax.random.normal(jax.random.PRNGKey(1), (BATCH, heads, shape.group, shape.head_dim), jnp.bfloat16)
    options = {"sinks": jnp.ones((heads, shape.group))} if shape.sinks else {}
    return Step(shape, layers.count, budgets, np.tile(kept, (BATCH, 1)), first, table, pool, q, options)


def kernels_ms(run: Callable[[], Any], name: str = "", calls: int = 3) -> float:
    """Mean time of the kernels of a call whose names contain `name`."""
    jax.block_until_ready(run())
    kernels = trace_kernels(lambda: [run() for _ in range(calls)])
    return sum(sum(times) for key, times in kernels.items() if name in key) / calls / 1e3


def step_ms(x: Step, splits: int | tuple[int, ...] | None = None) -> float:
    """The attention kernels of all layers, one after the other."""

    @jax.jit
    def run(q: jax.Array, pool: jax.Array, plan: rd.DecodePlan) -> jax.Array:
        def layer(q: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return x.attend(q, pool, plan.layer(index)), None

        return lax.scan(layer, q, jnp.arange(x.layers))[0]

    plan = x.plan(splits)
    return kernels_ms(lambda: run(x.q, x.pool, plan), "ragged_decode")


def device_plan_ms(x: Step) -> float:
    make = jax.jit(
        lambda lengths, table: rd.plan_decode(
            lengths, table, x.first, np.zeros_like(x.first), page_size=PAGE, num_layers=x.layers
        )
    )
    lengths, table = jnp.asarray(x.lengths), jnp.asarray(x.table)
    return kernels_ms(lambda: make(lengths, table))


def host_plan_ms(x: Step) -> float:
    """Plans of all layers, each made on the host and sent to the device; the median of nine steps."""
    heads, batch = x.shape.num_kv_heads, len(x.lengths)
    rows = np.arange(batch, dtype=np.int32)[:, None] * x.table.shape[1]
    column = np.zeros(batch * heads, np.int32)
    unit, shares = default_unit(PAGE), num_sms()

    def make(layer: int) -> tuple[np.ndarray, np.ndarray]:
        of = slice(layer * heads, (layer + 1) * heads)
        length, offset = x.lengths[:, of].reshape(-1), (rows + x.first[of]).reshape(-1)
        return host_plan(length, offset, column, x.table, page_size=PAGE, unit=unit, num_shares=shares)

    want = x.plan()
    np.testing.assert_array_equal(make(1)[0], want.shares[1])
    np.testing.assert_array_equal(make(1)[1], want.items[1])
    return host_plan_us(make, x.layers) * x.layers / 1e3


def figure_13(model: str) -> dict[str, Any]:
    x = make_step(model)
    shares = step_ms(x)
    ctas = max(x.shape.num_kv_heads, num_sms() // BATCH)
    result: dict[str, Any] = {
        "model": model,
        "GB": int(x.lengths.sum()) * 4 * x.shape.head_dim / 1e9,
        "uniform splits": step_ms(x, splits=uniform_splits(BATCH * x.shape.num_kv_heads)),
        "split map": step_ms(x, splits=tuple(tj.split_map(x.budgets, ctas, 1).reshape(-1).tolist())),
        "equal shares": shares,
        "plan on device": device_plan_ms(x),
        "plan on host": host_plan_ms(x),
    }
    default = shares + result["plan on device"]
    run_time = (shares + result["plan on host"]) / default
    over = {name: result[name] / default for name in ("uniform splits", "split map")}
    return result | {"over equal shares": {"planned at run time": run_time} | over}


# Plots


def plot_4c(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    requests = [row["requests"] for row in rows]
    axes.axhspan(*PAPER_STRAGGLER, color="0.9", label="uniform splits in the paper (A100)")
    styles = {"uniform splits": "C3o-", "split map": "C1s-", "FlashInfer": "C4^--", "equal shares": "C0D-"}
    for name, style in styles.items():
        if name in rows[0]["ragged"]:
            ratios = [row["ragged"][name] / row["equal"][name] for row in rows]
            label = {"equal shares": "equal shares (default)"}.get(name, name)
            axes.plot(requests, ratios, style, label=label)
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(requests, [str(n) for n in requests])
    axes.set_xlabel("requests of 32K tokens, 25% of the KV cache kept")
    axes.set_ylabel("time with skewed budgets / with equal ones")
    axes.set_title(f"Decode attention, cost of skewed heads at equal KV ({device})", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def plot_13(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 4.2))
    at = np.arange(len(rows))
    bars = (
        ("planned at run time on the host", "equal shares", "plan on host", "C7"),
        ("uniform splits", "uniform splits", None, "C3"),
        ("split map, ahead of time", "split map", None, "C1"),
        ("equal shares, planned once on the device (default)", "equal shares", "plan on device", "C0"),
    )
    for place, (label, kernels, plan, color) in enumerate(bars):
        where = at + (place - 1.5) * 0.2
        height = np.array([row[kernels] for row in rows])
        axes.bar(where, height, 0.19, color=color, label=label)
        if plan is not None:
            extra = np.array([row[plan] for row in rows])
            axes.bar(
                where, extra, 0.19, bottom=height, color=color, alpha=0.45, hatch="///", edgecolor="white"
            )
        marks = [(w, PAPER_MS[row["model"]][place]) for w, row in zip(where, rows, strict=True)
                 if place < 3 and row["model"] in PAPER_MS]  # fmt: skip
        axes.plot(*zip(*marks, strict=True), "k_", markersize=9, label="_") if marks else None
    axes.plot([], [], "k_", markersize=9, label="the paper's, on an A100-80GB")
    axes.bar([0], [0], color="0.6", alpha=0.45, hatch="///", edgecolor="white", label="of it planning")
    axes.set_xticks(at, [row["model"] for row in rows])
    axes.set_ylabel("decode attention of a step, all layers (ms)")
    axes.set_title(f"{BATCH} requests of 100K tokens, 25% kept ({device})", fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--out",
        type=Path,
        default=Path("figures.json"),
        metavar="FILE",
        help="measure, and write the figures' numbers there (default figures.json)",
    )
    what.add_argument("--plot-only", type=Path, metavar="FILE", help="draw from such a file")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="of the pictures (default docs)")
    options = parser.parse_args(argv)
    if options.plot_only:
        data = json.loads(options.plot_only.read_text())
    else:
        from benchmarks.torch_peers import installed

        flashinfer = installed("torch") and installed("flashinfer")
        data = {"device": jax.devices()[0].device_kind, "roof_GBps": read_roof()}
        print(data, flush=True)
        figures: dict[str, list[Callable[[], dict[str, Any]]]] = {
            "figure_13": [partial(figure_13, model) for model in MODELS],
            "figure_4c": [partial(straggler, requests, flashinfer) for requests in REQUESTS],
        }
        for name, cases in figures.items():
            data[name] = []
            for measure in cases:
                data[name].append(measure())
                print(json.dumps(data[name][-1]), flush=True)
                options.out.write_text(json.dumps(data, indent=1))
    options.folder.mkdir(parents=True, exist_ok=True)
    if data.get("figure_4c"):
        plot_4c(data["figure_4c"], data["device"], options.folder / "figure_4c.png")
    if data.get("figure_13"):
        plot_13(data["figure_13"], data["device"], options.folder / "figure_13.png")


if __name__ == "__main__":
    main()
