"""Products of tokens with the weights of a layer, which are floats or in FP8: the one place that decides what runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.params import Params
from models.shares import Share, over_devices
from pallas_kernels import all_reduce, dense_products, layer_products
from pallas_kernels import fp8_products as fp8
from pallas_kernels.dense_products import Scaled
from pallas_kernels.fp8_products import Fp8Tokens, Fp8Weights
from pallas_kernels.gates import Gate, opened
from pallas_kernels.layer_products import LayerWeights, MixtureWeights, Routing
from pallas_kernels.norms import rms_norm
from pallas_kernels.support import check_one_device

log = logging.getLogger("tangram")

MATRICES = ("qkv", "attn_out", "gate_up", "down")  # of a dense layer
MIXTURE_MATRICES = ("qkv", "attn_out", "router", "expert_gate_up", "expert_down")


def added_norm(
    x: Float[Array, "T depth"],
    added: Float[Array, "T depth"] | Share | Scaled | None,
    norm: Float[Array, " depth"],
    weights: Array | Fp8Weights | None,
    config: ModelConfig,
) -> tuple[Float[Array, "T depth"], Any]:
    """x + added, and its RMS norm for products with `weights`: as Fp8Tokens where they take these and a kernel makes them.

    added: None for nothing; a device's share is added up with the others'; with that of `added_product` x has all, and it is
    the norm. weights: None where not only such products read the norm.
    """
    if isinstance(added, Scaled):
        return x, added
    if isinstance(added, Share):
        if added.links is not None:
            how = {"eps": config.norm_eps, "offset": config.norm_offset}
            return all_reduce.added_norm(x, added.part, norm, added.links, **how)
        added = over_devices(added, config)
    narrow = isinstance(weights, Fp8Weights) and _narrow(x, config) and _has_kernel(x, weights)
    if narrow and x.shape[1] <= fp8.MOST_NORMED:
        return fp8.normed_tokens(x, norm, added=added, eps=config.norm_eps, offset=config.norm_offset)
    x = x if added is None else x + added
    return x, rms_norm(x, norm, config.norm_eps, config.norm_offset)


def added_product(
    tokens: Float[Array, "T depth"],
    weights: Array | Fp8Weights,
    x: Float[Array, "T E"],
    norm: Float[Array, " E"],
    following: Array | Fp8Weights | None,
    config: ModelConfig,
    *,
    gated: bool = False,
) -> tuple[Float[Array, "T E"], Scaled] | None:
    """x and a product of tokens, and its norm for `product` or, of `gated` weights, `gated_product` with `following`.

    None where a product by itself and `added_norm` are no slower, or there is no kernel for it.
    """
    if following is None or isinstance(weights, Fp8Weights) or isinstance(following, Fp8Weights):
        return None
    if not may_add(x, config):
        return None
    tuning = _dense_tuning(tokens, weights)
    if tuning is None or not tuning.leaves_squares(x.shape[1]):
        return None
    if _dense_tuning(x, following, gated=gated) is None:
        return None
    weights = weights.reshape(tokens.shape[1], -1)
    return dense_products.added_products(tokens, weights, x, norm, offset=config.norm_offset, tuning=tuning)


def may_add(x: Float[Array, "T E"], config: ModelConfig) -> bool:
    """Whether `added_product` may have a kernel for some weights."""
    apart = config.post_norms or config.attn_out_bias or config.tensor_axis is not None
    others = config.weights_fp8 or config.num_experts
    return not (apart or others) and x.dtype == jnp.bfloat16 and dense_products.takes(len(x))


def product(
    x: Float[Array, "T depth"] | Fp8Tokens | Scaled,
    weights: Array | Fp8Weights,
    columns: tuple[int, ...],
    config: ModelConfig,
) -> Float[Array, "T ..."]:
    """Tokens times a matrix: [T, *columns], in the dtype of x; of what `added_norm` gives in FP8, bfloat16.

    `weights`: floats, [..., *columns] of `depth` rows in any number of axes; or that matrix in FP8, which kernels
    multiply on a Hopper GPU, elsewhere XLA operations. `config` says whether many tokens become FP8 for that.
    Up to 128 tokens have a kernel for 16-bit floats, too, where it is faster.
    """
    if isinstance(weights, Fp8Weights):
        assert not isinstance(x, Scaled)
        return _times(x, weights, config).reshape(-1, *columns)
    assert not isinstance(x, Fp8Tokens)
    by_kernel = _by_kernel(x, weights, config)
    if by_kernel is None and not isinstance(x, Scaled):
        return _by_xla(x, weights, columns)
    assert by_kernel is not None  # `added_product` has seen to that
    return by_kernel.reshape(-1, *columns)


def gated_product(
    x: Float[Array, "T depth"] | Fp8Tokens | Scaled, weights: Array | Fp8Weights, config: ModelConfig
) -> Float[Array, "T columns"]:
    """Tokens times a matrix of [2, columns], gates first, and what these let through. See `product`."""
    gate: Gate = "gelu" if config.gelu else "silu"
    if isinstance(weights, Fp8Weights):
        assert not isinstance(x, Scaled)
        return _times(x, weights, config, gate)
    assert not isinstance(x, Fp8Tokens)
    by_kernel = _by_kernel(x, weights, config, gate)
    if by_kernel is not None:
        return by_kernel
    assert not isinstance(x, Scaled)  # as in `product`
    gate_up = _by_xla(x, weights, (2, config.intermediate_size))
    return opened(gate_up[:, 0], gate) * gate_up[:, 1]


def has_layer_kernel(
    layers: Sequence[Params], x: Float[Array, "T E"], config: ModelConfig, links: Array | None = None
) -> bool:
    """Whether `ended` is there for these layers, and no slower than their products by themselves."""
    if layer_tuning(len(x), config, links) is None:
        return False
    matrices = MIXTURE_MATRICES if config.num_experts else MATRICES
    names = ["attn_norm", "mlp_norm", *matrices]
    names += ["attn_post_norm", "mlp_post_norm"] if config.post_norms else []
    weights = [layer[name] for layer in layers for name in names]
    if any(
        isinstance(layer[name], Fp8Weights) != config.weights_fp8 for layer in layers for name in matrices
    ):
        return False
    try:
        for array in jax.tree.leaves((x, weights)):
            check_one_device(array)
        layer_products.check_supported(x, *weights)
    except NotImplementedError:
        return False
    return True


def wanted_multiple(tokens: int, config: ModelConfig, links: Array | None = None) -> int:
    """Of how many tokens a multiple should be where there are about so many, for the sake of kernels for few."""
    multiple = layer_products.MULTIPLE
    most = -(-tokens // multiple) * multiple
    if tokens > multiple and layer_tuning(most, config, links) is not None:
        return multiple
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    taken = tokens > multiple and dense_products.takes(tokens, config.hidden_size * heads)
    return dense_products.MULTIPLE if taken else 1


def layer_tuning(
    tokens: int, config: ModelConfig, links: Array | None = None
) -> layer_products.Tuning | None:
    """Of the kernel of a layer's products, None where there is none for so many tokens; see `has_layer_kernel`.

    Of a device's share there is one if it has `links` to the others, see `all_reduce.links_of`.
    """
    shared = config.tensor_axis is not None
    if config.attn_out_bias or (shared and not _reached(tokens, config, links)):
        return None
    heads, kv_heads = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    inner = config.expert_size if config.num_experts else config.intermediate_size
    columns = heads, config.hidden_size, inner, heads + 2 * kv_heads
    if not config.num_experts:
        return layer_products.tuning_for(tokens, *columns, fp8=config.weights_fp8, linked=shared)
    other = config.experts_mxfp4 or config.weights_fp8 or config.expert_bias or config.swiglu_limit
    if other or config.dense_layers or config.post_norms:
        return None
    mixture = config.num_experts, config.experts_per_token
    return layer_products.tuning_for(tokens, *columns, mixture=mixture)


def _reached(tokens: int, config: ModelConfig, links: Array | None) -> bool:
    """Whether that kernel adds up shares of so many tokens."""
    if links is None or links.shape[-2] - 1 not in layer_products.LINKED or config.num_experts:
        return False
    width, most = config.hidden_size, layer_products.MOST_LINKED
    if config.weights_fp8:
        most = layer_products.MOST_LINKED_FP8
    reached = width % all_reduce.EVEN == 0 and width <= all_reduce.MOST_COLUMNS
    return reached and tokens <= most


class EndOfLayer(NamedTuple):
    """What follows a layer's attention where one kernel does it all: arguments of `layer_products`."""

    x: Float[Array, "T E"]
    weights: LayerWeights | MixtureWeights
    counters: Array
    links: Array | None  # between devices, of which each has a share of the matrices
    how: dict[str, Any]  # gate, eps and offset
    tuning: layer_products.Tuning | None
    last: bool = False  # there is no following layer, whatever the weights are


