"""The engine over two simulated devices: the same answers, the same pages."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.registry import LoadedModel
from models.testing import random_params, tiny_config, tiny_tokenizer
from serve.args import ConfigError, ServeConfig
from serve.buckets import Buckets
from serve.build import build, build_engine
from serve.prompt_lookup import PromptLookup
from serve.speculation import Speculation
from tangram_jax.profile import BudgetProfile
from tests.serve.tiny_engine import TinyEngine, ask_all, tokens_of
from tests.simulated import on_simulated_devices

CONFIG = tiny_config(num_layers=1)
SETTINGS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
    "num_pages": 900,
    "min_entries": 0,
}


def served(tmp_path: str, **settings) -> ServeConfig:
    return ServeConfig(**SETTINGS | {"profile": tmp_path} | settings)


def answers(config: ServeConfig) -> tuple[list[list[int]], str]:
    """Of requests one after another, of several at once whose cache is whole, and the next turn of the first."""
    model = LoadedModel(CONFIG, random_params(CONFIG, 0), tiny_tokenizer(), "tiny")
    built = build_engine(config, model, dtype=jnp.float32)
    engine = TinyEngine(built.engine, built.engine._runner)
    built.engine.start()
    prompts = [np.random.default_rng(n).integers(8, CONFIG.vocab_size, n).tolist() for n in (150, 40, 9)]
    try:
        out = [engine.answer(prompt).tokens for prompt in prompts]
        turn = engine.answer([*prompts[0], *out[0], 20, 30], max_tokens=12)
        assert turn.cached > 100
        at_once = [engine.ask(p, n=2, retention=1.0, temperature=0.7, seed=3) for p in prompts]
        out += [turn.tokens, *(a.tokens for asked in at_once for a in asked.wait())]
        engine.settle()
        assert engine.answer(prompts[2], logprobs=2, prompt_logprobs=2).tokens == out[2]
        before = engine.engine.stats().steps_total
        out += [a.tokens for a in ask_all(engine, [[20, 30, 40], [50, 60]], max_tokens=4, retention=1.0)]
        shared = engine.engine.stats().steps_total - before
        assert shared == 4, shared  # a prompt each would be one more
    finally:
        built.engine.stop()
    return out, built.summary


def check_engine() -> None:
    import tempfile
    from pathlib import Path
    from unittest import mock

    # As few programs as there can be: three for chunks, one for tokens.
    few = Buckets(
        mixed_chunks=(32,), largest_chunk=64, batches=(2,), prompt_logprobs=32, packed_chunks=(32,), places=2
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch("serve.build.make_buckets", lambda *_, **__: few),
    ):
        path = str(Path(directory) / "profile.npz")
        ratios = np.random.default_rng(0).uniform(0.2, 0.9, (1, 1, 4)).astype(np.float32)
        BudgetProfile.from_ratios(ratios, retention=0.5, alpha=0.0).save(path)
        both = {"max_retention": 1.0, "heads_per_page": 4}
        alone, said = answers(served(path, **both))
        together, said_of_two = answers(served(path, **both, tensor_parallel_size=2))
    assert together == alone
    assert "on each of 2 devices" in said_of_two and "devices" not in said


def check_drafts() -> None:
    """Two devices verify what one has said without drafts."""
    from unittest import mock

    few = Buckets(
        mixed_chunks=(32,), largest_chunk=64, batches=(2,), prompt_logprobs=32, drafts=2, draft_slots=(2,)
    )
    prompts = [tokens_of(28), tokens_of(30)]
    wholes: list[list[int]] = []

    def following(lookup: PromptLookup, count: int) -> np.ndarray:
        known = lookup.tokens.tolist()
        (whole,) = [w for w in wholes if w[: len(known)] == known]
        return np.array(whole[len(known) : len(known) + count], np.int32)

    def answers(**options) -> list[list[int]]:
        model = LoadedModel(CONFIG, random_params(CONFIG, 0), tiny_tokenizer(), "tiny")
        config = ServeConfig(**SETTINGS, retention=1.0, heads_per_page=4, **options)
        engine = build_engine(config, model, dtype=jnp.float32).engine
        engine.start()
        said = [a.tokens for a in ask_all(TinyEngine(engine, engine._runner), prompts, max_tokens=40)]
        assert bool(engine.stats().accepted_tokens_total) == bool(options)
        engine.stop()
        return said

    with (
        mock.patch("serve.build.make_buckets", lambda *_, **__: few),
        mock.patch.object(PromptLookup, "following", following),
    ):
        said = answers()
        wholes += [prompt + answer for prompt, answer in zip(prompts, said, strict=True)]
        assert answers(tensor_parallel_size=2, speculation=Speculation()) == said


@pytest.mark.slow  # on GPUs `test_engine_random` has two with drafts
def test_two_devices_verify_drafts():
    on_simulated_devices(__file__, "check_drafts", 2)


def test_two_devices_answer_as_one():
    on_simulated_devices(__file__, "check_engine", 2)


def test_more_devices_than_there_are():
    with pytest.raises(
        ConfigError, match="--tensor-parallel-size 9 is more devices than are here: write at most"
    ):
        build(ServeConfig(tensor_parallel_size=9), progress=False)


def test_heads_that_cannot_be_dealt():
    model = LoadedModel(CONFIG, {}, tiny_tokenizer(), "tiny")
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3: .*3 devices"):
        build_engine(ServeConfig(tensor_parallel_size=3, heads_per_page=2), model, dtype=jnp.float32)
