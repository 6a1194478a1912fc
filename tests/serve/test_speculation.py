"""What `--speculative-config` may say, and what becomes of it."""

import json

import jax.numpy as jnp
import pytest

from models.registry import LoadedModel
from models.testing import random_params, tiny_config, tiny_tokenizer
from serve.args import ConfigError, ServeConfig
from serve.buckets import Shape, make_buckets
from serve.build import _check_drafts, build_engine
from serve.flags import parse_args
from serve.speculation import Speculation

CONFIG = tiny_config(num_layers=2)


def test_vllms_names():
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config = parse_args(["--speculative-config", json.dumps(given)])
    assert config.speculation == Speculation(**given)
    assert parse_args(["--speculative-config", "{}"]).speculation == Speculation()
    assert parse_args([]).speculation is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"method": "eagle"}', "method 'eagle' is not known: write ngram, which needs no other model"),
        (
            '{"num_speculative_tokens": 0}',
            "num_speculative_tokens: Input should be greater than or equal to 1",
        ),
        ('{"num_speculative_tokens": "3"}', "num_speculative_tokens: Input should be a valid integer"),
        (
            '{"model": "x"}',
            "model: Extra inputs are not permitted; known are method, num_speculative_tokens,",
        ),
        (
            '{"prompt_lookup_min": 5, "prompt_lookup_max": 4}',
            "argument --speculative-config: prompt_lookup_min (5) is above prompt_lookup_max (4)\n",
        ),
        ('{"prompt_lookup_min": 65}', "prompt_lookup_min: Input should be less than or equal to 64"),
        ('{"prompt_lookup_max": 0}', "prompt_lookup_max: Input should be greater than or equal to 1"),
        ("[3]", "is not a JSON object"),
        ("3 tokens", "is not JSON"),
    ],
)
def test_faults_say_what_to_write(given, words, capsys):
    with pytest.raises(SystemExit):
        parse_args(["--speculative-config", given])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "bounds"), [("min", 5, (5, 5)), ("max", 1, (1, 1)), ("max", 9, (2, 9))]
)
def test_a_bound_that_is_given_alone(name, value, bounds):
    speculation = parse_args(["--speculative-config", f'{{"prompt_lookup_{name}": {value}}}']).speculation
    assert (speculation.prompt_lookup_min, speculation.prompt_lookup_max) == bounds


def test_drafts_have_programs_of_their_own():
    buckets = make_buckets(64, 512, 32, 4096, drafts=3, drafting=20)
    assert (buckets.drafts, buckets.draft_slots) == (3, (1, 4, 16))
    assert Shape(None, 1, 4, drafts=3) in buckets.shapes
    assert Shape(None, 1, 4, drafts=3).name == "4 decode slots + 3 drafts each"
    assert make_buckets(64, 512, 32, 4096).draft_slots == ()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "drafts", "words"),
    [
        (32, 8, 7, None),
        (32, 8, 8, "num_speculative_tokens 8: with 4 query heads for each KV head, write at most 7"),
        (64, 2, 1, "with 32 query heads for each KV head, leave --speculative-config out"),
        (64, 2, 0, None),
    ],
)
def test_no_more_than_the_kernel_verifies(heads, kv_heads, drafts, words):
    model, stores = CONFIG.replace(num_heads=heads, num_kv_heads=kv_heads), jnp.bfloat16
    if words is None:
        _check_drafts(drafts, model, stores)
        return
    with pytest.raises(ConfigError, match=words):
        _check_drafts(drafts, model, stores)


def test_large_heads_in_bytes_have_room_for_fewer():
    model = CONFIG.replace(num_heads=16, num_kv_heads=8, head_dim=256)
    _check_drafts(15, model, jnp.bfloat16)
    _check_drafts(7, model, jnp.uint8)
    with pytest.raises(ConfigError, match="write at most 7"):
        _check_drafts(8, model, jnp.uint8)


def test_the_engine_that_is_built_drafts():
    model = LoadedModel(CONFIG, random_params(CONFIG, 0), tiny_tokenizer(), "tiny")
    options = {"num_pages": 900, "max_model_len": 128, "max_num_seqs": 4, "retention": 1.0}
    speculation = Speculation(num_speculative_tokens=2, prompt_lookup_min=1, disable_by_batch_size=3)
    built = build_engine(ServeConfig(speculation=speculation, **options), model, dtype="float32")
    limits = built.engine._limits
    assert (limits.drafts, limits.drafting, limits.lookup) == (2, 2, (1, 4))  # batches are of 1, 2 and 4
    assert "2 tokens drafted for each of at most 2" in built.summary
    assert build_engine(ServeConfig(**options), model, dtype="float32").engine._limits.drafts == 0
