"""From the tensors of a checkpoint to the parameter tree: one table of names, one error for all mismatches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike
from rich.progress import track

from models.config import ModelConfig
from models.params import Params, ParamSpec, param_specs


class WeightMismatchError(ValueError):
    """A checkpoint does not fit its configuration; the message lists every mismatch."""


class TensorSource(Protocol):
    """The tensors of a checkpoint, in the layout of Hugging Face (matrices [out, in])."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, read when it is needed."""
        ...


class _Entry(NamedTuple):
    huggingface: str  # tensor name; "{layer}" stands for the layer's number, "{expert}" for the expert's
    gguf: str
    leaf: str  # key of the parameter, in the layer when the name has "{layer}"
    part: str  # which part of the leaf: a key of `_parts`


# A name template rather than a regular expression, because it can also be written out: a missing tensor has a name.
_TABLE = (
    _Entry("model.embed_tokens.weight", "token_embd.weight", "embed", "embed"),
    _Entry("model.norm.weight", "output_norm.weight", "final_norm", "norm"),
    _Entry("lm_head.weight", "output.weight", "lm_head", "lm_head"),
    _Entry(
        "model.layers.{layer}.input_layernorm.weight", "blk.{layer}.attn_norm.weight", "attn_norm", "norm"
    ),
    _Entry("model.layers.{layer}.self_attn.q_proj.weight", "blk.{layer}.attn_q.weight", "qkv", "q"),
    _Entry("model.layers.{layer}.self_attn.k_proj.weight", "blk.{layer}.attn_k.weight", "qkv", "k"),
    _Entry("model.layers.{layer}.self_attn.v_proj.weight", "blk.{layer}.attn_v.weight", "qkv", "v"),
    _Entry("model.layers.{layer}.self_attn.q_proj.bias", "blk.{layer}.attn_q.bias", "qkv_bias", "q_bias"),
    _Entry("model.layers.{layer}.self_attn.k_proj.bias", "blk.{layer}.attn_k.bias", "qkv_bias", "k_bias"),
    _Entry("model.layers.{layer}.self_attn.v_proj.bias", "blk.{layer}.attn_v.bias", "qkv_bias", "v_bias"),
    _Entry(
        "model.layers.{layer}.self_attn.q_norm.weight",
        "blk.{layer}.attn_q_norm.weight",
        "q_norm",
        "head_norm",
    ),
    _Entry(
        "model.layers.{layer}.self_attn.k_norm.weight",
        "blk.{layer}.attn_k_norm.weight",
        "k_norm",
        "head_norm",
    ),
    _Entry("model.layers.{layer}.self_attn.o_proj.weight", "blk.{layer}.attn_output.weight", "attn_out", "o"),
    _Entry("model.layers.{layer}.mlp.gate_proj.weight", "blk.{layer}.ffn_gate.weight", "gate_up", "gate"),
    _Entry("model.layers.{layer}.mlp.up_proj.weight", "blk.{layer}.ffn_up.weight", "gate_up", "up"),
    _Entry("model.layers.{layer}.mlp.down_proj.weight", "blk.{layer}.ffn_down.weight", "down", "down"),
)
_EXPERTS = (  # a tensor for each expert; in GGUF files one for all, below
    _Entry("model.layers.{layer}.mlp.gate.weight", "blk.{layer}.ffn_gate_inp.weight", "router", "router"),
    _Entry("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", "", "expert_gate_up", "expert_gate"),
    _Entry("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", "", "expert_gate_up", "expert_up"),
    _Entry("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", "", "expert_down", "expert_down"),
    _Entry("", "blk.{layer}.ffn_gate_exps.weight", "expert_gate_up", "all_gate"),
    _Entry("", "blk.{layer}.ffn_up_exps.weight", "expert_gate_up", "all_up"),
    _Entry("", "blk.{layer}.ffn_down_exps.weight", "expert_down", "all_down"),
)
# Mixtral's names for Qwen's.
_MIXTRAL = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.\d+\.)w1\."), r"\1gate_proj."),
    (re.compile(r"(\.experts\.\d+\.)w3\."), r"\1up_proj."),
    (re.compile(r"(\.experts\.\d+\.)w2\."), r"\1down_proj."),
)
_MLP_NORM = (  # Llama's, whose name in Hugging Face checkpoints says where it stands
    _Entry(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "blk.{layer}.ffn_norm.weight",
        "mlp_norm",
        "norm",
    ),
)
_POST_NORMS = (  # Gemma 3: that name is of the norm of what attention gives
    _Entry(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "blk.{layer}.post_attention_norm.weight",
        "attn_post_norm",
        "norm",
    ),
    _Entry(
        "model.layers.{layer}.pre_feedforward_layernorm.weight",
        "blk.{layer}.ffn_norm.weight",
        "mlp_norm",
        "norm",
    ),
    _Entry(
        "model.layers.{layer}.post_feedforward_layernorm.weight",
        "blk.{layer}.post_ffw_norm.weight",
        "mlp_post_norm",
        "norm",
    ),
)
# Not weights: frequencies that follow from the configuration. Not read: what a model of text and images sees with.
_IGNORED = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rope_freqs\.weight"
    r"|(model\.)?(vision_tower|multi_modal_projector)\..+|(v|mm)\..+"
)
# Prefixes of the language model in one of text and images: the first as transformers wrote them up to version 4.51.
_LANGUAGE_MODEL = re.compile(r"^(?:language_model\.|(model\.)language_model\.)")


