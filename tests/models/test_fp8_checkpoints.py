"""Checkpoints as FP8 weights: what is in FP8 already stays as it is where that can be."""

import json
import logging

import jax
import ml_dtypes
import numpy as np
import pytest

from models.fp8_weights import dequantised, in_fp8, quantised, with_fp8_weights
from models.params import param_bytes, param_specs
from models.quantised import DequantisedTensors
from models.registry import QUANTIZATIONS, load_model
from models.testing import tiny_tokenizer
from models.weights import assemble_params
from pallas_kernels import fp8_products as fp8
from tests.models.checkpoints import Tensors, in_mxfp4, random_tensors
from tests.models.gguf_files import write_gguf
from tests.models.quantised_files import blocks, write_safetensors
from tests.models.quantised_models import compressed, scheme
from tests.models.test_fp8_weights import CONFIG, CONFIGS, HOW, PRODUCTS, same

FORMS = {
    "channels": lambda module, weight: blocks(module, weight, (1, None)),
    "channels, scales of 16 bits": lambda module, weight: blocks(module, weight, (1, None), scale_dtype=ml_dtypes.bfloat16),
    "whole": lambda module, weight: blocks(module, weight, (None, None)),
    "blocks": lambda module, weight: blocks(module, weight, (32, 32)),
    "other floats": lambda module, weight: blocks(module, weight, (1, None), dtype=ml_dtypes.float8_e5m2),
    "one in bfloat16": lambda module, weight: (
        ({f"{module}.weight": weight.astype(ml_dtypes.bfloat16)}, weight.astype(ml_dtypes.bfloat16))
        if "k_proj" in module
        else blocks(module, weight, (1, None))
    ),
}  # fmt: skip
OWN = ("channels", "channels, scales of 16 bits", "whole")


def stored_in_fp8(form):
    """(the tensors of a checkpoint in FP8, those of what they stand for)"""
    stored, dense = {}, {}
    for name, x in random_tensors(CONFIG).items():
        stored[name] = dense[name] = x
        if name.endswith("proj.weight"):
            tensors, dense[name] = FORMS[form](name.removesuffix(".weight"), x)
            stored |= tensors
    return stored, dense


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_in_fp8(form):
    """Codes and scales stay as they are where each output has one; others become the nearest to what they stand for."""
    stored, dense = stored_in_fp8(form)
    config = with_fp8_weights(CONFIG)
    params = assemble_params(
        DequantisedTensors(Tensors(stored), HOW, config), config, "bfloat16", progress=False
    )
    plain = assemble_params(Tensors(dense), CONFIG, "float32", progress=False)
    specs = param_specs(config)["layers"]
    for number, (layer, spec) in enumerate(zip(params["layers"], specs, strict=True)):
        for name in PRODUCTS:
            wanted = plain["layers"][number][name]
            if form in OWN:
                np.testing.assert_array_equal(dequantised(layer[name], spec[name]), wanted)
            elif name == "qkv" or form != "one in bfloat16":
                assert same(layer[name], quantised(wanted, spec[name]))
        for leaf, key, part in (
            ("attn_out", "self_attn.o_proj", np.s_[:]),
            ("down", "mlp.down_proj", np.s_[:]),
            ("gate_up", "mlp.up_proj", np.s_[CONFIG.intermediate_size :]),
        ):
            tensor = f"model.layers.{number}.{key}.weight"
            own = np.asarray(fp8.unpack(layer[leaf].codes))[:, part].view(np.uint8)
            assert np.array_equal(own, stored[tensor].T.view(np.uint8)) == (form in (*OWN, "one in bfloat16"))
            if form in OWN:
                scales = stored[f"{tensor}_scale"].astype(np.float32)[:, 0]
                np.testing.assert_array_equal(layer[leaf].scales[part], np.broadcast_to(scales, own.shape[1]))


