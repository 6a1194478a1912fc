"""The abstract description of every parameter: shape, logical axes, initialiser.

Initialisation, sharding and weight loading are all derived from `param_specs`. Layers are a tuple of dicts, not
stacked arrays: slices of a stacked leaf are copied on a CPU (160 ms a token instead of 15 ms at 135M parameters),
and `lax.scan` over stacked weights copies every layer on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.config import ModelConfig
from pallas_kernels import fp8_products as fp8
from pallas_kernels.expert_products import mxfp4

Params = dict[str, Any]  # {"embed", "final_norm", ("lm_head",) "layers": tuple of dicts}, see `param_specs`


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter. `axes` names the logical axis of every dimension; `fan_in` None: a norm's weight.

    `packed`: int32, MXFP4 as from `expert_products.mxfp4.pack`, whatever the dtype of the others.
    `fp8`: not an array of this shape but `fp8_products.Fp8Weights` of a matrix with as many columns as fit, or of `matrices`
    (experts, parts), if the shape is [experts, depth, (parts,) columns].
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    fan_in: int | None
    packed: bool = False
    fp8: bool = False
    matrices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")

    @property
    def matrix(self) -> tuple[int, int]:
        """(depth, columns) of weights that tokens are multiplied with: the first axes are what is summed over."""
        assert self.fan_in is not None
        return self.fan_in, math.prod(self.shape) // math.prod((self.fan_in, *self.matrices))

    @property
    def of_columns(self) -> tuple[int, ...]:
        """The shape with the axes that are summed over of one element each."""
        begin, end = self._depth
        return (*self.shape[:begin], *[1] * (end - begin), *self.shape[end:])

    @property
    def fp8_axes(self) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
        """Logical axes of codes and scales: of what lies in one dimension together that of the first axis with a name."""
        begin, end = self._depth
        depth, columns = (
            next((axis for axis in axes if axis), None) for axes in (self.axes[begin:end], self.axes[end:])
        )
        matrices = (None,) * len(self.matrices)
        return (*matrices, columns, depth, None, None), (*matrices, columns)

    @property
    def _depth(self) -> tuple[int, int]:
        """Where the axes that are summed over begin and end."""
        begin = 1 if self.matrices else 0
        own = self.shape[begin:]
        return begin, begin + next(n for n in range(len(own) + 1) if math.prod(own[:n]) == self.fan_in)


def _is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def map_specs(f: Any, specs: Any, *rest: Any) -> Any:
    """`jax.tree.map` over a tree of ParamSpec."""
    return jax.tree.map(f, specs, *rest, is_leaf=_is_spec)


def layer_specs(config: ModelConfig, layer: int) -> dict[str, ParamSpec]:
    """Parameters of one layer.

    `qkv[:, k]` holds the G query heads of KV head k, then its key head, then its value head, so that the one
    axis "kv_heads" shards queries, keys and values alike. `gate_up[:, 0]` is the gate, `gate_up[:, 1]` the up part.
    Where the model has them, `qkv_bias` belongs to `qkv`, `q_norm` and `k_norm` are weights for every head alike, and
    `attn_post_norm` and `mlp_post_norm` normalise what attention and MLP give before it is added. `sinks[k, g]` is the
    logit that joins the softmax of query head g of KV head k. A mixture of experts has a `router` and the weights of all
    experts instead of one MLP's, and biases to each of them where the model has these.
    """
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    N, K, G = config.num_heads, config.num_kv_heads, config.group_size
    product = partial(ParamSpec, fp8=config.weights_fp8)
    specs = {
        "attn_norm": ParamSpec((E,), ("embed",), None),
        "qkv": product((E, K, G + 2, D), ("embed", "kv_heads", None, "head_dim"), E),
        "attn_out": product((N, D, E), ("heads", "head_dim", "embed"), N * D),
        "mlp_norm": ParamSpec((E,), ("embed",), None),
    }
    if config.has_experts(layer):
        X, F = config.num_experts, config.expert_size
        specs["router"] = ParamSpec((E, X), ("embed", None), E)
        # Packed experts stay whole: GPT-OSS's 45 tiles of width are no multiple of anything even.
        whole = ("experts", *(None,) * 5)
        by, width = ("experts", None) if config.experts_mxfp4 else (None, "mlp")
        if config.experts_mxfp4:
            specs |= {
                "expert_gate_up": ParamSpec(mxfp4.packed_shape(X, 2, F, E), whole, E, packed=True),
                "expert_down": ParamSpec(mxfp4.packed_shape(X, 1, E, F), whole, F, packed=True),
            }
        else:
            specs |= {
                "expert_gate_up": product((X, E, 2, F), (None, "embed", None, "mlp"), E, matrices=(X, 2)),
                "expert_down": product((X, F, E), (None, "mlp", "embed"), F, matrices=(X, 1)),
            }
        if config.expert_bias:
            specs |= {
                "router_bias": ParamSpec((X,), (None,), E),
                "expert_gate_up_bias": ParamSpec((X, 2, F), (by, None, width), E),
                "expert_down_bias": ParamSpec((X, E), (by, "embed"), F),
            }
    else:
        specs |= {
            "gate_up": product((E, 2, F), ("embed", None, "mlp"), E),
            "down": product((F, E), ("mlp", "embed"), F),
        }
    if config.qkv_bias:
        specs["qkv_bias"] = ParamSpec((K, G + 2, D), ("kv_heads", None, "head_dim"), E)
    if config.attn_out_bias:
        specs["attn_out_bias"] = ParamSpec((E,), ("embed",), N * D)
    if config.attention_sinks:
        specs["sinks"] = ParamSpec((K, G), ("kv_heads", None), 1)
    if config.qk_norm:
        specs |= {name: ParamSpec((D,), ("head_dim",), None) for name in ("q_norm", "k_norm")}
    if config.post_norms:
        specs |= {name: ParamSpec((E,), ("embed",), None) for name in ("attn_post_norm", "mlp_post_norm")}
    return specs


def param_specs(config: ModelConfig) -> Params:
    """The tree of `ParamSpec`, in the structure of the parameters."""
    V, E = config.vocab_size, config.hidden_size
    specs: Params = {
        "embed": ParamSpec((V, E), ("vocab", "embed"), E),
        "final_norm": ParamSpec((E,), ("embed",), None),
        "layers": tuple(layer_specs(config, layer) for layer in range(config.num_layers)),
    }
    if not config.tie_embeddings:
        specs["lm_head"] = ParamSpec((E, V), ("embed", "vocab"), E)
    return specs


def check_params(params: Any, config: ModelConfig) -> None:
    """Raises ValueError that says how `params` differ from those of the model: in names, layers, or the vocabulary.

    Within `jax.shard_map` they are a device's. Shapes of layers are not looked at: weights in FP8 have others. "links" may
    be beside them. Raises TypeError on what is no dict.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params must be a dict, got {type(params).__name__}: write params of load_model(...)"
        )
    specs = param_specs(config)
    differ = _other_names("params", params.keys() - {"links"}, specs)
    if "layers" in params and len(params["layers"]) != config.num_layers:
        differ.append(f"{len(params['layers'])} layers, expected {config.num_layers}")
    for number, (layer, wanted) in enumerate(zip(params.get("layers", ()), specs["layers"], strict=False)):
        if names := _other_names(f"layer {number}", layer, wanted):
            differ += names
            break  # those of other layers are much the same
    for name in sorted({"embed", "lm_head"} & params.keys() & specs.keys()):
        shape = np.shape(params[name])
        if not _has_shape(shape, specs[name], config):
            differ.append(f"{name} of shape {[*shape]}, expected {[*specs[name].shape]}")
    if differ:
        raise ValueError(
            f"params are not those of model {config.name}: {'; '.join(differ)}: take both of one model, as load_model gives "
            "them"
        )