def end_of_layer(
    layer: Params,
    following: Params | None,
    x: Float[Array, "T E"],
    counters: Array,
    links: Array | None,
    config: ModelConfig,
) -> EndOfLayer:
    """Of a layer that `has_layer_kernel`, with the heads of the `following` one, which are without bias.

    `counters`: of `layer_products.counters_of`, the same for all layers. `links`: see `all_reduce.links_of`.
    """
    how: dict[str, Any] = {
        "gate": "gelu" if config.gelu else "silu", "eps": config.norm_eps, "offset": config.norm_offset
    }  # fmt: skip
    weights: LayerWeights | MixtureWeights
    if config.num_experts:
        weights = _mixture_weights(layer)
        how["routing"] = Routing(config.experts_per_token, config.normalize_experts)
    else:
        weights = _dense_weights(layer, config)
    if following is not None:
        heads = _matrix(following["qkv"], len(layer["mlp_norm"]), -1)
        weights = weights._replace(next_norm=following["attn_norm"], heads=heads)
    tuning = layer_tuning(len(x), config, links)
    return EndOfLayer(x, weights, counters, links, how, tuning)


def _dense_weights(layer: Params, config: ModelConfig) -> LayerWeights:
    norm, width = layer["mlp_norm"], len(layer["mlp_norm"])
    out, gate_up = _matrix(layer["attn_out"], -1, width), _matrix(layer["gate_up"], width, -1)
    weights = LayerWeights(out, norm, gate_up, layer["down"])
    if config.post_norms:
        weights = weights._replace(out_post=layer["attn_post_norm"], down_post=layer["mlp_post_norm"])
    return weights


