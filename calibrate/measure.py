"""Measuring what each head would keep of one sample (paper, section 4.1). Pure and traceable under `jax.jit`.

The sample runs through the model once, with dense attention, and every layer is scored as the serving path would
score it as one chunk. This does not know about budgets or pages.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.attention import dense_attend
from models.config import ModelConfig
from models.logits import AttentionLogits
from models.params import check_params
from models.rope import rope_frequencies
from models.sinks import with_sinks
from models.transformer import forward
from tangram_jax.chunk_scores import check_scorer, scores_of
from tangram_jax.plan import PPM, kept_entries
from tangram_jax.row_numbers import whole
from tangram_jax.scorers import ScoreInputs, Scorer

QUERY_BLOCK = 256  # queries at a time, which bounds the logits at f32[N, 256, n]
SINKS = 4
WINDOW = 32


def aside(scorer: Scorer) -> int:
    """How many of a sample's last positions are not ranked."""
    return max(WINDOW, scorer.query_rows or 0)


def recorded_aside(provenance: Mapping[str, Any], scorer: Scorer) -> dict[str, int]:
    """`sinks` and `window` of `calibrate_ratios` with which a profile was measured: today's where it does not say.

    Raises ValueError or TypeError for what is no number of tokens.
    """
    found = {}
    for name, default in (("sinks", SINKS), ("window", aside(scorer))):
        said = provenance.get(name)
        found[name] = default if said is None else operator.index(said)
        if found[name] < 0:
            raise ValueError(f"{name} of {said} tokens")
    return found


def calibrate_ratios(
    params: Any,
    config: ModelConfig,
    tokens: Int[Array, " n"],
    scorer: Scorer,
    retention: float,
    *,
    sinks: int = SINKS,
    window: int | None = None,
) -> Float[Array, "L K"]:
    """Share of its entries that each head keeps on one sample, f32[L, K] in [0, 1] (paper, section 4.1).

    In each layer, the scores of all heads are flattened, the first `sinks` and last `window` positions aside:
    every head keeps those anyway, and queries that score must not score themselves. Of the rest the best
    ceil(retention * K * m) of the K * m scores stay, with m = n - sinks - window; a head's share is its number of
    them over m. So a layer's mean share is `retention`. Equal scores go to the earlier position, then to the
    lower head, so that equal heads share alike. Layers with a sliding window are not measured, as nothing of them is
    compressed: L counts `config.full_layers`.

    Args:
      tokens: i32[n], n > sinks + window. Everything but `params` and `tokens` is static under jit.
      window: default `aside(scorer)`: 32, or the scorer's own window of queries where that is wider.

    Raises:
      ValueError: if the sample is too short or several, retention is not in (0, 1], the parameters are of another model,
        all of its layers have a sliding window, or, outside of jit, a token is beyond the vocabulary.
      TypeError: on what is no scorer, and on tokens that are no whole numbers.
    """
    shares = calibrate_shares(params, config, tokens, scorer, (retention,), sinks=sinks, window=window)
    return shares[0]


