"""What the tensors of checkpoints are called, and which leaf of the parameter tree each belongs to."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from models.config import ModelConfig
from models.params import param_specs


class _Entry(NamedTuple):
    huggingface: str  # tensor name; "{layer}" stands for the layer's number, "{expert}" for the expert's
    gguf: str
    leaf: str  # key of the parameter, in the layer when the name has "{layer}"
    part: str  # which part of the leaf: a key of `weights._parts`
    # The part where a checkpoint has it in MXFP4, as two tensors whose names are this one's and the suffixes.
    mxfp4: str = ""


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# A name template rather than a regular expression, because it can also be written out: a missing tensor has a name.
_TABLE = (
    _Entry(_EMBEDDING, "token_embd.weight", "embed", "embed"),
    _Entry("model.norm.weight", "output_norm.weight", "final_norm", "norm"),
    _Entry(_HEAD, "output.weight", "lm_head", "lm_head"),
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
    _Entry(
        "model.layers.{layer}.self_attn.o_proj.bias",
        "blk.{layer}.attn_output.bias",
        "attn_out_bias",
        "o_bias",
    ),
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
_FUSED = (  # a tensor for all experts, under the names of transformers 5's own modules; gates are the first half of the rows
    _EXPERTS[0],
    _Entry("model.layers.{layer}.mlp.experts.gate_up_proj", "", "expert_gate_up", "all_gate_up"),
    _Entry("model.layers.{layer}.mlp.experts.down_proj", "", "expert_down", "all_down"),
)
_GPT_OSS = (  # a tensor for all experts
    _Entry("model.layers.{layer}.self_attn.sinks", "blk.{layer}.attn_sinks.weight", "sinks", "sinks"),
    _Entry("model.layers.{layer}.mlp.router.weight", "blk.{layer}.ffn_gate_inp.weight", "router", "router"),
    _Entry(
        "model.layers.{layer}.mlp.router.bias", "blk.{layer}.ffn_gate_inp.bias", "router_bias", "router_bias"
    ),
    _Entry(
        "model.layers.{layer}.mlp.experts.gate_up_proj", "", "expert_gate_up", "pairs", mxfp4="mxfp4_gate_up"
    ),
    _Entry("model.layers.{layer}.mlp.experts.gate_up_proj_bias", "", "expert_gate_up_bias", "pairs_bias"),
    _Entry(
        "model.layers.{layer}.mlp.experts.down_proj", "", "expert_down", "down_in_out", mxfp4="mxfp4_down"
    ),
    _Entry(
        "model.layers.{layer}.mlp.experts.down_proj_bias",
        "blk.{layer}.ffn_down_exps.bias",
        "expert_down_bias",
        "all_down_bias",
    ),
    _Entry("", "blk.{layer}.ffn_gate_exps.bias", "expert_gate_up_bias", "all_gate_bias"),
    _Entry("", "blk.{layer}.ffn_up_exps.bias", "expert_gate_up_bias", "all_up_bias"),
    *(entry for entry in _EXPERTS if not entry.huggingface),
    _Entry(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "blk.{layer}.post_attention_norm.weight",
        "mlp_norm",
        "norm",
    ),
)
MXFP4_SUFFIXES = ("_blocks", "_scales")
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
_POST_NORMS = (  # Gemma: that name is of the norm of what attention gives
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
# Not weights: frequencies and masks that follow from the configuration, buffers of older versions of transformers. Not read:
# what a model of text and images sees with.
_IGNORED = re.compile(
    r"(.+\.)?rotary_emb\.inv_freq|.+\.masked_bias|rope_freqs\.weight"
    r"|(model\.)?(vision_tower|multi_modal_projector)\..+|(v|mm)\..+"
)
# Prefixes of the language model in one of text and images: the first as transformers wrote them up to version 4.51.
_LANGUAGE_MODEL = re.compile(r"^(?:language_model\.|(model\.)language_model\.)")


class Tensors(NamedTuple):
    """Tensors of a checkpoint that together fill one part of a leaf: one, or blocks and scales."""

    names: tuple[str, ...]
    part: str
    expert: int | None  # whose part of the leaf it is


def _entries(config: ModelConfig, found: Collection[str]) -> tuple[_Entry, ...]:
    if config.expert_bias:  # of GPT-OSS alone
        return (*_TABLE, *_GPT_OSS)
    fused = any(name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")) for name in found)
    experts = _FUSED if fused else _EXPERTS
    return (*_TABLE, *(_POST_NORMS if config.post_norms else _MLP_NORM), *experts)


def leaf_names(
    config: ModelConfig, style: str, found: Collection[str]
) -> dict[tuple[str, int | None], list[Tensors]]:
    """(leaf, layer) -> the tensors that fill it: in MXFP4, or one for all experts, where that is what is `found`."""
    names: dict[tuple[str, int | None], list[Tensors]] = {}
    specs = param_specs(config)
    packed = any(name.endswith(MXFP4_SUFFIXES) for name in found)
    for entry in _entries(config, found):
        template = entry.gguf if style == "gguf" else entry.huggingface
        in_layers = "{layer}" in template
        layers: list[int | None] = list(range(config.num_layers)) if in_layers else [None]
        experts: list[int | None] = list(range(config.num_experts)) if "{expert}" in template else [None]
        for layer in layers:
            if not template or entry.leaf not in (specs if layer is None else specs["layers"][layer]):
                continue
            for expert in experts:
                name = template.format(layer=layer, expert=expert)
                if name == _EMBEDDING and config.tie_embeddings and name not in found and _HEAD in found:
                    name = _HEAD  # of the two names of one tensor safetensors' `save_model` keeps this
                tensors = Tensors((name,), entry.part, expert)
                if packed and entry.mxfp4 and name not in found:
                    tensors = Tensors(tuple(name + suffix for suffix in MXFP4_SUFFIXES), entry.mxfp4, expert)
                names.setdefault((entry.leaf, layer), []).append(tensors)
    return names


def text_name(name: str) -> str:
    """The name here of a tensor in a checkpoint, which may read images, or have Mixtral's names."""
    name = _LANGUAGE_MODEL.sub(r"\1", name)
    for mixtral, here in _MIXTRAL:
        name = mixtral.sub(here, name)
    return name


def is_ignored(name: str) -> bool:
    """Whether a tensor of this name is left unread."""
    return _IGNORED.fullmatch(name) is not None
