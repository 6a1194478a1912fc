"""Loading: every mismatch in one error, unsupported models."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import RopeScaling, UnsupportedModelError, config_from_huggingface
from models.huggingface import HuggingFaceDirectory, ModelNotFoundError
from models.overrides import overridden
from models.params import abstract_params
from models.registry import load_model
from models.testing import tiny_tokenizer
from models.weights import WeightMismatchError, assemble_params, check_weights
from tests.models.checkpoints import GOLDEN, Tensors, same

HF_CONFIG = json.loads((GOLDEN / "tiny_tied" / "config.json").read_text())


def test_loaded_tree_is_the_abstract_tree(tiny):
    source, config = tiny
    params = assemble_params(source, config, jnp.float32, progress=False)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == abstract_params(config, jnp.float32)


def test_one_error_lists_all_mismatches(tiny):
    source, config = tiny
    tensors = dict(source.tensors)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((48, 31), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    for known in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        tensors[known] = np.zeros(8, np.float32)  # and ignored
    tensors["model.layers.1.self_attn.masked_bias"] = np.zeros(1, np.float32)
    with pytest.raises(WeightMismatchError) as caught:
        assemble_params(Tensors(tensors), config, jnp.float32, progress=False)
    assert str(caught.value).splitlines() == [
        "the weights of tiny_tied do not fit its configuration, 5 mismatches:",
        "  model.layers.0.mlp.up_proj.weight: expected shape (48, 32), found (48, 31)",
        "  model.norm.weight: missing (expected shape (32,))",
        "  model.layers.1.self_attn.k_proj.weight: missing (expected shape (32, 32))",
        "  model.layers.0.self_attn.q_proj.bias: unexpected (shape (64,))",
        "  model.layers.2.mlp.up_proj.weight: unexpected (shape (48, 32))",
    ]


def test_tied_and_untied_heads(tiny):
    source, config = tiny
    untied = config.replace(tie_embeddings=False)
    with pytest.raises(WeightMismatchError, match=r"lm_head.weight: missing"):
        assemble_params(source, untied, jnp.float32, progress=False)
    twice = Tensors(source.tensors | {"lm_head.weight": source.tensors["model.embed_tokens.weight"]})
    want = assemble_params(source, config, jnp.float32, progress=False)
    assert same(assemble_params(twice, config, jnp.float32, progress=False), want) and "lm_head" not in want
    # Of two names of one tensor safetensors' `save_model` keeps the first in the alphabet.
    head_alone = {name: x for name, x in twice.tensors.items() if name != "model.embed_tokens.weight"}
    assert same(assemble_params(Tensors(head_alone), config, jnp.float32, progress=False), want)
    with pytest.raises(WeightMismatchError, match=r"mismatches:\n  model.embed_tokens.weight: missing"):
        assemble_params(Tensors(head_alone), untied, jnp.float32, progress=False)
    neither = {name: x for name, x in head_alone.items() if name != "lm_head.weight"}
    with pytest.raises(WeightMismatchError, match=r"mismatches:\n  model.embed_tokens.weight: missing"):
        assemble_params(Tensors(neither), config, jnp.float32, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture GemmaForCausalLM.*Supported: LlamaForCausalLM, Mistral",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window=0"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' without low_freq_factor, high",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' without factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "rope scaling with factor='4'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "rope scaling with factor=0"),
        ({"is_causal": False, "mlp_bias": True}, "is_causal=false; mlp_bias=true"),
        ({"use_sliding_window": True}, "use_sliding_window=true"),
        ({"layer_types": 3}, "layer_types=3"),
        ({"architectures": 3}, "architecture 3"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1: expected positive"),
        ({"vocab_size": None, "hidden_size": "32"}, "vocab_size is None, hidden_size is '32'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rope_parameters": None, "rope_scaling": 4}, "rope_scaling=4"),
        ({"rope_parameters": {"rope_theta": -3}}, "rope_theta=-3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": True}}, "factor=True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast=-1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "attention_factor": float("nan")}}, "r=nan"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": -5}},
            "original_max_position_embeddings=-5",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "extrapolation_factor": 0.5}},
            "extrapolation",
        ),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' without factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling of type 'longrope'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights without quant_method"),
        ({"architectures": None, "model_type": "gemma"}, "architecture .none given. not supported"),
        ({"architectures": [], "model_type": None}, "architecture .none given. not supported"),
        ({"eos_token_id": "2"}, "config.json of x: eos_token_id is '2', expected a token id or a list"),
        ({"eos_token_id": [2, True]}, "eos_token_id is .2, True."),
    ],
)
def test_unsupported_configurations(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_huggingface(HF_CONFIG | changes, "x")


def test_configurations_of_several_versions():
    old = {
        k: v
        for k, v in HF_CONFIG.items()
        if k not in ("rope_parameters", "head_dim", "num_key_value_heads", "model_type")
    }
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": None, "num_key_value_heads": None}
    config = config_from_huggingface(old | mistral | {"rope_theta": 5000, "eos_token_id": [2, 5]}, "x")
    # A window that nothing can outgrow is none.
    wide = {"sliding_window": 4096, "max_position_embeddings": 4096}
    assert config_from_huggingface(old | mistral | wide, "x").max_positions == 4096
    assert (config.rope_theta, config.head_dim, config.num_kv_heads) == (5000.0, 8, 4)
    assert config.eos_token_ids == (2, 5) and config.rope_scaling is None
    llama3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    config = config_from_huggingface(old | {"rope_theta": 500000.0, "rope_scaling": llama3}, "x")
    assert config.rope_theta == 500000.0 and config.rope_scaling.original_max_positions == 8192
    with pytest.raises(UnsupportedModelError, match="lacks vocab_size, hidden_size"):
        config_from_huggingface({k: v for k, v in old.items() if k not in ("vocab_size", "hidden_size")}, "x")


def test_yarn_as_its_users_write_it():
    qwen = HF_CONFIG | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40_960,
    }
    del qwen["rope_parameters"]

    def scaling_of(fields, **more):
        return config_from_huggingface(qwen | {"rope_scaling": fields} | more, "x").rope_scaling

    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = config_from_huggingface(qwen | {"rope_theta": 1e6, "rope_scaling": yarn}, "x")
    assert config.max_positions == 131_072 and config.rope_theta == 1e6
    assert config.rope_scaling == RopeScaling.yarn(4.0, 32_768)
    assert config.rope_scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)  # 0.1 ln 4 + 1
    # A file that transformers 5 saved, with what the model's page says added by hand.
    both = qwen | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": yarn}
    assert config_from_huggingface(both, "x") == config
    assert scaling_of({"type": "yarn", "factor": 2}).original_max_positions == 40_960
    assert scaling_of(yarn, original_max_position_embeddings=512).original_max_positions == 512
    # DeepSeek-R1-0528-Qwen3-8B: no attention factor but that of the model's makers
    assert scaling_of(yarn | {"attn_factor": 0.8782488562869419}).attention_factor == pytest.approx(1.0)
    assert scaling_of(None) is None
    # A null stands for what the positions say.
    assert scaling_of(yarn | {"factor": None}) == RopeScaling.yarn(1.25, 32_768)
    assert scaling_of({"type": "yarn", "factor": None}) == RopeScaling.yarn(1.0, 40_960)
    for odd in ({"max_position_embeddings": "x"}, {"original_max_position_embeddings": "x"}):
        with pytest.raises(UnsupportedModelError, match="'yarn' without factor"):
            scaling_of({"type": "yarn", "factor": None}, **odd)
    for odd in ({"factor": 1e300}, {"original_max_position_embeddings": 1e300}, {"factor": 65_536.0}):
        with pytest.raises(UnsupportedModelError, match=r"yarn by .* positions .32 bits count no more than"):
            scaling_of(yarn | odd)
    with pytest.raises(UnsupportedModelError, match="factor=1000"):
        scaling_of(yarn | {"factor": 10**400})


@pytest.mark.parametrize("positions", [{}, {"max_position_embeddings": None}])
def test_positions_that_a_config_does_not_say(positions):
    """Of Llama those of transformers' default, for YaRN too; of others their own."""
    silent = {key: x for key, x in HF_CONFIG.items() if key != "max_position_embeddings"} | positions
    config = config_from_huggingface(silent | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "x")
    assert (config.max_positions, config.rope_scaling) == (8192, RopeScaling.yarn(4.0, 2048))
    assert config_from_huggingface(silent, "x").max_positions == 2048
    qwen = silent | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert config_from_huggingface(qwen, "x").max_positions == 32_768