class _Part(NamedTuple):
    shape: tuple[int, ...]  # of the tensor in the checkpoint
    place: Callable[
        [np.ndarray, np.ndarray], None
    ]  # (leaf, tensor): writes the tensor into its part of the leaf


def _parts(config: ModelConfig) -> dict[str, _Part]:
    V, E, F, D = config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim
    N, K, G = config.num_heads, config.num_kv_heads, config.group_size
    X, S = config.num_experts, config.expert_size

    def part(shape: tuple[int, ...], index: tuple, view: Callable[[np.ndarray], np.ndarray]) -> _Part:
        def place(leaf: np.ndarray, tensor: np.ndarray) -> None:
            leaf[index] = view(tensor)

        return _Part(shape, place)

    every = slice(None)
    return {
        "embed": part((V, E), (...,), lambda x: x),
        "norm": part((E,), (...,), lambda x: x),
        "lm_head": part((V, E), (...,), lambda x: x.T),
        "q": part((N * D, E), (every, every, slice(0, G)), lambda x: x.T.reshape(E, K, G, D)),
        "k": part((K * D, E), (every, every, G), lambda x: x.T.reshape(E, K, D)),
        "v": part((K * D, E), (every, every, G + 1), lambda x: x.T.reshape(E, K, D)),
        "q_bias": part((N * D,), (every, slice(0, G)), lambda x: x.reshape(K, G, D)),
        "k_bias": part((K * D,), (every, G), lambda x: x.reshape(K, D)),
        "v_bias": part((K * D,), (every, G + 1), lambda x: x.reshape(K, D)),
        "head_norm": part((D,), (...,), lambda x: x),
        "o": part((E, N * D), (...,), lambda x: x.T.reshape(N, D, E)),
        "gate": part((F, E), (every, 0), lambda x: x.T),
        "up": part((F, E), (every, 1), lambda x: x.T),
        "down": part((E, F), (...,), lambda x: x.T),
        "router": part((X, E), (...,), lambda x: x.T),
        "expert_gate": part((S, E), (every, 0), lambda x: x.T),  # of one expert's part of the leaf
        "expert_up": part((S, E), (every, 1), lambda x: x.T),
        "expert_down": part((E, S), (...,), lambda x: x.T),
        "all_gate": part((X, S, E), (every, every, 0), lambda x: x.swapaxes(1, 2)),
        "all_up": part((X, S, E), (every, every, 1), lambda x: x.swapaxes(1, 2)),
        "all_down": part((X, E, S), (...,), lambda x: x.swapaxes(1, 2)),
    }


class _Tensor(NamedTuple):
    name: str
    part: str
    expert: int | None  # whose part of the leaf it belongs to


