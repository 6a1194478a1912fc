"""Writes GGUF files as llama.cpp's converter would, for the tests of reading them."""

import re

import gguf
import jax.numpy as jnp
import numpy as np

from models.attention import dense_attend
from models.testing import SPECIAL_TOKENS, TINY_CHAT_TEMPLATE
from models.tokenizer import BYTE_TO_CHAR
from models.transformer import forward
from tests.models.checkpoints import Tensors


def permute_rope(weight, num_heads):
    """What llama.cpp's converter does to query and key matrices of Llama."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path,
    source,
    config,
    *,
    architecture="llama",
    scale=1.0,
    rope_factors=None,
    pre="smollm",
    floats=None,
    ints=None,
    texts=None,
    flags=None,
    pieces=None,
    mxfp4=False,
    tensors_of_a_part=0,
    metadata=None,
):
    """The tiny checkpoint as llama.cpp would write it; q/k of Llama permuted, names mapped, Gemma's offset in its norms.

    With the tiny tokenizer, or a SentencePiece one: `pieces` are (token, score, type). `mxfp4`: the experts are stored so.
    `tensors_of_a_part`: if given, in several files. `metadata` takes the place of what is written, or leaves it out (None).
    """
    writer = gguf.GGUFWriter(
        path, architecture, split_max_tensors=tensors_of_a_part, small_first_shard=bool(tensors_of_a_part)
    )
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for key, value in (floats or {}).items():
        writer.add_float32(key, value)
    for key, value in (ints or {}).items():
        writer.add_uint32(key, value)
    for key, value in (texts or {}).items():
        writer.add_string(key, value)
    for key, value in (flags or {}).items():
        writer.add_bool(key, value)
    if pieces is None:
        tokens = [*SPECIAL_TOKENS, *(BYTE_TO_CHAR[b] for b in range(255)), "ab"]  # byte 255 is never in UTF-8
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)))
        writer.add_token_merges(["a b"])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([token for token, _, _ in pieces])
        writer.add_token_scores([score for _, score, _ in pieces])
        writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_bos_token_id(1 if pieces is None else 2)
    writer.add_eos_token_id(2 if pieces is None else 1)
    writer.add_chat_template(TINY_CHAT_TEMPLATE)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            whole = type(value) is int and value >= 0
            writer.add_key_value(
                key, value, gguf.GGUFValueType.UINT32 if whole else gguf.GGUFValueType.get_type(value)
            )
    table = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    }  # fmt: skip
    if architecture in ("gemma2", "gemma3"):
        table |= {
            "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }  # fmt: skip
    if architecture == "gpt-oss":
        table |= {
            "self_attn.sinks": "attn_sinks.weight", "mlp.router": "ffn_gate_inp",
            "post_attention_layernorm": "post_attention_norm",
        }  # fmt: skip
    for name, x in with_stacked_experts(with_parted_experts(source.tensors)).items():
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            x = x.astype(np.float32) + 1
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            x = permute_rope(x, config.num_heads if "q_proj" in name else config.num_kv_heads)
        for huggingface, short in table.items():
            name = name.replace(huggingface, short)
        x = np.ascontiguousarray(x.astype(np.float32) * np.float32(scale))
        if mxfp4 and name.endswith("_exps.weight"):
            kind = gguf.GGMLQuantizationType.MXFP4
            writer.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, x)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_stacked_experts(tensors):
    """The experts of a layer in one tensor, under the name that GGUF files have for it."""
    kinds = {
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
        "w1": "gate",
        "w3": "up",
        "w2": "down",
    }
    others, experts = {}, {}
    for name, x in tensors.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\..+\.experts\.(\d+)\.(\w+)\.weight", name)
        if found:
            layer, number, kind = found.groups()
            stack = experts.setdefault(f"blk.{layer}.ffn_{kinds[kind]}_exps.weight", {})
            stack[int(number)] = x
        else:
            router = re.sub(r"\.(mlp|block_sparse_moe)\.gate\.", ".ffn_gate_inp.", name)
            others[router] = x
    return others | {name: np.stack([stack[i] for i in range(len(stack))]) for name, stack in experts.items()}


def with_parted_experts(tensors):
    """GPT-OSS's experts [X, in, out] with gate and up in turn, as GGUF files have them: [X, out, in], by themselves."""
    found = {}
    for name, x in tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?$", name)
        if not layer:
            found[name] = x
            continue
        number, kind, bias = layer.groups()
        parts = {"down": x} if kind == "down" else {"gate": x[..., ::2], "up": x[..., 1::2]}
        for part, values in parts.items():
            stem = f"blk.{number}.ffn_{part}_exps"
            found[f"{stem}.bias" if bias else f"{stem}.weight"] = values if bias else values.swapaxes(1, 2)
    return found


def with_tiny_vocabulary(source, config):
    """A checkpoint with the vocabulary of the tiny tokenizer."""
    tables = {
        name: np.resize(x, (264, 32))
        for name, x in source.tensors.items()
        if "embed" in name or "head" in name
    }
    return Tensors({**source.tensors, **tables}), config.replace(vocab_size=264)


def logits_of(params, config):
    tokens = jnp.arange(20, dtype=jnp.int32)
    return forward(params, config, tokens, tokens, dense_attend(tokens, config=config), None)[0]