def _mixture_weights(layer: Params) -> MixtureWeights:
    norm, width, gate_up = layer["mlp_norm"], len(layer["mlp_norm"]), layer["expert_gate_up"]
    out, gate_up = _matrix(layer["attn_out"], -1, width), gate_up.reshape(len(gate_up), width, -1)
    return MixtureWeights(out, norm, layer["router"], gate_up, layer["expert_down"])


def _matrix(weights: Array | Fp8Weights, *shape: int) -> Any:
    return weights if isinstance(weights, Fp8Weights) else weights.reshape(shape)


def ended(
    attended: Float[Array, "T A"], end: EndOfLayer, in_parts: bool
) -> tuple[Float[Array, "T E"], Float[Array, "T H"] | Float[Array, "splits rows H"] | None]:
    """The residual stream after a layer's other products, and the following layer's heads, by one kernel.

    `in_parts`: these are still to be added up.
    """
    return layer_products.layer_products(
        attended, end.x, end.weights, end.counters, **end.how, links=end.links, tuning=end.tuning, in_parts=in_parts
    )  # fmt: skip


def _by_xla(x: Array, weights: Array, columns: tuple[int, ...]) -> Array:
    # Contracting two axes at once would copy the weights on a CPU (20 ms instead of 1.2 ms a token).
    return jnp.einsum("te,e...->t...", x, weights.reshape(x.shape[1], *columns))


def _by_kernel(
    x: Array | Scaled, weights: Array, config: ModelConfig, gate: Gate | None = None
) -> Array | None:
    """Tokens times a matrix of floats, [T, columns]; None where XLA's product is as fast as a kernel's, or there is none."""
    tokens = x.tokens if isinstance(x, Scaled) else x
    tuning = _dense_tuning(tokens, weights, gated=gate is not None)
    if tuning is None:
        return None
    weights = weights.reshape(tokens.shape[1], -1)
    return dense_products.dense_products(x, weights, gate=gate, eps=config.norm_eps, tuning=tuning)


def _dense_tuning(x: Array, weights: Array, *, gated: bool = False) -> dense_products.Tuning | None:
    """Of the kernel for these, None without."""
    tokens, depth = x.shape
    tuning = dense_products.tuning_for(tokens, depth, weights.size // depth, gated=gated)
    if tuning is None:
        return None
    try:
        for array in (x, weights):
            check_one_device(array)
        dense_products.check_supported(x, weights)
    except NotImplementedError:
        return None
    return tuning


def _times(x: Array | Fp8Tokens, weights: Fp8Weights, config: ModelConfig, gate: Gate | None = None) -> Array:
    """Tokens times FP8 weights, the tokens in FP8 too if they are many and the configuration says so."""
    if isinstance(x, Fp8Tokens):  # by a kernel, so the product has one
        return fp8.fp8_products(x, weights, gate=gate)
    multiply, quantise = fp8.fp8_products_reference, fp8.quantise_tokens_reference
    if _has_kernel(x, weights):
        multiply, quantise = fp8.fp8_products, fp8.quantise_tokens
    return multiply(quantise(x) if _narrow(x, config) else x, weights, gate=gate).astype(x.dtype)


def _narrow(x: Array, config: ModelConfig) -> bool:
    return config.activations_fp8 and len(x) >= fp8.LEAST_NARROW


def _has_kernel(x: Array, weights: Fp8Weights) -> bool:
    try:
        check_one_device(weights.codes)
        fp8.check_supported(x.dtype)
    except NotImplementedError as reason:
        if jax.default_backend() == "gpu":
            _warn(str(reason))
        return False
    return True


@cache  # once, not for every product of every program
def _warn(reason: str) -> None:
    log.warning("FP8 weights are unpacked for every product, many times slower: %s", reason)