def _leaf_names(config: ModelConfig, style: str) -> dict[tuple[str, int | None], list[_Tensor]]:
    """(leaf, layer) -> the tensors that fill it."""
    names: dict[tuple[str, int | None], list[_Tensor]] = {}
    specs = param_specs(config)
    for entry in (*_TABLE, *(_POST_NORMS if config.post_norms else _MLP_NORM), *_EXPERTS):
        template = entry.gguf if style == "gguf" else entry.huggingface
        in_layers = "{layer}" in template
        layers: list[int | None] = list(range(config.num_layers)) if in_layers else [None]
        experts: list[int | None] = list(range(config.num_experts)) if "{expert}" in template else [None]
        for layer in layers:
            if not template or entry.leaf not in (specs if layer is None else specs["layers"][layer]):
                continue
            tensors = [
                _Tensor(template.format(layer=layer, expert=expert), entry.part, expert) for expert in experts
            ]
            names.setdefault((entry.leaf, layer), []).extend(tensors)
    return names


def _text_names(source: TensorSource) -> dict[str, str]:
    """Name here -> name in the checkpoint, which may read images, or have Mixtral's names.

    Raises WeightMismatchError where two mean the same tensor.
    """
    names: dict[str, str] = {}
    for name in source.shapes:
        text_name = _LANGUAGE_MODEL.sub(r"\1", name)
        for mixtral, here in _MIXTRAL:
            text_name = mixtral.sub(here, text_name)
        if text_name in names:
            raise WeightMismatchError(f"{names[text_name]} and {name} are the same tensor")
        names[text_name] = name
    return names


def check_weights(source: TensorSource, config: ModelConfig, style: str) -> None:
    """Raises WeightMismatchError listing every missing tensor, unexpected tensor and wrong shape."""
    parts = _parts(config)
    wanted = {
        tensor.name: parts[tensor.part].shape
        for tensors in _leaf_names(config, style).values()
        for tensor in tensors
    }
    found = {text_name: source.shapes[name] for text_name, name in _text_names(source).items()}
    problems = [
        f"{name}: expected shape {shape}, found {tuple(found[name])}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems += [
        f"{name}: missing (expected shape {shape})" for name, shape in wanted.items() if name not in found
    ]
    # A tied checkpoint may store the head a second time.
    tied_head = {"lm_head.weight", "output.weight"} if config.tie_embeddings else set()
    problems += [
        f"{name}: unexpected (shape {tuple(shape)})"
        for name, shape in found.items()
        if name not in wanted and name not in tied_head and not _IGNORED.fullmatch(name)
    ]
    if problems:
        lines = "\n  ".join(problems)
        raise WeightMismatchError(
            f"the weights of {config.name} do not fit its configuration, {len(problems)} mismatches:\n  {lines}"
        )


def assemble_params(
    source: TensorSource,
    config: ModelConfig,
    dtype: DTypeLike,
    *,
    style: str = "huggingface",
    progress: bool = True,
) -> Params:
    """Reads a checkpoint into the parameter tree, one leaf at a time.

    Args:
      style: whose tensor names the source has, "huggingface" or "gguf".
      dtype: dtype of all parameters.

    Raises:
      WeightMismatchError: before anything is read, when names or shapes do not fit.
    """
    check_weights(source, config, style)
    parts = _parts(config)
    names, names_here = _leaf_names(config, style), _text_names(source)
    specs = param_specs(config)
    flat: dict[tuple[str, int | None], jax.Array] = {}
    items = track(names.items(), description="Reading weights", disable=not progress, transient=True)
    for (leaf_name, layer), tensors in items:
        spec: ParamSpec = specs[leaf_name] if layer is None else specs["layers"][layer][leaf_name]
        leaf = np.empty(spec.shape, dtype)
        for name, part, expert in tensors:
            place = leaf if expert is None else leaf[expert]
            parts[part].place(place, source.read(names_here[name]))
        flat[leaf_name, layer] = jax.device_put(leaf)
    layers = tuple({key: flat[key, i] for key in layer} for i, layer in enumerate(specs["layers"]))
    top = {key: flat[key, None] for key in specs if key != "layers"}
    return {**top, "layers": layers}
