"""Top-k, top-p and min-p without sorting the vocabulary, and drawing a token with few random numbers.

All filters here are a lower bound on a token's probability, so the kept set is `p >= threshold`. The bound is
read off the largest `CANDIDATES` probabilities where they decide it, as they nearly always do; otherwise
it is found by bisection over the bits of the probability, each step one pass over the vocabulary.

Probabilities are relative to the most probable token (so the largest is exactly 1) and not normalised.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

CANDIDATES = 64  # probabilities looked at before bisection
_BLOCK = 128  # tokens in a block of what works in two levels
_SMALL_BLOCK = 16  # of those that the largest values are looked for in last
_LOG_TINY = -60.0  # a token exp(60) times less likely than the best one has probability 0
_LEAST = -1e30  # logit that a mask gives at least to what it allows: above -inf, finite at any temperature

_Bounds = tuple[Array, Array, Array, Array]


def mask_words(vocab: int) -> int:
    """32-bit words of a mask with a bit for each token."""
    return -(-vocab // 32)


def restrict(logits: Array, mask: Array) -> Array:
    """`logits` f32[B, V] where `mask` u32[B, mask_words(V)] has a bit (token t: bit t % 32 of word t // 32), -inf elsewhere.

    An allowed token stays possible even at -inf: where a ban or a bias leaves nothing else, the mask still wins. Raises
    ValueError on a mask of another kind.
    """
    wanted = logits.shape[0], mask_words(logits.shape[1])
    if mask.shape != wanted or mask.dtype != jnp.uint32:
        raise ValueError(f"a mask of {mask.dtype}{[*mask.shape]}: expected bits, uint32{[*wanted]}")
    with jax.named_scope("mask"):
        bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]] != 0
        return jnp.where(allowed, jnp.maximum(logits, _LEAST), -jnp.inf)


def relative_probs(logits: Array, temperature: Array) -> Array:
    """exp((logits - max) / temperature): f32[B, V] in [0, 1], from f32[B, V] and f32[B] > 0.

    Values under exp(-60) are 0: they could never be drawn, and without them no denormals occur.
    """
    shifted = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    return jnp.where(shifted > _LOG_TINY, jnp.exp(shifted), 0.0)


def keep_threshold(probs: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Smallest relative probability that is kept: f32[B]. Kept are the tokens with `probs >= threshold` > 0.

    Args:
      probs: f32[B, V] from `relative_probs`.
      top_k: i32[B], 0 for none. Keeps every token that fewer than `top_k` tokens beat.
      top_p: f32[B], 1 for none. Keeps every token such that all tokens that beat it have together less than
        `top_p` of the mass that min-p and top-k left over.
      min_p: f32[B], 0 for none. Keeps the tokens with at least `min_p` of the best token's probability.

    "Beats" is strictly greater, so ties at the border are all kept, and the best token always is. Order and
    meaning are vLLM's: min-p, top-k, then top-p on the renormalised rest.
    """
    vocab = probs.shape[-1]
    num = min(CANDIDATES, vocab)
    best = largest(probs, num)[0]  # [B, num], descending

    # top-k
    wanted = jnp.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    at = jnp.minimum(wanted, num) - 1
    kth = jnp.take_along_axis(best, at[:, None], axis=1)[:, 0]
    with jax.named_scope("top_k_search"):
        searched = _search(
            probs,
            wanted.astype(jnp.float32),
            jnp.zeros_like(kth),
            kth,
            (wanted > num) & (wanted < vocab),
            count=True,
        )
    kth = jnp.where(wanted == vocab, 0.0, jnp.where(wanted > num, searched, kth))
    lowest = jnp.maximum(kth, jnp.minimum(min_p, 1.0))

    # top-p
    mass = jnp.where(probs >= lowest[:, None], probs, 0.0).sum(axis=-1)
    target = jnp.clip(top_p, 0.0, 1.0) * mass
    best = jnp.where(best >= lowest[:, None], best, 0.0)
    reached = jnp.cumsum(best, axis=-1) >= target[:, None]
    first = jnp.argmax(reached, axis=-1)
    border = jnp.take_along_axis(best, first[:, None], axis=1)[:, 0]
    active = (top_p < 1.0) & ~reached[:, -1] & (best[:, -1] > 0)
    # All tokens below (1 - top_p) * mass / vocab have together less than (1 - top_p) * mass.
    floor = jnp.maximum(lowest, 0.5 * (1.0 - top_p) * mass / vocab)
    with jax.named_scope("top_p_search"):
        searched = _search(probs, target, floor, best[:, -1], active, count=False)
    border = jnp.where(reached[:, -1], border, jnp.where(active, searched, 0.0))
    return jnp.where(top_p < 1.0, jnp.maximum(lowest, border), lowest)


def _search(probs: Array, target: Array, low: Array, high: Array, active: Array, *, count: bool) -> Array:
    """Largest t in [low, high] at which the tokens with probs >= t reach `target` (or a t that keeps the same): f32[B].

    They are counted (`count`) or their mass is summed. It must be reached at `low`, and not by what lies above `high`.
    Without `active` rows nothing is done. Ends early where one token is left between the bounds.
    """

    def measure(threshold: Array) -> tuple[Array, Array]:
        kept = probs >= threshold[:, None]
        # Counted in floats (exact): XLA makes one fast loop of two float sums, but not of a float and an integer sum.
        number = jnp.where(kept, jnp.float32(1), jnp.float32(0)).sum(axis=-1)
        return number if count else jnp.where(kept, probs, 0.0).sum(axis=-1), number

    def undecided(low: Array, high: Array, n_low: Array, n_high: Array) -> Array:
        return active & (high - low > 1) & (n_low - n_high > 1)

    def body(carry: _Bounds) -> _Bounds:
        low, high, n_low, n_high = carry
        run = undecided(*carry)
        middle = low + (high - low) // 2
        value, number = measure(lax.bitcast_convert_type(middle, jnp.float32))
        enough = value >= target
        up, down = run & enough, run & ~enough
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, number, n_low),
            jnp.where(down, number, n_high),
        )

    # The order of floats >= 0 is the order of their bits. One more bit: `high` itself may be the answer.
    low_bits = lax.bitcast_convert_type(jnp.maximum(low, 0.0), jnp.int32)
    high_bits = lax.bitcast_convert_type(high, jnp.int32) + 1
    n_low = jnp.full(low.shape, probs.shape[-1], jnp.float32)
    low_bits, *_ = lax.while_loop(
        lambda carry: undecided(*carry).any(), body, (low_bits, high_bits, n_low, jnp.zeros_like(n_low))
    )
    return lax.bitcast_convert_type(low_bits, jnp.float32)


