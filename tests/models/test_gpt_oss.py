"""GPT-OSS: what it adds to the model is used, and its checkpoints are read in all their forms."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.attention import dense_attend
from models.config import UnsupportedModelError
from models.experts import expert_mlp
from models.registry import load_model
from models.rope_scaling import RopeScaling
from models.testing import random_params, reference_decode, tiny_gpt_oss_config, tiny_tokenizer
from models.transformer import forward
from models.weights import WeightMismatchError, assemble_params
from tests.models.checkpoints import GOLDEN, Tensors, golden_tensors, in_mxfp4, same
from tests.one_program import in_one


@pytest.fixture(scope="module")
def golden():
    return golden_tensors("tiny_gpt_oss")


def logits_of(params, config, tokens):
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    attend = dense_attend(positions, config=config)
    return np.asarray(forward(params, config, tokens, positions, attend, None)[0])


LEFT_OUT = {
    "sinks": {"attention_sinks": False},
    "bias of attention": {"attn_out_bias": False},
    "biases of queries, keys and values": {"qkv_bias": False},
    "window": {"sliding_window": 96},
    "limit and slope": {"swiglu_limit": None},
    "ends of the blend": {"rope_scaling": RopeScaling.yarn(4.0, 64, beta_fast=8.0)},
    "limit": {"swiglu_limit": 1e9},
    "weights of the chosen": {"normalize_experts": False},
}


@pytest.mark.parametrize("changes", LEFT_OUT.values(), ids=LEFT_OUT)
def test_all_of_it_changes_the_golden_logits(golden, changes):
    """Guards against a golden file in which it would not matter."""
    source, config = golden
    stored = np.load(GOLDEN / "tiny_gpt_oss.npz")
    params = assemble_params(source, config, jnp.float32, progress=False)
    logits = logits_of(params, config.replace(**changes), stored["tokens"])
    assert np.abs(logits - stored["logits"]).max() > 0.1


@pytest.mark.parametrize("name", ["router_bias", "expert_gate_up_bias", "expert_down_bias"])
def test_biases_of_experts_change_the_golden_logits(golden, name):
    source, config = golden
    stored = np.load(GOLDEN / "tiny_gpt_oss.npz")
    params = assemble_params(source, config, jnp.float32, progress=False)
    layers = tuple(layer | {name: jnp.zeros_like(layer[name])} for layer in params["layers"])
    logits = logits_of(params | {"layers": layers}, config, stored["tokens"])
    assert np.abs(logits - stored["logits"]).max() > 0.1


def test_mlp_is_the_weighted_sum_of_the_chosen():
    tokens = 40
    config = tiny_gpt_oss_config(num_experts=6)
    layer = {name: np.asarray(x, np.float64) for name, x in random_params(config, 1)["layers"][0].items()}
    layer |= {name: x * 5 for name, x in layer.items() if name.endswith("_bias")}
    x = np.random.default_rng(2).standard_normal((tokens, 64)) * 2
    want = np.zeros((tokens, 64))
    for t, row in enumerate(x):
        logits = row @ layer["router"] + layer["router_bias"]
        chosen = np.argsort(-logits)[:2]
        weights = np.exp(logits[chosen] - logits[chosen].max())
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            sums = np.einsum("e,epf->pf", row, layer["expert_gate_up"][expert])
            gate, up = sums + layer["expert_gate_up_bias"][expert]
            gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
            h = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            want[t] += weight * (h @ layer["expert_down"][expert] + layer["expert_down_bias"][expert])
    params = {name: jnp.asarray(x, jnp.float32) for name, x in layer.items()}
    got = in_one(expert_mlp, params, jnp.asarray(x, jnp.float32), config=config)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_decoding_one_by_one_gives_the_logits_of_all_at_once():
    config = tiny_gpt_oss_config(num_layers=2, sliding_layers=(0,))
    params = random_params(config)
    prompt = np.random.default_rng(0).integers(8, 264, 40).tolist()
    new, logits = reference_decode(params, config, prompt, 3)
    together = logits_of(params, config, prompt + new[:-1])
    np.testing.assert_allclose(logits, together[len(prompt) - 1 :], atol=1e-4)


def test_logits_in_bfloat16_are_near(golden):
    source, config = golden
    stored = np.load(GOLDEN / "tiny_gpt_oss.npz")
    params = assemble_params(source, config, jnp.bfloat16, progress=False)
    logits = logits_of(params, config, stored["tokens"])
    error = np.sqrt(np.mean((logits - stored["logits"]) ** 2))
    assert error < 0.2 * stored["logits"].std()  # a token may go to another expert


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_checkpoints_are_dequantised(golden, dtype):
    source, config = golden
    packed, plain = in_mxfp4(source.tensors)
    assert sum(name.endswith("_blocks") for name in packed) == 6
    want = assemble_params(Tensors(plain), config, dtype, progress=False)
    assert same(assemble_params(Tensors(packed), config, dtype, progress=False), want)
    stored = assemble_params(source, config, dtype, progress=False)
    assert not same(want, stored)  # it was rounded, and not by much
    near = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), want, stored)
    assert max(jax.tree.leaves(near)) < 0.4


def test_layers_that_are_not_quantised(golden):
    """As `modules_to_not_convert` of the configuration allows."""
    source, config = golden
    packed, plain = in_mxfp4(source.tensors)
    some = {
        name: x
        for name, x in (packed | plain).items()
        if not name.endswith(("_blocks", "_scales", "gate_up_proj", "down_proj"))
        or (name in plain) == (".1." in name)
    }
    want = assemble_params(Tensors(plain), config, jnp.float32, progress=False)
    assert same(assemble_params(Tensors(some), config, jnp.float32, progress=False), want)


def test_mismatches_have_the_names_of_the_checkpoint(golden):
    source, config = golden
    packed, plain = in_mxfp4(source.tensors)
    experts = "model.layers.1.mlp.experts"
    del packed[f"{experts}.down_proj_scales"]
    packed[f"{experts}.gate_up_proj_blocks"] = packed[f"{experts}.gate_up_proj_blocks"][:, :, :, :8]
    del packed["model.layers.2.self_attn.sinks"]
    packed["model.layers.2.mlp.router.scale"] = np.zeros(4, np.float32)
    with pytest.raises(WeightMismatchError) as caught:
        assemble_params(Tensors(packed), config, jnp.float32, progress=False)
    assert str(caught.value).splitlines()[1:] == [
        f"  {experts}.gate_up_proj_blocks: expected shape (4, 128, 1, 16), found (4, 128, 1, 8)",
        "  model.layers.2.self_attn.sinks: missing (expected shape (4,))",
        f"  {experts}.down_proj_scales: missing (expected shape (4, 32, 2))",
        "  model.layers.2.mlp.router.scale: unexpected (shape (4,))",
    ]
    del plain[f"{experts}.gate_up_proj"]
    with pytest.raises(WeightMismatchError, match=r"gate_up_proj: missing \(expected shape \(4, 32, 128\)\)"):
        assemble_params(Tensors(plain), config, jnp.float32, progress=False)


@pytest.fixture
def published(golden, tmp_path):
    """A directory like openai/gpt-oss-20b."""
    directory = tmp_path / "tiny"
    shutil.copytree(GOLDEN / "tiny_gpt_oss", directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(in_mxfp4(golden[0].tensors)[0], directory / "model.safetensors")
    tiny_tokenizer().save(str(directory))
    return directory


def test_load_model_reads_a_published_directory(published, golden):
    loaded = load_model(published, dtype=jnp.bfloat16, progress=False)
    plain = Tensors(in_mxfp4(golden[0].tensors)[1])
    assert same(loaded.params, assemble_params(plain, golden[1], jnp.bfloat16, progress=False))
    assert loaded.config.attention_sinks and loaded.config.sliding_layers == (0, 2)


def test_float16_is_refused(published):
    with pytest.raises(UnsupportedModelError, match="GPT-OSS go beyond the range of float16, take bfloat16"):
        load_model(published, dtype=jnp.float16, progress=False)
