"""What a decode step can be compared with: the same with a part of the engine's way left out or replaced."""

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import jax

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
from pallas_kernels.layer_products import tuning as layer_tuning
from pallas_kernels.ragged_decode import plan as decode_plan
from tangram_jax import cuda_graphs

PRODUCTS = (layer_products, dense_products)  # kernels of products, but for those of a single one in FP8


@contextlib.contextmanager
def without(*kernels: ModuleType) -> Iterator[None]:
    """Nothing is traced with these of PRODUCTS; a model that was traced before needs another name for that."""
    with contextlib.ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(mock.patch.object(kernel, "tuning_for", return_value=None))
        yield


@contextlib.contextmanager
def patched(*patches: Any) -> Iterator[None]:
    """What is within calls of `mock.patch.object`, of which no kernel that was traced before knows, nor any after it."""
    jax.clear_caches()
    try:
        with contextlib.ExitStack() as stack:
            for target, name, value in patches:
                stack.enter_context(mock.patch.object(target, name, value))
            yield
    finally:
        jax.clear_caches()


def no_kernel(*_: Any, **__: Any) -> None:
    """Instead of what checks whether there is one."""
    raise NotImplementedError("left out, to compare")


def three_loads(*args: Any, **options: Any) -> layer_products.Tuning | None:
    """`layer_products.tuning_for`, with as many loads of weights under way for few tokens as for many."""
    tuning = layer_tuning.tuning_for(*args, **options)
    return tuning and replace(tuning, ahead=layer_products.Tuning.ahead)


WAYS: dict[str, tuple[Any, str]] = {  # to compare with, by the options' names
    "xla-products": (
        partial(without, *PRODUCTS),
        "with XLA's products alone, or those with FP8 weights each by itself",
    ),
    "apart": (
        partial(without, decode_layer),
        "with kernels of their own for a layer's attention and its products",
    ),
    "products-apart": (
        partial(without, layer_products),
        "with kernels of their own for each of a layer's products",
    ),
    "heads-apart": (
        partial(patched, (ragged_decode, "makes_heads", lambda *_, **__: False)),
        "with other kernels for heads, where attention makes them",
    ),
    "by-token": (
        partial(patched, (layer_kernel, "adds_by_tile", lambda *_: False)),
        "with one CTA for each token that adds up parts of a layer's products",
    ),
    "norms-apart": (
        partial(patched, (dense_products.Tuning, "leaves_squares", lambda *_: False)),
        "with residuals and norms as kernels of their own between products of some dozens of tokens",
    ),
    "wide-tokens": (
        partial(patched, (fp8_products, "LEAST_NARROW", 1 << 30)),
        "with tokens in bfloat16, where --fp8 dynamic has them in FP8",
    ),
    "dispatch-apart": (
        partial(patched, (expert_products, "check_dispatch", no_kernel)),
        "with XLA's kernels for choosing experts, sorting tokens by them and bringing the rows",
    ),
    "in-a-row": (
        partial(patched, (cuda_graphs, "SIDE_BY_SIDE", {})),
        "with all kernels one after another, those that do not depend on each other, too",
    ),
    "ordinary-loads": (
        partial(
            patched,
            (read_once, "EVICT_FIRST", read_once.EVICT_NORMAL),
            (device_ops, "forget", lambda _: None),
            (by_tile, "forget", lambda *_: None),
        ),
        "with loads that do not tell the L2 what is read once",
    ),
    "xla-plan": (
        partial(patched, (decode_plan, "_has_kernel", lambda _: False)),
        "with XLA's plan of a step",
    ),
    "last-idle": (
        partial(
            patched,
            (phases, "spread", lambda cta, working, _: (cta, cta < working)),
            (layer_products, "tuning_for", three_loads),
        ),
        "with three loads under way in a layer's products, and the last CTAs idle where there is work for fewer",
    ),
}


def on_any_gpu(tuning: dict[str, Any]) -> Any:
    """Within it a kernel with these records is taken on devices on which it was not measured, too."""

    def everywhere(of: Any) -> Any:
        return replace(of, **{each.name: ("",) for each in fields(of) if each.name.startswith("kinds")})

    return mock.patch.dict(tuning, {key: everywhere(of) for key, of in tuning.items()})
