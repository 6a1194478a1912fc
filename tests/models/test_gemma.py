"""Gemma 3: what it adds to a Llama, against golden files written by transformers (`make_golden.py`)."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import dense_attend
from models.huggingface import HuggingFaceDirectory
from models.rope_scaling import RopeScaling
from models.transformer import forward
from models.weights import assemble_params
from tests.models.checkpoints import GOLDEN, Tensors

HF_CONFIG = json.loads((GOLDEN / "tiny_gemma3" / "config.json").read_text())
IMAGES = json.loads((GOLDEN / "gemma3_images.json").read_text())


@pytest.fixture(scope="module")
def gemma():
    """(tensors, config, parameters, golden tokens and logits)"""
    directory = HuggingFaceDirectory(GOLDEN / "tiny_gemma3")
    directory.open()
    source = Tensors({name: directory.read(name) for name in directory.shapes})
    params = assemble_params(source, directory.config, jnp.float32, progress=False)
    return source, directory.config, params, np.load(GOLDEN / "tiny_gemma3.npz")


def dense_logits(params, config, tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return np.asarray(
        forward(params, config, tokens, positions, dense_attend(positions, config=config), None)[0]
    )


def test_configuration_of_the_golden_model(gemma):
    config = gemma[1]
    assert (config.sliding_layers, config.full_layers, config.sliding_window) == ((0, 1, 3, 4), (2, 5), 24)
    assert (config.rope_theta, config.sliding_rope_theta) == (500.0, 50.0)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert config.attention_scale == pytest.approx(24**-0.5) and config.head_dim == 16
    assert (config.norm_offset, config.post_norms, config.gelu, config.qk_norm) == (1.0, True, True, True)
    assert config.embed_scale == pytest.approx(32**0.5) and config.tie_embeddings


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 23},
        {"sliding_window": 25},
        {"sliding_layers": (0, 1, 3)},
        {"sliding_rope_theta": None},
        {"rope_scaling": None},
        {"query_scale": None},
        {"norm_offset": 0.0},
        {"embed_scale": 1.0},
        {"gelu": False},
        {"post_norms": False},
        {"qk_norm": False},
    ],
)
def test_every_field_matters_to_the_golden_logits(gemma, changes):
    """Guards against golden files that would agree without one of them."""
    _, config, params, golden = gemma
    logits = dense_logits(params, config.replace(**changes), golden["tokens"])
    assert np.abs(logits - golden["logits"]).max() > 0.01


def test_logits_in_bfloat16_are_near(gemma):
    source, config, _, golden = gemma
    params = assemble_params(source, config, jnp.bfloat16, progress=False)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    logits = dense_logits(params, config, golden["tokens"])
    assert np.sqrt(np.mean((logits - golden["logits"]) ** 2)) < 0.1 * golden["logits"].std()