def _blocks(x: Array, fill: float, size: int = _BLOCK) -> Array:
    """[B, V] -> [B, blocks, size], padded with `fill`."""
    batch, vocab = x.shape
    if pad := -vocab % size:
        x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=fill)
    return x.reshape(batch, -1, size)


def largest(x: Array, count: int, sizes: tuple[int, ...] = (_BLOCK, _SMALL_BLOCK)) -> tuple[Array, Array]:
    """The `count` largest values of each row, descending, and where they are: f32 and i32[B, count] of f32[B, V].

    As `lax.top_k`, the first of equals first. Only the `count` blocks with the largest maxima can hold any of them: a row is
    cut to its blocks of `sizes[0]`, what is left to those of `sizes[1]`. XLA sorts whole rows on a GPU, and this sorts a few
    short ones; on a CPU it takes about half the time.
    """
    if not sizes or -(-x.shape[1] // sizes[0]) <= count:
        return lax.top_k(x, count)
    blocks, size = _blocks(x, -jnp.inf, sizes[0]), sizes[0]
    held = jnp.sort(lax.top_k(blocks.max(axis=-1), count)[1], axis=-1)  # in order, so that ties stay in order
    inside = jnp.take_along_axis(blocks, held[:, :, None], axis=1).reshape(x.shape[0], -1)
    best, at = largest(inside, count, sizes[1:])
    return best, jnp.take_along_axis(held, at // size, axis=1) * size + at % size


def argmax(x: Array) -> Array:
    """First index of the largest value of each row: i32[B] of f32[B, V]. In two levels, so that it vectorises."""
    blocks = _blocks(x, -jnp.inf)
    block = jnp.argmax(blocks.max(axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * _BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def draw(probs: Array, keys: Array) -> Array:
    """One index per row, with probability proportional to `probs`: i32[B] of f32[B, V] >= 0 and keys [B].

    First a block by its sum, then a token inside, each by the Gumbel-max trick: V / 128 + 128 random numbers
    for a row instead of V, and a token of probability 0 can never be drawn. A row's result depends on its
    probabilities and key alone.
    """
    blocks = _blocks(probs, 0.0)
    count = blocks.shape[1]
    shape = (count + _BLOCK,)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, shape, jnp.float32, mode="high"))(keys)
    block = jnp.argmax(jnp.log(blocks.sum(axis=-1)) + noise[:, :count], axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * _BLOCK + jnp.argmax(jnp.log(inside) + noise[:, count:], axis=-1)).astype(jnp.int32)
