"""`examples/decode_step.py`: exact at full retention, by itself, and without the server; and snippets of docs."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import tangram_jax as tj
from examples.decode_step import generate, prefill
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


def test_what_the_docs_say_of_own_scorers_and_of_compression_while_decoding():
    own, compress = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/calibration.md").read_text(), flags=re.DOTALL
    )
    names: dict = {"params": PARAMS, "config": CONFIG, "samples": [np.array(prompts()[1])]}
    exec(own, names)
    np.testing.assert_allclose(names["measured"].budgets.mean(axis=1), 0.5, atol=0.01)
    np.testing.assert_allclose(names["falling"].budgets, [[0.8] * 4, [0.2] * 4])
    tokens, max_tail = 150, 16
    plan = tj.CachePlan.build(names["falling"], heads_per_page=1, page_size=8)
    cache = tj.init_cache(
        plan, CONFIG, num_pages=plan.pages(184, max_tail), max_requests=1, max_tail=max_tail
    )
    cache = tj.reserve(plan, cache, 0, tokens, max_tail)
    _, cache = prefill(PARAMS, CONFIG, plan, cache, 0, prompts()[1])
    compiled = jax.jit(tj.prefill_chunk, static_argnums=(1, 2), static_argnames="scorer")
    names["tj"] = SimpleNamespace(reserve=tj.reserve, trim=tj.trim, prefill_chunk=compiled)
    names |= {"plan": plan, "cache": cache, "row": 0, "tokens": tokens, "max_tail": max_tail}
    names["next_token"] = np.array(9)
    decode = jax.jit(partial(tj.decode_step, PARAMS, CONFIG, plan), donate_argnames="cache")
    for after in (167, 184):
        for _ in range(max_tail):
            _, names["cache"] = decode(cache=names["cache"], rows=np.array([0]), tokens=np.array([9]))
        exec(compress, names)
        cache = names["cache"]
        assert (int(cache.tokens[0]), int(cache.tail[0]), names["tokens"]) == (after, 0, after)
        assert cache.num_pages - int(cache.num_free) == plan.pages(after, max_tail)


def test_the_steps_of_the_readme_run(tmp_path, monkeypatch):
    *_, steps = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    tj.BudgetProfile.uniform(CONFIG.num_layers, CONFIG.num_kv_heads, 0.5).save("profile.npz")
    prompt = np.array(prompts()[0])
    names: dict = {"params": PARAMS, "config": CONFIG, "row": 0, "rows": np.array([0])}
    names |= {
        "tokens": prompt,
        "count": 11,
        "prompt_length": 11,
        "tail_length": 4,
        "next_tokens": np.array([9]),
    }
    exec(steps, names)
    assert names["logits"].shape == (1, CONFIG.vocab_size)
    assert (names["cache"].tokens[0], names["cache"].tail[0]) == (11, 1)
