"""Gemma 3: what it adds to a Llama, against golden files written by transformers (`make_golden.py`)."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models.transformer
from models.attention import dense_attend
from models.config import UnsupportedModelError, config_from_huggingface
from models.huggingface import ModelNotFoundError
from models.params import init_params
from models.registry import load_model
from models.rope import rope_frequencies, rope_tables
from models.rope_scaling import RopeScaling
from models.sharding import TENSOR_PARALLEL, AxisRules, pad_heads, param_shardings, tensor_mesh
from models.testing import random_params, reference_decode, tiny_gemma_config, tiny_tokenizer
from models.transformer import forward
from models.weights import WeightMismatchError, assemble_params
from pallas_kernels.norms import rms_norm
from tests.models.checkpoints import GOLDEN, Tensors, golden_tensors

IMAGES = json.loads((GOLDEN / "gemma3_images.json").read_text())


@pytest.fixture(scope="module")
def gemma():
    """(tensors, config, parameters, golden tokens and logits)"""
    source, config = golden_tensors("tiny_gemma3")
    params = assemble_params(source, config, jnp.float32, progress=False)
    return source, config, params, np.load(GOLDEN / "tiny_gemma3.npz")


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


# --- the model ----------------------------------------------------------------------------------------------------


def test_embeddings_are_scaled_by_a_rounded_factor(monkeypatch):
    """As the released weights were trained: the factor has the embeddings' dtype, 6.928 is 6.9375 in bfloat16."""
    config = tiny_gemma_config(embed_scale=48**0.5)
    params = random_params(config, dtype=jnp.bfloat16)
    seen, original = [], models.transformer._attention_inputs
    monkeypatch.setattr(
        models.transformer, "_attention_inputs", lambda p, x, *rest: seen.append(x) or original(p, x, *rest)
    )
    tokens = jnp.arange(20)
    forward(params, config, tokens, tokens, dense_attend(tokens, config=config), None)
    embedded = np.asarray(params["embed"][:20], np.float32)
    np.testing.assert_array_equal(seen[0], (embedded * 6.9375).astype(jnp.bfloat16))
    assert (seen[0] != (embedded * 48**0.5).astype(jnp.bfloat16)).any()


def test_norm_adds_the_offset_in_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.bfloat16)
    weight = jnp.full(8, 0.001, jnp.bfloat16)  # 1 + it is 1 in bfloat16
    small = np.asarray(rms_norm(x.astype(jnp.float32), weight, 1e-6, 1.0))
    none = np.asarray(rms_norm(x.astype(jnp.float32), weight * 0, 1e-6, 1.0))
    np.testing.assert_allclose(small / none, 1.001, rtol=1e-5)
    assert rms_norm(x, weight, 1e-6, 1.0).dtype == jnp.bfloat16


def test_norms_without_an_offset_add_nothing():
    """Llama's norms have no operation for Gemma's offset."""
    x, weight = jnp.ones((3, 8)), jnp.ones(8)
    plain = str(jax.make_jaxpr(lambda x, w: rms_norm(x, w, 1e-6))(x, weight))
    gemma = str(jax.make_jaxpr(lambda x, w: rms_norm(x, w, 1e-6, 1.0))(x, weight))
    assert (plain.count(" add "), gemma.count(" add ")) == (1, 2)  # one is epsilon's


def test_initial_norms_multiply_by_one():
    params = init_params(tiny_gemma_config(), jax.random.key(0))
    norms = {name: x for name, x in params["layers"][0].items() if "norm" in name}
    assert len(norms) == 6 and not any(x.any() for x in norms.values()) and not params["final_norm"].any()


def test_tables_of_both_types():
    config = tiny_gemma_config()
    positions = jnp.asarray([0, 1, 3000])
    full, _ = rope_tables(positions, config)
    sliding, _ = rope_tables(positions, config, sliding=True)
    exponents = np.arange(8) / 8
    angles = np.asarray(positions)[:, None] * 10000.0**-exponents
    np.testing.assert_allclose(full, np.cos(angles / 8), atol=1e-3)
    np.testing.assert_allclose(sliding, np.cos(np.asarray(positions)[:, None] * 500.0**-exponents), atol=1e-3)
    # Without a base of their own the sliding layers turn as the others, scaling included.
    same = config.replace(sliding_rope_theta=None)
    np.testing.assert_array_equal(rope_frequencies(same, sliding=True), rope_frequencies(same))


def test_each_table_is_computed_once():
    config = tiny_gemma_config()
    tokens = jnp.arange(4)

    def cosines(config):
        params = init_params(config, jax.random.key(0))
        attend = dense_attend(tokens, config=config)
        return str(
            jax.make_jaxpr(lambda p: forward(p, config, tokens, tokens, attend, None)[0])(params)
        ).count(" cos ")

    assert cosines(config) == 2
    assert cosines(config.replace(sliding_rope_theta=None)) == 1
    assert cosines(config.replace(sliding_layers=(), sliding_window=None)) == 1