def test_one_million_positions_need_dual_chunk_attention(caplog):
    divided = {"dual_chunk_attention_config": {"original_max_position_embeddings": 262_144}}
    qwen = HF_CONFIG | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 1_010_000,
    }
    assert config_from_huggingface(qwen | divided, "x").max_positions == 262_144
    assert "at most 262144 of 1010000 positions" in caplog.text


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "overrides", "theta", "scaling"),
    [
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": 7}, 7.0, None),
        ({"rope_theta": 5.0}, {"rope_theta": 7}, 7.0, None),
        ({"rope_parameters": {"rope_theta": 5.0, **YARN}}, {"rope_scaling": None}, 5.0, None),
        ({"rope_theta": 5.0, "rope_scaling": YARN}, {"rope_parameters": None}, 5.0, None),
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_parameters": None}, 5.0, None),
        ({"rope_theta": 5.0}, {"rope_parameters": YARN}, 5.0, RopeScaling.yarn(4.0, 512)),
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_scaling": YARN}, 5.0, RopeScaling.yarn(4.0, 512)),
        (
            {"rope_parameters": {"rope_theta": 5.0, **YARN}}, {"rope_scaling": {"factor": 2.0}}, 5.0,
            RopeScaling.yarn(2.0, 512),
        ),
        (  # nothing of another type stays
            {"rope_parameters": {"rope_theta": 5.0, **LLAMA3}}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 5.0,
            RopeScaling.yarn(4.0, 4096),
        ),
    ],
)  # fmt: skip
def test_overrides_of_rope(file, overrides, theta, scaling):
    plain = {k: v for k, v in HF_CONFIG.items() if k != "rope_parameters"} | {"max_position_embeddings": 4096}
    config = config_from_huggingface(overridden(plain | file, overrides), "x")
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_a_blend_that_ends_before_it_begins():
    with pytest.raises(UnsupportedModelError, match="high_freq_factor of rope scaling below low_freq_factor"):
        config_from_huggingface(HF_CONFIG | {"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, "x")


@pytest.mark.parametrize("wrong", ["yarn", 4, [1]])
def test_overrides_that_are_no_rope(wrong):
    for name in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UnsupportedModelError, match=f"{name}="):
            config_from_huggingface(overridden(HF_CONFIG, {name: wrong}), "x")


def test_overrides_of_a_directory(tmp_path):
    directory = tmp_path / "tiny"
    shutil.copytree(GOLDEN / "tiny_qwen3", directory)  # has rope_parameters, the newer name
    tiny_tokenizer().save(str(directory))
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}
    config = load_model(directory, progress=False, overrides=yarn).config
    assert config.rope_scaling == RopeScaling.yarn(4.0, 512)
    assert (config.max_positions, config.rope_theta) == (2048, 10000.0)
    assert load_model(directory, progress=False, overrides={"rms_norm_eps": 0.5}).config.norm_eps == 0.5
    with pytest.raises(UnsupportedModelError, match="'longrope'"):
        load_model(directory, progress=False, overrides={"rope_parameters": {"rope_type": "longrope"}})
    with pytest.raises(UnsupportedModelError, match="GGUF file, which has no config"):
        load_model(overrides=yarn)


