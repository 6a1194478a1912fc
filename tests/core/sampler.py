"""What tests of the sampler share: logits, states, several steps at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tangram_jax.sampling import FULL, SamplerState, init_sampler, row_params, sample, set_row

jit_sample = jax.jit(sample, static_argnames="variant")
V = 300
MOST_STEPS = 400


def gaussian(seed, *shape, scale=3.0):
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(np.float32)


def rows_of(*each, vocab=V, rows=None):
    """A state whose row i has the parameters each[i]."""
    state = init_sampler(rows or len(each), vocab)
    for i, params in enumerate(each):
        state = set_row(state, i, row_params(**({"seed": i} | params)))
    return state


def roll(state: SamplerState, logits, rows, steps, variant=FULL):
    """`steps` tokens for each row from the same logits: i32[steps, B]. One program for any number of steps."""
    assert steps <= MOST_STEPS
    out, state = _roll(state, logits, rows, steps, variant)
    return np.asarray(out)[:steps], state


@partial(jax.jit, static_argnames="variant")
def _roll(state, logits, rows, steps, variant):
    def body(step, carry):
        out, state = carry
        tokens, *_, state = sample(logits, state, rows, variant=variant)
        return out.at[step].set(tokens), state

    out = jnp.zeros((MOST_STEPS, len(rows)), jnp.int32)
    return jax.lax.fori_loop(0, steps, body, (out, state))
