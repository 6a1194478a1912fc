"""What the benchmark of scoring and keeping runs, on a small model."""

from benchmarks import keep
from tests.benchmarks.test_prefill_step import TINY


def test_a_layer_with_attention_and_without(monkeypatch):
    monkeypatch.setattr(keep, "trace_kernels", lambda run: {"any": [1.0] * len(run())})
    case = keep.Case(TINY, 0.01, 64)
    case.set_counts(0)
    assert keep.layer_us(case) == (1.0, 1.0)