@pytest.mark.parametrize(
    "name", ["smollm", "/no/such/dir", "./x", "no/such.gguf", "a/b/c", "~/nothing", "", "org/name with space"]
)
def test_unknown_names_say_what_is_possible(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m-instruct|no config.json"):
        load_model(name, progress=False)


def test_bad_directories(tmp_path):
    shutil.copytree(GOLDEN / "tiny_untied_llama3", tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer.json"):
        load_model(tmp_path / "m", progress=False)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(
        UnsupportedModelError, match=r"tokenizer in .* read \(KeyError: .*fetch tokenizer.json"
    ):
        load_model(tmp_path / "m", progress=False)
    (tmp_path / "m" / "tokenizer_config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"read \(JSONDecodeError.*tokenizer_config.json and"):
        load_model(tmp_path / "m", progress=False)
    (tmp_path / "m" / "tokenizer_config.json").unlink()
    index = tmp_path / "m" / "model.safetensors.index.json"
    for wrong in ("{}", '{"weight_map": ["a"]}'):
        shutil.copy(index, tmp_path / "index.json")
        index.write_text(wrong)
        with pytest.raises(UnsupportedModelError, match=r"index.json does not say in which file"):
            HuggingFaceDirectory(tmp_path / "m").open()
        shutil.copy(tmp_path / "index.json", index)
    (tmp_path / "m" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"lacks weight files .*00002-of-00002.*Fetch them"):
        HuggingFaceDirectory(tmp_path / "m").open()
    (tmp_path / "m" / "model-00001-of-00002.safetensors").write_bytes(b"garbage, not a tensor file")
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"cannot read .*00001-of-00002.*fetch it again"):
        HuggingFaceDirectory(tmp_path / "m").open()
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": {"a": 1}}')
    with pytest.raises(UnsupportedModelError, match=r"generation_config.json of m: eos_token_id is {'a': 1}"):
        HuggingFaceDirectory(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text("[]")
    with pytest.raises(
        UnsupportedModelError, match=r"cannot read .*generation_config.json: expected a JSON object"
    ):
        HuggingFaceDirectory(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"cannot read .*config.json"):
        HuggingFaceDirectory(tmp_path / "m")


def test_dtype_is_checked():
    with pytest.raises(ValueError, match="one of float32, bfloat16, float16, got float64"):
        load_model(dtype="float64")


def test_more_layers_than_tensors(tiny):
    source, config = tiny
    with pytest.raises(WeightMismatchError, match=r"has 1000000 layers, and its weights are \d+ tensors"):
        check_weights(source, config.replace(num_layers=1_000_000), "huggingface")
