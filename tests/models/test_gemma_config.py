"""config.json files of Gemma 3, and of other models with a sliding window, as transformers writes and reads them."""

import json

import numpy as np
import pytest

from models.attention import dense_attend
from models.config import UnsupportedModelError, config_from_huggingface
from models.gemma import GEMMA3_ARCHITECTURES
from models.overrides import overridden
from models.rope import rope_frequencies
from models.rope_scaling import RopeScaling
from models.testing import random_params, tiny_config, tiny_gemma_config
from models.transformer import forward
from tests.models.checkpoints import GOLDEN

HF_CONFIG = json.loads((GOLDEN / "tiny_gemma3" / "config.json").read_text())
IMAGES = json.loads((GOLDEN / "gemma3_images.json").read_text())
CONFIGS = json.loads((GOLDEN / "gemma3_configs.json").read_text())


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("nested", [False, True])
def test_configurations_agree_with_transformers(number, nested):
    golden = CONFIGS[number]
    given = {"architectures": [GEMMA3_ARCHITECTURES[0]], **golden["given"]}
    if nested:
        given = {
            "architectures": [GEMMA3_ARCHITECTURES[1]],
            "text_config": golden["given"],
            "vision_config": {},
        }
    config, fields = config_from_huggingface(given, "x"), golden["fields"]
    assert config.vocab_size == fields["vocab_size"] and config.head_dim == fields["head_dim"]
    assert config.num_kv_heads == fields["num_key_value_heads"]
    assert config.intermediate_size == fields["intermediate_size"]
    assert config.max_positions == fields["max_position_embeddings"]
    assert config.attention_scale == pytest.approx(fields["query_pre_attn_scalar"] ** -0.5)
    assert config.sliding_window == fields["sliding_window"]
    sliding = [i for i, kind in enumerate(fields["layer_types"]) if kind == "sliding_attention"]
    assert list(config.sliding_layers) == sliding and config.tie_embeddings is fields["tie_word_embeddings"]
    np.testing.assert_allclose(rope_frequencies(config), golden["full"], rtol=2e-6)
    np.testing.assert_allclose(rope_frequencies(config, sliding=True), golden["sliding"], rtol=2e-6)
    factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    assert factor == pytest.approx(golden["attention_factor"])


def test_both_spellings_of_transformers():
    old = {
        k: v
        for k, v in HF_CONFIG.items()
        if k not in ("rope_parameters", "layer_types", "sliding_window_pattern")
    }
    old |= {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "sliding_window_pattern": 3}
    old |= {"rope_scaling": {"type": "linear", "factor": 8}}
    assert config_from_huggingface(old, "x") == config_from_huggingface(HF_CONFIG, "x")
    # The name of an attribute that came with layer types says nothing alone: as in transformers every sixth is full.
    del old["sliding_window_pattern"]
    for more in ({}, {"_sliding_window_pattern": 3}):
        assert config_from_huggingface(old | more, "x").full_layers == (5,)


YARN = {"rope_type": "yarn", "factor": 8.0}


@pytest.mark.parametrize("own", [{}, {"original_max_position_embeddings": 64}])
def test_the_original_positions_are_those_of_the_full_layers(own):
    """A number of the config.json itself says nothing of one of two RoPEs, in either spelling; it came first."""
    positions = {"max_position_embeddings": 256, "original_max_position_embeddings": 32}
    nested = {"full_attention": YARN | own, "sliding_attention": {"rope_type": "default"}}
    old = {key: value for key, value in HF_CONFIG.items() if key != "rope_parameters"}
    want = RopeScaling.yarn(8.0, 64 if own else 256)
    for file in (HF_CONFIG | {"rope_parameters": nested}, old | {"rope_scaling": YARN | own}):
        assert config_from_huggingface(file | positions, "x").rope_scaling == want
        changed = overridden(file | positions, {"rope_theta": 7})
        assert config_from_huggingface(changed, "x").rope_scaling == want