def test_tokens_before_the_window_do_not_reach_a_sliding_layer():
    """One sliding layer and one full one; the first layer's output is what the window decides."""
    config = tiny_gemma_config(num_layers=2, sliding_layers=(0,), sliding_window=4)
    seen = {}

    def outputs(first_token):
        tokens = jnp.arange(8).at[0].set(first_token)
        dense = dense_attend(jnp.arange(8), config=config)

        def attend(state, layer, q, k, v):
            out, state = dense(state, layer, q, k, v)
            seen[layer] = np.asarray(out)
            return out, state

        forward(random_params(config), config, tokens, jnp.arange(8), attend, None)
        return dict(seen)

    changed = [
        [bool(np.abs(x - y).max() > 1e-6) for x, y in zip(a, b, strict=True)]
        for a, b in zip(outputs(5).values(), outputs(6).values(), strict=True)
    ]
    assert changed == [[True] * 4 + [False] * 4, [True] * 8]


def test_decoding_with_a_cache_agrees_with_the_golden_logits(gemma):
    """Also past the window, token by token."""
    _, config, params, golden = gemma
    tokens, start = golden["tokens"].tolist(), 60
    expected = dense_logits(params, config, tokens[:start])[-1]
    ids, logits = reference_decode(params, config, tokens[:start], 8)
    np.testing.assert_allclose(logits[0], golden["logits"][start - 1], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(logits[0], expected, rtol=1e-3, atol=1e-3)
    again = dense_logits(params, config, tokens[:start] + ids)
    np.testing.assert_allclose(logits, again[start - 1 : -1], rtol=1e-3, atol=1e-3)


def test_padded_heads_give_the_same_logits(gemma):
    _, config, params, golden = gemma
    padded, padded_config = pad_heads(params, config, 12, 4)
    logits = dense_logits(padded, padded_config, golden["tokens"])
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-3, atol=1e-3)


def test_shardings_cover_every_leaf(gemma):
    _, config, params, _ = gemma
    for rules in (TENSOR_PARALLEL, AxisRules()):
        shardings = param_shardings(config, tensor_mesh(1), rules)
        assert jax.tree.structure(shardings) == jax.tree.structure(params)


# --- checkpoints --------------------------------------------------------------------------------------------------


def renamed(gemma, shapes):
    """The golden weights under the names of a model of text and images, whose other tensors are zeros."""

    def text_name(name):
        return name.replace("model.language_model.", "model.").replace("language_model.model.", "model.")

    tensors = gemma[0].tensors
    assert sum(text_name(name) in tensors for name in shapes) == len(tensors)
    return Tensors({name: tensors.get(text_name(name), np.zeros(shape)) for name, shape in shapes.items()})


@pytest.mark.parametrize("layout", ["saved", "modules"])
def test_models_of_text_and_images(gemma, layout):
    source = renamed(gemma, IMAGES[layout])
    assert any("vision" in name for name in source.shapes)
    config = config_from_huggingface(IMAGES["config"], "x")
    assert config.eos_token_ids == (1, 106)  # those of the whole model
    assert config.replace(name="tiny_gemma3", eos_token_ids=(2,)) == gemma[1]
    params = assemble_params(source, config, jnp.float32, progress=False)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, gemma[2]))


def test_mismatches_of_models_of_text_and_images(gemma):
    source, config = renamed(gemma, IMAGES["saved"]), gemma[1]
    del source.tensors["language_model.model.layers.1.post_feedforward_layernorm.weight"]
    source.tensors["language_model.model.layers.1.ffn.weight"] = np.zeros(3)
    source = Tensors(source.tensors | {"language_model.lm_head.weight": np.zeros((128, 32))})  # tied: known
    with pytest.raises(WeightMismatchError, match="2 mismatches") as caught:
        assemble_params(source, config, jnp.float32, progress=False)
    assert "model.layers.1.post_feedforward_layernorm.weight: missing" in str(caught.value)
    assert "model.layers.1.ffn.weight: unexpected" in str(caught.value)
    twice = Tensors(gemma[0].tensors | {"language_model.model.norm.weight": np.zeros(32)})
    with pytest.raises(WeightMismatchError, match=r"model\.norm\.weight .* are the same tensor"):
        assemble_params(twice, config, jnp.float32, progress=False)


def test_a_directory_of_a_model_of_text_and_images(gemma, tmp_path):
    shutil.copytree(GOLDEN / "tiny_gemma3", tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(IMAGES["config"]))
    tiny_tokenizer().save(str(tmp_path / "m"))
    loaded = load_model(tmp_path / "m", progress=False, overrides={"rope_scaling": {"factor": 2.0}})
    assert loaded.config.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert (loaded.config.rope_theta, loaded.config.sliding_rope_theta) == (500.0, 50.0)
    with pytest.raises(UnsupportedModelError, match="float16, take bfloat16 or float32"):
        load_model(tmp_path / "m", dtype="float16", progress=False)


def test_short_names_and_the_terms_of_the_makers(monkeypatch, tmp_path):
    from huggingface_hub.errors import GatedRepoError

    asked = []

    def refuse(repo, file):
        asked.append(repo)
        raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ModelNotFoundError, match=r"accept their terms.*huggingface.co/google/gemma-3-12b-it"):
        load_model("Gemma-3-12B", progress=False)
    assert asked == ["google/gemma-3-12b-it"]

    shutil.copytree(GOLDEN / "tiny_gemma3", tmp_path / "m")
    tiny_tokenizer().save(str(tmp_path / "m"))
    monkeypatch.setattr(
        "models.registry.download", lambda repo, **options: asked.append(repo) or tmp_path / "m"
    )
    assert (
        load_model("gemma-3-1b", progress=False).name == "gemma-3-1b" and asked[-1] == "google/gemma-3-1b-it"
    )