@pytest.mark.parametrize("form", ["channels", "blocks", "one in bfloat16"])
def test_checkpoints_of_experts_in_fp8(form):
    """Codes and scales of every expert by itself; "one" are all gates' here."""
    config, stored, dense = CONFIGS["experts"], {}, {}
    for name, x in random_tensors(config).items():
        stored[name] = dense[name] = x
        if ".experts." in name:
            module = name.removesuffix(".weight").replace("gate_proj", "gate_k_proj")
            tensors, dense[name] = FORMS[form](module, x)
            stored |= {key.replace("gate_k_proj", "gate_proj"): tensor for key, tensor in tensors.items()}
    config = with_fp8_weights(config)
    source = DequantisedTensors(Tensors(stored), HOW, config)
    params = assemble_params(source, config, "bfloat16", progress=False)["layers"][1]
    plain = assemble_params(Tensors(dense), CONFIGS["experts"], "float32", progress=False)["layers"][1]
    specs = param_specs(config)["layers"][1]
    for name in ("expert_gate_up", "expert_down"):
        if form == "channels" or (form, name) == ("one in bfloat16", "expert_down"):
            np.testing.assert_array_equal(dequantised(params[name], specs[name]), plain[name])
        else:
            assert same(params[name], quantised(plain[name], specs[name]))
    if form == "channels":
        found = fp8.unpack(params["expert_gate_up"].codes[3, 1]).T  # of the fourth expert's up projection
        own = stored["model.layers.1.mlp.experts.3.up_proj.weight"]
        np.testing.assert_array_equal(np.asarray(found).view(np.uint8), own.view(np.uint8))


def test_experts_in_mxfp4_that_do_not_stay_so():
    config = CONFIGS["gpt-oss"]
    packed, plain = (Tensors(tensors) for tensors in in_mxfp4(random_tensors(config)))
    found = assemble_params(packed, with_fp8_weights(config), "float32", progress=False)
    assert same(found, in_fp8(assemble_params(plain, config, "float32", progress=False), config)[0])


def write_directory(path, tensors, **more):
    names = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    contents = names | {
        "architectures": ["LlamaForCausalLM"], "head_dim": 16, "num_hidden_layers": 2, "vocab_size": CONFIG.vocab_size,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 1,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(contents | more))
    tiny_tokenizer().save(str(path))
    write_safetensors(path / "model.safetensors", tensors)
    return path


def test_from_a_directory(tmp_path):
    directory = write_directory(tmp_path, random_tensors(CONFIG))
    plain = load_model(directory, progress=False)
    found = load_model(directory, progress=False, quantization="fp8")
    assert found.config == plain.config.replace(weights_fp8=True)
    assert same(found.params, in_fp8(plain.params, plain.config)[0])


def test_activations_in_fp8_are_said_by_the_configuration(tmp_path):
    directory = write_directory(tmp_path, random_tensors(CONFIG))
    weights, both = (load_model(directory, progress=False, quantization=kind) for kind in QUANTIZATIONS)
    assert both.config == weights.config.replace(activations_fp8=True)
    assert both.config == with_fp8_weights(
        CONFIG.replace(eos_token_ids=both.config.eos_token_ids, name=both.name), dynamic=True
    )
    assert same(both.params, weights.params)


def test_the_log_says_how_much_memory_they_take(tmp_path, caplog):
    stored, _ = stored_in_fp8("channels")
    scales = compressed("float-quantized", scheme("channel"))
    directory = write_directory(tmp_path, stored, quantization_config=scales)
    with caplog.at_level(logging.WARNING, "tangram"):
        found = load_model(directory, dtype="bfloat16", progress=False, quantization="fp8")
    (message,) = [record.getMessage() for record in caplog.records]
    size = sum(x.nbytes for x in jax.tree.leaves(found.params))
    assert size == param_bytes(found.config, "bfloat16") < 0.6 * param_bytes(CONFIG, "bfloat16")
    assert message == (
        "The weights, quantised by compressed-tensors, become FP8, or bfloat16, as they are read: "
        f"{size / 1e9:.3g} GB"
    )


def test_the_conversion_cache_knows_them_apart(tmp_path, cache, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", Tensors(random_tensors(CONFIG)), CONFIG)
    found = {kind: load_model(path, progress=False, quantization=kind) for kind in (None, "fp8")}
    assert len(list((cache / "converted").iterdir())) == 2
    assert found["fp8"].config == found[None].config.replace(weights_fp8=True)
    assert same(found["fp8"].params, in_fp8(found[None].params, found[None].config)[0])
    monkeypatch.setattr("models.gguf.GGUFFile.__init__", lambda *args: pytest.fail("converted again"))
    for kind, model in found.items():
        again = load_model(path, progress=False, quantization=kind)
        assert again.config == model.config and same(again.params, model.params)
