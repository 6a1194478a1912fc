"""A tiny Llama, Gemma 2, Gemma 3 and GPT-OSS and a byte-level tokenizer, so that tests and examples download nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.attention import DenseCache, cached_attend, init_dense_cache
from models.config import ModelConfig, RopeScaling
from models.fp8_weights import in_fp8
from models.gemma import gemma2_fields, gemma3_fields
from models.gpt_oss import gpt_oss_fields
from models.params import Params, init_params
from models.transformer import forward

if TYPE_CHECKING:
    from models.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(5)))
TINY_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(**changes: Any) -> ModelConfig:
    """L 4, E 64, N 8, K 4, D 16, V 264: a Llama that runs in milliseconds. Any field can be changed by name."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "vocab_size": TINY_VOCAB_SIZE,
        "num_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 16,
        "max_positions": 4096,
        "rope_theta": 10000.0,
        "tie_embeddings": True,
        "bos_token_id": 1,
        "eos_token_ids": (0, 2),
    }
    return ModelConfig(**(fields | changes))


def tiny_gemma_config(**changes: Any) -> ModelConfig:
    """As `tiny_config` with everything of Gemma 3: L 6, of which 2 and 5 see every token, the others 24."""
    fields: dict[str, Any] = {
        "name": "tiny-gemma",
        "num_layers": 6,
        "sliding_window": 24,
        "sliding_layers": (0, 1, 3, 4),
        "sliding_rope_theta": 500.0,
        "rope_scaling": RopeScaling(kind="linear", factor=8.0),
        **gemma3_fields(hidden_size=64, query_scale=float(24**-0.5)),
    }
    return tiny_config(**(fields | changes))


def tiny_gemma2_config(**changes: Any) -> ModelConfig:
    """As `tiny_config` with everything of Gemma 2: layers 0 and 2 see 24 tokens, 1 and 3 all."""
    fields: dict[str, Any] = {
        "name": "tiny-gemma2",
        "sliding_window": 24,
        "sliding_layers": (0, 2),
        **gemma2_fields(64, float(24**-0.5), 4.0, 5.0),  # small enough to bend something
    }
    return tiny_config(**(fields | changes))


def tiny_gpt_oss_config(**changes: Any) -> ModelConfig:
    """As `tiny_config` with everything of GPT-OSS: layers 0 and 2 see 24 tokens, 1 and 3 all; four experts, two a token."""
    fields: dict[str, Any] = {
        "name": "tiny-gpt-oss",
        "sliding_window": 24,
        "sliding_layers": (0, 2),
        "rope_scaling": RopeScaling.yarn(4.0, 64, beta_fast=8.0, truncate=False),
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_size": 96,
        "tie_embeddings": False,
        **gpt_oss_fields(swiglu_limit=1.5),  # small enough to cut something off
    }
    return tiny_config(**(fields | changes))


def random_params(config: ModelConfig, key: jax.Array | int = 0, dtype: DTypeLike = jnp.float32) -> Params:
    """Random weights whose attention is far from uniform, so that a wrong key or position changes the logits."""
    key = jax.random.key(key) if isinstance(key, int) else key
    if config.weights_fp8:
        return in_fp8(random_params(config.replace(weights_fp8=False), key, dtype), config)[0]
    params = init_params(config, key, dtype)
    G = config.group_size
    for layer in params["layers"]:
        qkv = np.array(layer["qkv"])
        qkv[:, :, : G + 1] *= 2  # scores with a deviation of about 4
        layer["qkv"] = jnp.asarray(qkv)
        if config.attention_sinks:  # as large as what a query sees
            layer["sinks"] = layer["sinks"] + jnp.asarray(8, dtype)
        if config.qk_norm:  # undoes factors on the projections
            layer |= {name: layer[name] + jnp.asarray(1, dtype) for name in ("q_norm", "k_norm")}
    return params


def tiny_tokenizer(
    special_tokens: Sequence[str] = SPECIAL_TOKENS, chat_template: str | dict[str, str] = TINY_CHAT_TEMPLATE
) -> Tokenizer:
    """Byte-level: ids 0..7 are special tokens (0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>), byte b is id b + 8.

    Other `special_tokens` must be eight; the second begins a text, the third ends it.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    from models.tokenizer import BYTE_TO_CHAR, Tokenizer

    vocab = {token: i for i, token in enumerate(special_tokens)}
    vocab |= {BYTE_TO_CHAR[b]: b + len(special_tokens) for b in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special_tokens[1],
        eos_token=special_tokens[2],
        unk_token=special_tokens[0],
        pad_token=special_tokens[2],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return Tokenizer(fast)


@partial(jax.jit, static_argnames="config", donate_argnums=2)
def _reference_step(
    params: Params,
    config: ModelConfig,
    cache: DenseCache,
    tokens: jax.Array,
    start: jax.Array,
    num_valid: jax.Array,
) -> tuple[jax.Array, DenseCache]:
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    # Padding rows get a position past the cache, so that nothing is written for them.
    positions = jnp.where(rows < num_valid, start + rows, jnp.int32(2**30))
    logits, cache = forward(
        params,
        config,
        tokens,
        positions,
        cached_attend(positions, config=config),
        cache,
        logits_at=(num_valid - 1)[None],
    )
    return logits[0], cache


def reference_decode(
    params: Params, config: ModelConfig, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], jax.Array]:
    """Greedy decoding with a dense, contiguous cache: what every other path is compared with.

    Returns:
      (the `num_tokens` new token ids, their logits f32[num_tokens, V]); the end of text does not stop it.
    """
    padded = max(16, 1 << (len(prompt) - 1).bit_length())
    max_length = padded + -(-num_tokens // 64) * 64
    cache = init_dense_cache(config, max_length, params["embed"].dtype)
    tokens = jnp.asarray(list(prompt) + [0] * (padded - len(prompt)), jnp.int32)
    logits, cache = _reference_step(params, config, cache, tokens, jnp.int32(0), jnp.int32(len(prompt)))
    ids: list[int] = []
    rows = []
    for i in range(num_tokens):
        rows.append(logits)
        ids.append(int(jnp.argmax(logits)))
        token = jnp.asarray(ids[-1:], jnp.int32)
        if i + 1 < num_tokens:
            logits, cache = _reference_step(
                params, config, cache, token, jnp.int32(len(prompt) + i), jnp.int32(1)
            )
    return ids, jnp.stack(rows)