def _other_names(where: str, found: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """What `where` lacks, and what it has that the model does not know."""
    found, wanted = set(found), set(wanted)
    both = (("without", wanted - found), ("with", found - wanted))
    return [f"{where} {how} {', '.join(sorted(names))}" for how, names in both if names]


def _has_shape(shape: tuple[int, ...], spec: ParamSpec, config: ModelConfig) -> bool:
    """Whether it is that of `spec`; a device's share may have a part of the vocabulary."""
    if config.tensor_axis is not None and len(shape) == len(spec.shape):
        at = spec.axes.index("vocab")
        if shape[at] and spec.shape[at] % shape[at] == 0:
            shape = (*shape[:at], spec.shape[at], *shape[at + 1 :])
    return shape == spec.shape


def abstract_params(config: ModelConfig, dtype: DTypeLike) -> Params:
    """The tree of `jax.ShapeDtypeStruct`. Raises NotImplementedError for shapes that FP8 weights cannot have."""

    def abstract(spec: ParamSpec) -> Any:
        if spec.fp8:
            shapes = ((fp8.packed_shape(*spec.matrix), jnp.int32), (spec.matrix[1:], jnp.float32))
            codes_and_scales: Any = (jax.ShapeDtypeStruct((*spec.matrices, *x), dtype) for x, dtype in shapes)
            return fp8.Fp8Weights(*codes_and_scales)
        return jax.ShapeDtypeStruct(spec.shape, jnp.int32 if spec.packed else dtype)

    return map_specs(abstract, param_specs(config))


def num_parameters(config: ModelConfig) -> int:
    """Number of weights, a tied head counted once."""
    specs = param_specs(config.replace(experts_mxfp4=False))
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=_is_spec))


def param_bytes(config: ModelConfig, dtype: DTypeLike) -> int:
    """Memory of the parameters."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract_params(config, dtype)))


def init_params(config: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random weights: normal with standard deviation fan_in^-0.5; norms multiply by one."""
    # NumPy draws the numbers: JAX would compile a program for every shape, seconds for a model of milliseconds.
    seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
    rng = np.random.default_rng(seed)

    def init(spec: ParamSpec) -> Any:
        if spec.fan_in is None:
            return jnp.asarray(np.full(spec.shape, 1.0 - config.norm_offset, dtype))
        if spec.packed:
            return jnp.asarray(mxfp4.random(rng, spec.shape, spec.fan_in**-0.5))
        if spec.fp8:
            return jax.tree.map(jnp.asarray, fp8.random(rng, *spec.matrix, spec.fan_in**-0.5, spec.matrices))
        return jnp.asarray((rng.standard_normal(spec.shape, np.float32) * spec.fan_in**-0.5).astype(dtype))

    return map_specs(init, param_specs(config))
