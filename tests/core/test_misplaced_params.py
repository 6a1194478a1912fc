"""Parameters and plans of another model are told by name, and whatever is the model's own passes."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import tangram_jax as tj
from models.fp8_weights import with_fp8_weights
from models.params import abstract_params, check_params, init_params
from models.testing import tiny_config, tiny_gemma_config, tiny_gpt_oss_config
from tests.core.stepping import CONFIG, PARAMS, SNAPKV, new_cache, plan_of, random_tokens

OTHERS = {
    "more layers": ({"num_layers": 4}, "4 layers, expected 2"),
    "fewer layers": ({"num_layers": 1}, "1 layers, expected 2"),
    "vocabulary": ({"vocab_size": 100}, r"embed of shape \[100, 64\], expected \[264, 64\]"),
    "width": ({"hidden_size": 32}, r"embed of shape \[264, 32\], expected \[264, 64\]"),
    "head": ({"tie_embeddings": False}, "params with lm_head"),
    "layers": ({"qk_norm": True, "qkv_bias": True}, "layer 0 with k_norm, q_norm, qkv_bias"),
}
TAKE = "take both of one model, as load_model gives them"


@pytest.mark.parametrize("what", OTHERS)
def test_parameters_of_another_model(what):
    changes, message = OTHERS[what]
    params, plan = init_params(CONFIG.replace(**changes), jax.random.key(0)), plan_of("1.0", 2, 8)
    step = jax.jit(tj.decode_step, static_argnums=(1, 2))
    for run in (tj.decode_step, step):
        with pytest.raises(ValueError, match=f"params are not those of model tiny: {message}: {TAKE}"):
            run(params, CONFIG, plan, new_cache(plan), rows=np.array([0]), tokens=np.array([9]))


def test_all_that_differs_is_told():
    changes = {"num_layers": 4, "vocab_size": 300, "tie_embeddings": False, "qk_norm": True}
    with pytest.raises(ValueError, match="not those of model tiny") as told:
        check_params(PARAMS, CONFIG.replace(**changes))
    for part in (
        "params without lm_head; 2 layers, expected 4; layer 0 without k_norm, q_norm;",
        "embed of shape [264, 64], expected [300, 64]: ",
    ):
        assert part in str(told.value)


@pytest.mark.parametrize("params", [None, CONFIG])
def test_what_are_no_parameters(params):
    plan, chunk = plan_of("1.0", 2, 8), tj.Chunk(1, random_tokens(8), 8)
    with pytest.raises(TypeError, match=f"params must be a dict, got {type(params).__name__}: write params"):
        tj.step(params, CONFIG, plan, SNAPKV, new_cache(plan), chunk, None)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(tie_embeddings=False, qk_norm=True, qkv_bias=True),
        tiny_gemma_config(),
        tiny_gpt_oss_config(),
        tiny_gpt_oss_config(hidden_size=128, expert_size=128, experts_mxfp4=True),
        with_fp8_weights(tiny_config(hidden_size=128, intermediate_size=256, head_dim=32)),
    ],
    ids=["llama", "gemma", "gpt-oss", "mxfp4", "fp8"],
)
def test_the_model_s_own_pass(config):
    params = abstract_params(config, np.float32)
    check_params(params, config)
    check_params(params | {"links": None, "layers": [*params["layers"]]}, config)


def test_a_share_may_have_a_part_of_the_vocabulary():
    of_device = CONFIG.replace(tensor_axis="tensor")
    for rows in (264, 132, 66):
        check_params(PARAMS | {"embed": np.zeros((rows, 64))}, of_device)
    for shape in ((100, 64), (0, 64), (132, 32), (132,)):
        with pytest.raises(ValueError, match=r"embed of shape .*, expected \[264, 64\]"):
            check_params(PARAMS | {"embed": np.zeros(shape)}, of_device)


def test_devices_of_a_plan_for_another_model():
    mesh = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    with pytest.raises(
        ValueError, match=r"the profile has \(2, 4\) \(layers, KV heads\), model tiny has \(4, 4\)"
    ):
        tj.TensorParallel.of(tiny_config(), plan_of("1.0", 2, 8), 2, mesh=mesh)