def rope(**types):
    return {"rope_parameters": HF_CONFIG["rope_parameters"] | types}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"hidden_activation": "gelu"}, "hidden_activation=gelu"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ({"query_pre_attn_scalar": None}, "query_pre_attn_scalar=None"),
        ({"sliding_window": 0}, "sliding layers with sliding_window=0"),
        ({"sliding_window": None}, "sliding layers with sliding_window=None"),
        ({"sliding_window": "24"}, "sliding layers with sliding_window='24'"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ({"layer_types": None, "sliding_window_pattern": 7}, "sliding_window=24 in every layer"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_window=24 in every layer"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types of 5 layers, num_hidden_layers of 6"),
        ({"layer_types": ["full_attention", "linear_attention", 3] * 2}, "layers of 3, linear_attention"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention'"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers is '6'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_attention_heads": 3}, "cannot load x: num_heads must be a multiple of num_kv_heads"),
        ({"head_dim": 15}, "cannot load x: head_dim must be even"),
        ({"text_config": 3}, "text_config=3"),
        (rope(sliding_attention={"rope_type": "linear", "factor": 8.0}), "'linear' in sliding layers"),
        (rope(sliding_attention={"rope_theta": -1.0}), "rope_theta=-1.0 in sliding layers"),
        (rope(sliding_attention=4), "rope_parameters="),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            r"'factor': 8.0} without types of layers .write {\"full_attention\": {...}, \"sliding_attention\":",
        ),
        (rope(full_attention=[4]), "rope_parameters="),
        (rope(full_attention={"rope_type": "linear"}), "'linear' without factor"),
        ({"quantization_config": {"bits": 4}}, "quantised weights without quant_method"),
    ],
)
def test_unsupported_configurations(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_huggingface(HF_CONFIG | changes, "x")


@pytest.mark.parametrize(
    ("overrides", "theta", "sliding", "scaling"),
    [
        ({"rope_theta": 7}, 7.0, 50.0, RopeScaling(kind="linear", factor=8.0)),
        ({"rope_local_base_freq": 8}, 500.0, 8.0, RopeScaling(kind="linear", factor=8.0)),
        ({"rope_scaling": {"factor": 4.0}}, 500.0, 50.0, RopeScaling(kind="linear", factor=4.0)),
        ({"rope_parameters": {"factor": 4.0}}, 500.0, 50.0, RopeScaling(kind="linear", factor=4.0)),
        ({"rope_scaling": None}, 500.0, 50.0, None),
        ({"text_config": {"rope_scaling": None}}, 500.0, 50.0, None),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}}, 500.0, 9.0,
            RopeScaling(kind="linear", factor=8.0),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, 9.0, 50.0,
            RopeScaling(kind="linear", factor=8.0),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("file", [HF_CONFIG, IMAGES["config"]])
def test_overrides(file, overrides, theta, sliding, scaling):
    config = config_from_huggingface(overridden(file, overrides), "x")
    assert (config.rope_theta, config.sliding_rope_theta, config.rope_scaling) == (theta, sliding, scaling)


def test_overrides_of_a_file_that_says_nothing_of_its_sliding_layers():
    silent = {key: value for key, value in HF_CONFIG.items() if key != "rope_parameters"}
    for name in ("rope_scaling", "rope_parameters"):
        config = config_from_huggingface(overridden(silent, {name: YARN}), "x")
        assert (config.rope_theta, config.sliding_rope_theta) == (1e6, 1e4)
        assert config.rope_scaling == RopeScaling.yarn(8.0, config.max_positions // 8)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "num_hidden_layers": 4, "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
QWEN = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}
MIXED = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, ()),
        (MIXED | QWEN | {"sliding_window": 512}, ()),  # nothing outgrows it
        ({"layer_types": ["full_attention"] * 4, "sliding_window": 64}, ()),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "sliding_window": 64}, ()),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "max_window_layers": 4}, ()),
        (
            {
                "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64,
                "max_window_layers": 3,
            },
            (3,),
        ),
        (MIXED | QWEN, (1, 3)),
    ],
)  # fmt: skip
def test_windows_of_other_models(changes, layers):
    config = config_from_huggingface(LLAMA | changes, "x")
    assert config.sliding_layers == layers and config.sliding_window == (64 if layers else None)
    assert config.sliding_rope_theta is None and config.norm_offset == 0.0 and not config.post_norms


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"]},
        {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 4},  # which it ignores
        {"architectures": ["MixtralForCausalLM"]},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 0},
        QWEN | {"layer_types": ["sliding_attention"] * 4},
        QWEN | MOE | {"architectures": ["Qwen3MoeForCausalLM"]},
    ],
)  # fmt: skip
def test_a_window_in_every_layer_is_as_far_as_the_model_goes(changes, caplog):
    """Up to there no token is hidden: it was refused."""
    config = config_from_huggingface(LLAMA | changes | {"sliding_window": 64}, "x")
    assert "x: at most 64 of 512 positions, a sliding window in every layer is not supported" in caplog.text
    without = {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
    assert config == config_from_huggingface(LLAMA | changes | without, "x").replace(max_positions=64)
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}
    config = config_from_huggingface(LLAMA | changes | yarn | {"sliding_window": 600}, "x")
    assert config.max_positions == 600 and "at most 600 of 1024 positions" in caplog.text
    caplog.clear()
    assert config_from_huggingface(LLAMA | changes | {"sliding_window": 512}, "x").max_positions == 512
    assert not caplog.records


def test_mistrals_window_where_the_file_does_not_say_it():
    given = LLAMA | {"architectures": ["Other", "MistralForCausalLM"], "max_position_embeddings": 8192}
    assert config_from_huggingface(given, "x").max_positions == 4096


def test_within_a_window_every_token_is_seen():
    config = tiny_config(num_layers=2)
    params, tokens = random_params(config), np.arange(8, 32, dtype=np.int32)
    positions = np.arange(24, dtype=np.int32)

    def logits(config):
        return forward(params, config, tokens, positions, dense_attend(positions, config=config), None)[0]

    windowed = config.replace(sliding_layers=(0, 1), sliding_window=24)
    np.testing.assert_array_equal(logits(windowed), logits(config))
    shorter = np.asarray(logits(windowed.replace(sliding_window=23)))
    assert np.abs(shorter - logits(config))[-1].max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (MIXED, "layers of sliding_attention beside others in LlamaForCausalLM"),
        (MIXED | {"architectures": ["MistralForCausalLM"]}, "sliding_attention beside others in Mistral"),
        (MIXED | {"architectures": ["Qwen3ForCausalLM"]}, "sliding_window=None"),  # use_sliding_window is not set
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers=-1",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "layers of chunked_attention"),
    ],
)  # fmt: skip
def test_windows_that_are_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_huggingface(LLAMA | changes, "x")


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": None}, {"sliding_layers": (1, 0)}, {"sliding_layers": (6,)}, {"sliding_window": 0}],
)
def test_model_config_checks_its_windows(changes):
    with pytest.raises(ValueError, match="sliding"):
        tiny_gemma_config(**changes)
