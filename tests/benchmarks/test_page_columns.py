"""The benchmark of shares by columns: its two plans, and its program lowered for a GPU and not run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import page_columns
from benchmarks.page_columns import CASES, Inputs, Row
from pallas_kernels.ragged_decode import plan as decode_plan
from tests.benchmarks.lowering import as_measured


@pytest.fixture(autouse=True)
def sms(monkeypatch):
    for module in (page_columns, decode_plan):
        monkeypatch.setattr(module, "num_sms", lambda: 132)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shares_of_a_column_have_the_pages_of_the_others(case):
    inputs = Inputs.of(Row("llama-3.1-8b", *case, "anywhere"))
    used = inputs.table[inputs.table > 0]
    assert len(set(used)) == len(used)
    plans = [np.asarray(inputs.plan(by_columns).shares)[0] for by_columns in (True, False)]
    pages = plans[0][:, decode_plan.FIRST_PAGES :].reshape(4, 33, -1)
    assert (pages == pages[0]).all()
    largest = [np.diff(shares[:, [decode_plan.START, decode_plan.END]]).max() for shares in plans]
    assert largest[0] == largest[1]


def test_its_kernel_is_lowered_for_a_gpu(monkeypatch):
    pool = jax.ShapeDtypeStruct((page_columns.NUM_PAGES, 2, 4, 64, 128), jnp.bfloat16)
    monkeypatch.setattr(page_columns, "_pool", lambda: pool)
    with as_measured(lower=True) as programs:
        result = page_columns.measure(Row("llama-3.1-8b", 2, 2048, "ragged", "in order"), 4600.0)
    assert programs.kernels == [1] * 4
    assert result["by requests / by columns"] == 1.0
