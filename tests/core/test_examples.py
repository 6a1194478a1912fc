"""`examples/decode_step.py`: exact at full retention, runs by itself, and does not reach into the server."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tangram_jax as tj
from examples.decode_step import generate
from models.testing import random_params, reference_decode, tiny_config

ROOT = Path(__file__).parents[2]
CONFIG = tiny_config(num_layers=2, eos_token_ids=())
PARAMS = random_params(CONFIG, 0)
COUNT = 20


def prompts() -> list[list[int]]:
    """Shorter than a chunk, and longer than two."""
    random = np.random.default_rng(0)
    return [random.integers(8, CONFIG.vocab_size, n).tolist() for n in (11, 150)]


def plan_of(retention: float) -> tj.CachePlan:
    profile = tj.BudgetProfile.uniform(CONFIG.num_layers, CONFIG.num_kv_heads, retention)
    return tj.CachePlan.build(profile, heads_per_page=2, page_size=8)


def test_greedy_tokens_are_the_dense_ones_at_full_retention():
    plan = plan_of(1.0)
    answers, cache = generate(PARAMS, CONFIG, plan, prompts(), COUNT)
    assert answers == [reference_decode(PARAMS, CONFIG, prompt, COUNT)[0] for prompt in prompts()]
    # The last token of an answer is not fed back. All reserved pages are in use.
    assert cache.tokens.tolist() == [11, 150]
    assert cache.tail.tolist() == [COUNT - 1, COUNT - 1]
    assert int(cache.num_free) == 0


def test_half_the_cache_and_an_end_by_eos():
    plan = plan_of(0.5)
    answers, cache = generate(PARAMS, CONFIG, plan, prompts(), COUNT)
    assert [len(answer) for answer in answers] == [COUNT, COUNT]
    assert cache.num_pages == sum(plan.pages(len(prompt), COUNT) for prompt in prompts())
    # The first tokens of both answers count as the end of text now: the loop does not even begin.
    stops = CONFIG.replace(eos_token_ids=tuple({answer[0] for answer in answers}))
    answers, cache = generate(PARAMS, stops, plan, prompts(), COUNT)
    assert answers == [[], []]
    assert cache.tail.tolist() == [0, 0]


@pytest.mark.parametrize("x64", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_the_example_runs_without_the_server(x64):
    """Also in a program that computes in 64 bits elsewhere."""
    script = "import runpy, sys; sys.argv = ['decode_step.py', '--tokens', '4', 'Hi']\n"
    script += (
        "runpy.run_path('examples/decode_step.py', run_name='__main__'); assert 'serve' not in sys.modules"
    )
    environment = os.environ | {"JAX_ENABLE_X64": x64}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "> Hi\ntoken ids [" in done.stdout
    assert "pages in use" in done.stdout
