"""Which heads share pages: groups of heads with alike budgets, and how many heads a group has."""

from typing import Literal

import numpy as np

from tangram_jax.profile import BudgetProfile

Cluster = Literal["layer", "model", "adjacent"]
CLUSTERS: tuple[Cluster, ...] = ("layer", "model", "adjacent")
MOST_TOGETHER = 4  # heads of a page: the paper found 4 to 8 best
WORTH_SHARING = 1.05  # times their budgets, that heads may hold for having fewer pages to count


def clusters(
    budgets: np.ndarray, scaled: np.ndarray, cluster: Cluster, heads_per_page: int
) -> tuple[np.ndarray, np.ndarray]:
    """Group and column int32[L, K] of each head; see `CachePlan.build`. Equal `budgets` f32[L, K] go by `scaled`."""
    group_of = np.empty(budgets.size, np.int32)
    column_of = np.empty(budgets.size, np.int32)
    next_group = 0
    for block in np.arange(budgets.size).reshape((1, -1) if cluster == "model" else budgets.shape):
        if cluster == "adjacent":
            order, skip = block, 0
        else:
            order = block[np.lexsort((scaled.reshape(-1)[block], budgets.reshape(-1)[block]))]
            skip = -len(block) % heads_per_page
        at = np.arange(len(block)) + skip
        group_of[order] = next_group + at // heads_per_page
        column_of[order] = at % heads_per_page
        next_group += -(-len(block) // heads_per_page)
    return group_of.reshape(budgets.shape), column_of.reshape(budgets.shape)


def largest(budgets: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """f32[M]: the largest budget in each group."""
    groups = np.zeros(group_of.max() + 1, np.float32)
    np.maximum.at(groups, group_of.reshape(-1), budgets.reshape(-1))
    return groups


def most_heads_per_page(num_kv_heads: int, devices: int = 1) -> int:
    """Heads that do not divide evenly would waste columns, and each of the devices has as many of them."""
    return next((h for h in (MOST_TOGETHER, 2, 1) if num_kv_heads % h == 0 and h % devices == 0), devices)


def heads_per_page_for(profile: BudgetProfile, cluster: Cluster = "layer", devices: int = 1) -> int:
    """As many heads in a page as cost little: each group holds as many entries as its largest budget asks for.

    The most of 4, 2 and 1, or a multiple of `devices`, with which groups hold at most a twentieth more than the budgets;
    the fewest, where all hold more.
    """
    budgets = np.asarray(profile.budgets, np.float32)
    most = most_heads_per_page(budgets.shape[1], devices)
    allowed = [
        count for count in sorted({most, 2, 1}, reverse=True) if count <= most and count % devices == 0
    ]
    for count in allowed:
        group_of, _ = clusters(budgets, budgets, cluster, count)
        if largest(budgets, group_of)[group_of].mean() <= WORTH_SHARING * budgets.mean():
            return count
    return allowed[-1]
