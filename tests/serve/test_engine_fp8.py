"""The engine with FP8 weights says what a model with the weights that they stand for says."""

import jax.numpy as jnp
import pytest

from models import registry
from models.fp8_weights import in_floats, in_fp8
from models.testing import random_params, tiny_config, tiny_tokenizer
from serve.args import QUANTIZATIONS, ServeConfig
from serve.build import build, build_engine
from tests.serve import tiny_engine
from tests.serve.tiny_engine import TinyEngine, ask_all, greedy, tokens_of


@pytest.mark.slow  # `test_fp8_weights` has the model
def test_answers(monkeypatch):
    params, config = in_fp8(random_params(tiny_config(num_layers=1), 0), tiny_config(num_layers=1))
    model = registry.LoadedModel(config, params, tiny_tokenizer(), "tiny")
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "max_model_len": 128, "num_pages": 400}
    built = build_engine(ServeConfig(**settings), model, dtype=jnp.float32)
    assert built.summary.startswith("tiny, weights in FP8: 1 layers, ")
    prompts = [tokens_of(n, seed=n) for n in (3, 40, 90)]
    built.engine.start()
    try:
        answers = ask_all(TinyEngine(built.engine, built.engine._runner), prompts, max_tokens=20)
    finally:
        built.engine.stop()
    floats, plain = in_floats(params, config)
    monkeypatch.setattr(tiny_engine, "params_of", lambda _: floats)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == greedy(prompt, 20, config=plain.replace(name="in floats")), len(prompt)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_the_flag_reaches_the_loader(kind, monkeypatch):
    asked = {}

    def load(name, **how):
        asked.update(how)
        raise registry.ModelNotFoundError(name)

    monkeypatch.setattr("serve.build.load_model", load)
    with pytest.raises(registry.ModelNotFoundError):
        build(ServeConfig(quantization=kind), progress=False)
    assert asked["quantization"] == kind and QUANTIZATIONS == registry.QUANTIZATIONS