def calibrate_shares(
    params: Any,
    config: ModelConfig,
    tokens: Int[Array, " n"],
    scorer: Scorer,
    retentions: tuple[float, ...],
    *,
    sinks: int = SINKS,
    window: int | None = None,
) -> Float[Array, "R L K"]:
    """`calibrate_ratios` at several retentions in one pass through the model, f32[R, L, K]."""
    check_params(params, config)
    check_scorer(scorer)
    if not config.full_layers:
        raise ValueError(
            f"all layers of {config.name} have a sliding window: nothing of them is compressed, and nothing measured"
        )
    tokens = whole("tokens", tokens)
    if tokens.ndim != 1:
        raise ValueError(
            f"tokens {[*tokens.shape]} of a sample: expected [n], so run samples of a batch one by one"
        )
    window = aside(scorer) if window is None else window
    if sinks < 0 or window < 0:
        raise ValueError(f"sinks and window are numbers of tokens, found {sinks} and {window}")
    n, candidates = tokens.shape[0], tokens.shape[0] - sinks - window
    if candidates < 1:
        raise ValueError(f"a sample needs more than sinks + window = {sinks + window} tokens, found {n}")
    for retention in retentions:
        if not 0.0 < retention <= 1.0:
            raise ValueError(f"retention is the kept fraction and must lie in (0, 1], found {retention}")
    total = config.num_kv_heads * candidates
    # Exactly the ceiling, so one at least.
    keeps = [max(1, int(kept_entries(round(retention * PPM), total))) for retention in retentions]
    positions = jnp.arange(n, dtype=jnp.int32)

    windowed = dense_attend(positions, config=config)
    ranked = slice(sinks, n - window)

    # Its `sinks` are not positions but logits of the model (`models.sinks`).
    def attend(
        state: list[Array], layer: int, q: Array, k: Array, v: Array, sinks: Array | None = None
    ) -> tuple[Array, list[Array]]:
        if layer in config.sliding_layers:
            return windowed(state, layer, q, k, v, sinks)
        out, lse = causal_attention_with_lse(q, k, v, logits=AttentionLogits.of(config))
        out, lse = with_sinks(out, lse, None if sinks is None else sinks.reshape(-1))
        out = out.astype(q.dtype)
        scores = _score(q, k, v, lse, scorer=scorer, config=config)
        with jax.named_scope("keep"):
            # Position-major, so that ties do not go to the lower heads; top_k is stable.
            flat = scores[:, ranked].T.reshape(-1)
            head = jax.lax.top_k(flat, max(keeps))[1] % config.num_kv_heads
            of_head = head[:, None] == jnp.arange(config.num_kv_heads)
            kept = jnp.stack([of_head[:keep].sum(axis=0) for keep in keeps])
            # An order of scores that are no numbers says nothing, however plausible its shares look.
            numbers = (flat < jnp.inf).all()  # -inf is never kept, and says that
            share = jnp.where(numbers, kept.astype(jnp.float32) / candidates, jnp.nan)
        return out, [*state, share]

    _, shares = forward(params, config, tokens, positions, attend, [], logits_at=jnp.array([n - 1]))
    return jnp.stack(shares, axis=1)


@partial(jax.jit, static_argnames=("scorer", "config"))
def _score(
    q: Array, k: Array, v: Array, lse: Array, *, scorer: Scorer, config: ModelConfig
) -> Float[Array, "K n"]:
    positions = jnp.arange(q.shape[0], dtype=jnp.int32)
    return scores_of(
        scorer,
        ScoreInputs(
            q=q,
            q_positions=positions,
            num_valid=jnp.int32(q.shape[0]),
            lse=lse,
            k=k.swapaxes(0, 1),
            v=v.swapaxes(0, 1),
            positions=positions,
            valid=jnp.ones((k.shape[1], k.shape[0]), bool),
            inv_freq=rope_frequencies(config),
            **AttentionLogits.of(config)._asdict(),
        ),
    )


@partial(jax.jit, static_argnames="logits")
def causal_attention_with_lse(
    q: Float[Array, "n N D"], k: Float[Array, "n K D"], v: Float[Array, "n K D"], *, logits: AttentionLogits
) -> tuple[Float[Array, "n N D"], Float[Array, "n N"]]:
    """Dense causal attention of a sequence to itself and the log-sum-exp of each query's logits.

    Logits and softmax in float32; memory f32[N, QUERY_BLOCK, n].
    """
    n, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    block = min(QUERY_BLOCK, n)
    padding = -n % block
    q_blocks = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    q_blocks = q_blocks.reshape(-1, block, num_kv_heads, num_heads // num_kv_heads, head_dim)
    first = jnp.arange(q_blocks.shape[0]) * block

    def one(args: tuple[Array, Array]) -> tuple[Array, Array]:
        q_tkgd, start = args
        scores = logits(jnp.einsum("tkgd,skd->kgts", q_tkgd, k, preferred_element_type=jnp.float32))
        visible = jnp.arange(n) <= (start + jnp.arange(block))[:, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)  # finite: every query sees position 0
        weights = jnp.exp(scores - lse).astype(v.dtype)
        out = jnp.einsum("kgts,skd->tkgd", weights, v, preferred_element_type=jnp.float32)
        return out.reshape(block, num_heads, head_dim).astype(q.dtype), lse[..., 0].reshape(
            num_heads, block
        ).T

    out, lse = jax.lax.map(one, (q_blocks, first))
    return out.reshape(-1, num_heads, head_dim)[:n], lse.reshape(-1, num_heads)[:n]
