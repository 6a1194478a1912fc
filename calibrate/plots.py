"""Pictures of a profile: kept share of every head with its spread, budgets as a heat map, layout of head groups."""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from tangram_jax.plan import CachePlan, Cluster
from tangram_jax.profile import BudgetProfile

PICTURES = ("retention.png", "budgets.png", "groups.png")
MARKERS = "osD^vP*X"
ORDER: tuple[Cluster, ...] = ("adjacent", "layer", "model")  # from the baseline to the tightest


def write_pictures(
    profile: BudgetProfile, directory: str | os.PathLike[str], *, heads_per_page: int = 4
) -> list[Path]:
    """Writes retention.png, budgets.png and groups.png (each under 200 kB or so) and returns their paths."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    figures = (retention_figure(profile), budgets_figure(profile), groups_figure(profile, heads_per_page))
    paths = []
    for name, figure in zip(PICTURES, figures, strict=True):
        paths.append(directory / name)
        # No creation time or version inside, so that equal profiles give equal files.
        figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
    return paths


def retention_figure(profile: BudgetProfile) -> Figure:
    """Kept share by layer and head: mean, standard deviation (thick) and range over samples (thin)."""
    layers, heads = profile.budgets.shape
    figure = Figure(figsize=(_width(layers * max(heads, 3)), 4.2), layout="constrained")
    axes = figure.subplots()
    colours = _colours(heads)
    x = np.arange(layers)
    low, high = (profile.mean, profile.mean)
    if profile.ratios is not None:
        low, high = profile.ratios.min(axis=0), profile.ratios.max(axis=0)
    for layer in range(0, layers, 2):  # bands tell the layers apart
        axes.axvspan(layer - 0.5, layer + 0.5, color="0.95", zorder=0)
    for head in range(heads):
        at = x + (head - (heads - 1) / 2) * 0.8 / heads
        colour = colours[head]
        axes.vlines(at, low[:, head], high[:, head], color=colour, lw=0.9, alpha=0.7)
        mean, std = profile.mean[:, head], profile.std[:, head]
        axes.vlines(at, mean - std, mean + std, color=colour, lw=2.6, alpha=0.55)
        marker = MARKERS[head % len(MARKERS)]
        axes.plot(at, mean, marker, color=colour, ms=4, label=f"KV head {head}")
    axes.axhline(profile.retention, color="0.3", lw=0.8, ls="--", label=f"retention {profile.retention:g}")
    axes.set(
        xlim=(-0.6, layers - 0.4), ylim=(0, 1), xlabel="layer", ylabel="kept share of the head's entries"
    )
    _layer_ticks(axes, profile)
    samples = profile.provenance.get("samples", "unknown number of")
    axes.set_title(f"{_title(profile)}: kept share, mean ± std and range over {samples} samples", fontsize=10)
    figure.legend(loc="outside lower center", ncols=min(heads + 1, 9), fontsize=8, frameon=False)
    return figure


def budgets_figure(profile: BudgetProfile) -> Figure:
    """Heat map of the budgets, heads by layers; with few heads the values are written in."""
    layers, heads = profile.budgets.shape
    figure = Figure(figsize=(_width(layers * 3), 1.4 + 0.42 * heads), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(profile.budgets.T, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    figure.colorbar(image, ax=axes, label="budget", pad=0.01, fraction=0.04)
    axes.set(xlabel="layer", ylabel="KV head", yticks=range(heads))
    _layer_ticks(axes, profile)
    if layers <= 40:
        for (layer, head), budget in np.ndenumerate(profile.budgets):
            text = "1" if budget >= 0.995 else f"{budget:.2f}"[1:]
            axes.text(
                layer, head, text, ha="center", va="center", fontsize=7, color="k" if budget > 0.6 else "w"
            )
    axes.set_title(f"{_title(profile)}: budgets, mean {profile.mean_budget:.3f}", fontsize=10)
    return figure


def groups_figure(profile: BudgetProfile, heads_per_page: int) -> Figure:
    """Head groups of the three ways of clustering: bars are budgets, outlines what the group keeps for all."""
    figure = Figure(figsize=(_width(profile.budgets.size), 7.2), layout="constrained")
    rows = figure.subplots(len(ORDER), 1, sharey=True)
    for axes, cluster in zip(rows, ORDER, strict=True):
        plan = CachePlan.build(profile, heads_per_page, cluster=cluster)
        _draw_groups(axes, plan, profile)
    rows[-1].set_xlabel("columns of the page groups, in group order (a gap is an empty column)")
    figure.suptitle(f"{_title(profile)}: head groups, {heads_per_page} heads a page", fontsize=10)
    return figure


def _draw_groups(axes: Axes, plan: CachePlan, profile: BudgetProfile) -> None:
    heads = plan.head_at  # [M, Hp]
    column = np.arange(heads.size).reshape(heads.shape)
    there = heads >= 0
    budgets = np.where(there, profile.budgets.reshape(-1)[np.maximum(heads, 0)], 0.0)
    extra = np.where(there, plan.group_budgets[:, None] - budgets, 0.0)
    shades = [to_rgba(c) for c in ("tab:blue", "tab:cyan")]
    colours = [
        shades[group % 2]
        for group, is_head in zip(column // heads.shape[1], there, strict=True)
        for group in group
    ]
    axes.bar(column.reshape(-1), budgets.reshape(-1), width=0.9, color=colours)
    axes.bar(
        column.reshape(-1),
        extra.reshape(-1),
        width=0.9,
        bottom=budgets.reshape(-1),
        color="tab:orange",
        alpha=0.45,
    )
    edges = np.append(column[:, 0], heads.size) - 0.5
    axes.stairs(plan.group_budgets, edges, color="k", lw=0.8, baseline=0)
    axes.set(xlim=(-0.8, heads.size - 0.2), ylim=(0, 1), ylabel="budget", xticks=[])
    asked, kept = profile.mean_budget, plan.retention()
    axes.set_title(
        f"cluster {plan.cluster!r}: {plan.num_groups} groups; heads ask for {asked:.3f} (blue), groups keep "
        f"{kept:.3f} (orange: extra entries of smaller heads)",
        fontsize=8.5,
        loc="left",
    )


def _title(profile: BudgetProfile) -> str:
    known = [str(profile.provenance[key]) for key in ("model", "method") if key in profile.provenance]
    # Two dollars would make a formula of what is between them.
    return ", ".join([*known, f"retention {profile.retention:g}"]).replace("$", r"\$")


def _width(items: int) -> float:
    return min(16.0, max(6.0, 1.5 + 0.11 * items))


def _layer_ticks(axes: Axes, profile: BudgetProfile) -> None:
    """The model's numbers of the layers: those with a sliding window have no budgets."""
    layers = profile.num_layers
    numbers = profile.provenance.get("model_shape", {}).get("compressed_layers", range(layers))
    shown = range(0, layers, 1 if layers <= 40 else 4)
    axes.set_xticks(shown, [str(numbers[i]) for i in shown])
    axes.tick_params(labelsize=8)


def _colours(count: int) -> list[tuple[float, float, float, float]]:
    if count <= 10:
        return [to_rgba(f"C{i}") for i in range(count)]
    return [tuple(c) for c in matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count))]
