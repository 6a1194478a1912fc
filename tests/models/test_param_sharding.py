"""Logical axes, and heads padded with zeros so that a mesh divides them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from models.attention import dense_attend
from models.fp8_weights import with_fp8_weights
from models.gpt_oss import gpt_oss_fields
from models.params import abstract_params, map_specs, num_parameters, param_specs
from models.sharding import (
    LOGICAL_AXES,
    TENSOR_PARALLEL,
    AxisRules,
    pad_heads,
    param_shardings,
    tensor_mesh,
)
from models.testing import random_params, tiny_config, tiny_gpt_oss_config
from models.transformer import forward
from tests.simulated import on_simulated_devices

FP8_SPECS = {  # of codes and scales
    "qkv": (PartitionSpec("tensor"), PartitionSpec("tensor")),
    "attn_out": (PartitionSpec(None, "tensor"), PartitionSpec()),
    "expert_gate_up": (PartitionSpec(None, None, "tensor"), PartitionSpec(None, None, "tensor")),
    "expert_down": (PartitionSpec(None, None, None, "tensor"), PartitionSpec()),
}
TOKENS = jnp.asarray([9, 50, 200, 7, 7, 130, 61, 8, 255, 31], jnp.int32)


def abstract_mesh(size, axis):
    return AbstractMesh((size,), (axis,), axis_types=(AxisType.Auto,))


def logits_of(params, config):
    positions = jnp.arange(len(TOKENS), dtype=jnp.int32)
    return jax.jit(lambda p: forward(p, config, TOKENS, positions, dense_attend(positions), None)[0])(params)


def test_every_axis_has_a_known_name():
    configs = tiny_config(), tiny_gpt_oss_config(expert_size=64, experts_mxfp4=True)
    axes = {axis for config in configs for spec in jax.tree.leaves(param_specs(config)) for axis in spec.axes}
    assert axes - {None} == set(LOGICAL_AXES)


def test_rules_give_partition_specs():
    rules = AxisRules.of(heads="x", mlp="y")
    assert rules.spec(("heads", "head_dim", "embed")) == PartitionSpec("x")
    assert rules.spec((None, "mlp")) == PartitionSpec(None, "y")
    assert hash(rules) == hash(AxisRules.of(mlp="y", heads="x"))
    with pytest.raises(ValueError, match="one mesh axis twice"):
        AxisRules.of(heads="x", embed="x").spec(("heads", "embed"))


def test_one_error_for_all_axes_that_do_not_divide():
    config = tiny_config(num_heads=9, num_kv_heads=3, intermediate_size=130)
    mesh = abstract_mesh(4, "tensor")
    with pytest.raises(ValueError, match=r"heads = 9 .*; mlp = 130 .*; kv_heads = 3 .*pad_heads"):
        param_shardings(config, mesh, TENSOR_PARALLEL)
    with pytest.raises(ValueError, match=r"mesh axis 'tensor' not in mesh \('data',\)"):
        param_shardings(config, abstract_mesh(4, "data"), TENSOR_PARALLEL)
    explicit = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="expected Auto"):
        param_shardings(tiny_config(), explicit, TENSOR_PARALLEL)
    shardings = param_shardings(config, mesh, AxisRules())
    assert all(s.spec == PartitionSpec() for s in jax.tree.leaves(shardings))


def test_a_share_of_weights_in_fp8_is_whole_tiles():
    mesh = abstract_mesh(2, "tensor")
    with pytest.raises(ValueError, match=r"sharded so: mlp of FP8 weights = 192 is not a multiple of 64 x 2"):
        param_shardings(with_fp8_weights(tiny_config(intermediate_size=192)), mesh)
    config = tiny_config(num_experts=6, experts_per_token=2, expert_size=256)
    layer = param_shardings(with_fp8_weights(config), mesh)["layers"][1]
    specs = {name: tuple(place.spec for place in layer[name]) for name in FP8_SPECS}
    assert specs == FP8_SPECS


def test_a_device_has_its_part_of_all_but_the_norms():
    config = tiny_config()
    shardings = param_shardings(config, abstract_mesh(4, "tensor"))
    shares = jax.tree.map(
        lambda x, s: math.prod(s.shard_shape(x.shape)), abstract_params(config, np.float32), shardings
    )
    whole, norms = num_parameters(config), (2 * config.num_layers + 1) * config.hidden_size
    assert sum(jax.tree.leaves(shares)) == (whole - norms) // 4 + norms


def test_padding_nine_over_three_to_twenty_four_over_eight():
    config = tiny_config(num_heads=9, num_kv_heads=3, qkv_bias=True, qk_norm=True, attention_sinks=True)
    params = random_params(config)
    padded, padded_config = pad_heads(params, config, 24, 8)
    assert (padded_config.num_heads, padded_config.num_kv_heads, padded_config.group_size) == (24, 8, 3)
    shapes = map_specs(lambda spec: spec.shape, param_specs(padded_config))
    assert jax.tree.map(lambda x: x.shape, padded) == shapes
    # The zeros are added last, so only the blocking of the sums can differ: a few units in the last place.
    np.testing.assert_allclose(logits_of(padded, padded_config), logits_of(params, config), atol=2e-5)


@pytest.mark.parametrize(("K", "G", "new_k", "new_g"), [(1, 1, 1, 3), (3, 2, 4, 3), (2, 2, 2, 2)])
def test_padding_keeps_the_logits(K, G, new_k, new_g):
    config = tiny_config(num_heads=K * G, num_kv_heads=K, num_layers=2)
    params = random_params(config)
    padded, padded_config = pad_heads(params, config, new_k * new_g, new_k)
    np.testing.assert_allclose(logits_of(padded, padded_config), logits_of(params, config), atol=2e-5)


def test_padding_cannot_remove_heads():
    config = tiny_config(num_heads=8, num_kv_heads=4)
    for heads in ((4, 4), (6, 3), (8, 8)):
        with pytest.raises(ValueError, match="cannot remove heads"):
            pad_heads(random_params(config), config, *heads)
    with pytest.raises(ValueError, match="multiple"):
        pad_heads(random_params(config), config, 9, 4)


def check_sharded_logits() -> None:
    """Run in a process with 8 simulated devices: padded and sharded over 2, 4 and 8, the logits are the same."""
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_size": 48, "dense_layers": (0,)}
    config = tiny_config(
        num_layers=2, num_heads=9, num_kv_heads=3, qk_norm=True, **experts, **gpt_oss_fields(1.5)
    )
    params = random_params(config)
    expected = np.asarray(logits_of(params, config))
    padded, padded_config = pad_heads(params, config, 24, 8)
    for size in (2, 4, 8):
        sharded = jax.device_put(padded, param_shardings(padded_config, tensor_mesh(size)))
        qkv = sharded["layers"][0]["qkv"]
        assert qkv.sharding.shard_shape(qkv.shape) == (64, 8 // size, 5, 16)
        layer = sharded["layers"][1]
        shards = {name: x.sharding.shard_shape(x.shape) for name, x in layer.items()}
        assert shards["expert_down"] == (4, 48 // size, 64)
        assert shards["expert_gate_up_bias"] == (4, 2, 48 // size) and shards["sinks"] == (8 // size, 3)
        np.testing.assert_allclose(logits_of(sharded, padded_config), expected, atol=2e-5)


def test_sharded_logits_on_simulated_devices():
    on_simulated_devices(__file__, "check_sharded_logits", 8)
