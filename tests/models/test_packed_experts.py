"""Experts that stay in MXFP4: packed from both kinds of files, and what comes out is what it is dequantised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import packed_experts
from models.mxfp4 import Mxfp4, dequantize_into
from models.packed_experts import kept_packed, pack_leaf
from models.params import abstract_params, init_params, num_parameters
from models.registry import load_model
from models.testing import tiny_gpt_oss_config
from models.weights import assemble_params, experts_in_mxfp4
from pallas_kernels.expert_products import mxfp4
from tests.models.checkpoints import Tensors, in_mxfp4, random_tensors
from tests.models.gguf_files import logits_of, write_gguf
from tests.models.test_gguf_gpt_oss import FIELDS

CONFIG = tiny_gpt_oss_config(num_layers=2, sliding_layers=(0,), expert_size=128, swiglu_limit=7.0)
GGUF = FIELDS | {"ints": FIELDS["ints"] | {"gpt-oss.expert_feed_forward_length": 128}, "mxfp4": True}


@pytest.fixture
def supported(monkeypatch):
    """As on a Hopper GPU. The products are XLA's all the same."""
    monkeypatch.setattr(packed_experts, "_obstacle", lambda dtype: None)


def random_mxfp4(*shape: int) -> Mxfp4:
    rng = np.random.default_rng(sum(shape))
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32, 16)).astype(np.uint8)
    return Mxfp4(blocks, rng.integers(100, 129, blocks.shape[:-1]).astype(np.uint8))


def dequantised(weights: Mxfp4) -> np.ndarray:
    *outer, blocks, _ = weights.blocks.shape
    out = np.empty((*outer, blocks * 32), np.float32)
    dequantize_into(out, *weights)
    return out


def test_packing_keeps_every_value():
    """Of gate and up in two pieces, and as one whose rows are theirs in turn."""
    gate, up = (random_mxfp4(3, 128, size) for size in (192, 192))
    up = Mxfp4(up.blocks[::-1], up.scales[::-1])
    packed = pack_leaf([gate, up], (3, 2, 2, 3, 17, 32))
    assert packed.shape == mxfp4.packed_shape(3, 2, 128, 192)
    want = np.stack([dequantised(gate), dequantised(up)], axis=1).swapaxes(2, 3)  # [X, 2, depth, columns]
    np.testing.assert_array_equal(np.asarray(mxfp4.unpack(packed), np.float32), want)
    together = Mxfp4(
        *(np.stack([a, b], axis=2).reshape(3, 256, *a.shape[2:]) for a, b in zip(gate, up, strict=True))
    )
    np.testing.assert_array_equal(pack_leaf([together], packed.shape), packed)


def test_a_scale_that_the_kernel_does_not_take():
    weights = random_mxfp4(1, 64, 64)
    weights.scales[0, 3, 1] = 129
    with pytest.raises(
        NotImplementedError, match=r"MXFP4 scale of 2 \*\* 2: the kernel takes up to 2 \*\* 1"
    ):
        pack_leaf([weights], (1, 1, 1, 1, 17, 32))


def test_such_a_scale_in_a_file(supported, monkeypatch, tmp_path, cache, caplog):
    """It is loaded all the same."""
    monkeypatch.setattr(mxfp4, "MAX_SCALE", 90)
    source, config = Tensors(random_tensors(CONFIG)), CONFIG
    path = write_gguf(tmp_path / "tiny.gguf", source, config, **GGUF)
    assert not load_model(path, dtype="bfloat16", progress=False, keep_mxfp4=True).config.experts_mxfp4
    assert "The experts become bfloat16, of four times their size: an MXFP4 scale" in caplog.text


def test_from_hugging_face(supported):
    packed, plain = (Tensors(tensors) for tensors in in_mxfp4(random_tensors(CONFIG)))
    assert experts_in_mxfp4(packed, CONFIG, "huggingface")
    assert not experts_in_mxfp4(plain, CONFIG, "huggingface")
    config = kept_packed(CONFIG, jnp.bfloat16)
    params = assemble_params(packed, config, jnp.bfloat16, progress=False)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), abstract_params(config, jnp.bfloat16))
    assert params["layers"][0]["expert_down"].dtype == jnp.int32
    dequantised = assemble_params(plain, CONFIG, jnp.bfloat16, progress=False)
    np.testing.assert_array_equal(logits_of(params, config), logits_of(dequantised, CONFIG))


def test_from_gguf(supported, tmp_path, cache):
    source, config = Tensors(random_tensors(CONFIG)), CONFIG
    path = write_gguf(tmp_path / "tiny.gguf", source, config, **GGUF)
    plain = load_model(path, dtype="bfloat16", progress=False)
    assert not plain.config.experts_mxfp4
    for _ in range(2):  # the second time from the cache
        packed = load_model(path, dtype="bfloat16", progress=False, keep_mxfp4=True)
        assert packed.config == plain.config.replace(experts_mxfp4=True)
        want = logits_of(plain.params, plain.config)
        np.testing.assert_array_equal(logits_of(packed.params, packed.config), want)


def test_each_device_has_equally_many(supported):
    assert kept_packed(CONFIG, jnp.bfloat16, 2).experts_mxfp4
    assert not kept_packed(CONFIG, jnp.bfloat16, 3).experts_mxfp4


def test_without_a_kernel_they_are_dequantised():
    assert kept_packed(CONFIG, jnp.bfloat16) is CONFIG


def test_sizes_that_the_kernel_does_not_take(supported):
    config = CONFIG.replace(expert_size=96)
    assert kept_packed(config, jnp.bfloat16) is config


def test_random_weights_have_the_deviation_of_others():
    config = CONFIG.replace(experts_mxfp4=True)
    assert num_parameters(config) == num_parameters(CONFIG)
    leaf = init_params(config, jax.random.key(0), jnp.bfloat16)["layers"][0]["expert_gate_up"]
    deviation = float(np.asarray(mxfp4.unpack(leaf), np.float32).std())
    assert 0.7 < deviation * 64**0.5 < 1.42
