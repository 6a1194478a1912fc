"""What the benchmarks of ragged decode attention measure: shapes of real models, contexts, requests, skew."""

import dataclasses

import numpy as np

from pallas_kernels.ragged_decode.shapes import SHAPES, Shape

MAX_CONTEXT = 131_072
MODELS = ("Llama-3.1-8B", "Qwen3-4B", "Qwen3-30B-A3B", "Gemma-3-12B", "GPT-OSS-20B")


@dataclasses.dataclass(frozen=True)
class Row:
    """Decode attention of one layer, one token per request."""

    model: str
    requests: int
    context: int  # tokens of a request, on average
    retention: float
    skew: str  # over the heads: "ragged" or "equal"
    page: int = 64
    mix: str = "same"  # over the requests: "same", "one long" or "lognormal"
    slots: int = 0  # of the batch, if more than requests: the others hold nothing
    new: bool = False  # with the current token's key and value, as inside a decode step

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def batch(self) -> int:
        return max(self.requests, self.slots)

    def contexts(self) -> np.ndarray:
        """i32[requests]: tokens of each; whatever the mix, as many in all."""
        total, others = self.requests * self.context, self.requests - 1
        if self.mix == "same" or not others:
            return np.full(self.requests, self.context, np.int32)
        if self.mix == "one long":  # has half of all tokens
            longest = min(total // 2, MAX_CONTEXT)
            return np.array([longest] + [(total - longest) // others] * others, np.int32)
        if self.mix == "lognormal":
            drawn = np.random.default_rng(self.requests).lognormal(0.0, 1.0, size=self.requests)
            return np.maximum(capped(drawn, self.context, MAX_CONTEXT), 1).astype(np.int32)
        raise ValueError(f'mix {self.mix!r} is none of "same", "one long" and "lognormal"')

    def lengths(self) -> np.ndarray:
        """i32[batch, K]: every head its own group, as after clustering over the whole model; -1 in an empty slot."""
        equal = self.skew == "equal" or self.retention == 1.0
        heads = self.shape.num_kv_heads
        kept = np.full(heads, self.retention) if equal else skewed_budgets(heads, self.retention)
        held = np.maximum(np.ceil(kept * self.contexts()[:, None]), 1).astype(np.int32)
        return np.concatenate([held, np.full((self.batch - self.requests, heads), -1, np.int32)])

    def pages(self) -> int:
        """That all heads of all requests hold, one head per page."""
        return int((-(-self.lengths() // self.page)).sum())

    @property
    def kv_gigabytes(self) -> float:
        """Of their pages, in bfloat16."""
        return self.pages() * self.page * 4 * self.shape.head_dim / 1e9


def capped(drawn: np.ndarray, mean: float, most: float = 1.0) -> np.ndarray:
    """`drawn`, scaled so that the mean of its last axis is `mean` though nothing exceeds `most`."""
    for _ in range(200):  # each comes nearer, to within 1e-4
        drawn = np.minimum(drawn * mean / drawn.mean(axis=-1, keepdims=True), most)
    return drawn


def skewed_budgets(heads: int, retention: float) -> np.ndarray:
    """f64[heads]: lognormal, sigma 0.8."""
    return capped(np.random.default_rng(0).lognormal(0.0, 0.8, size=heads), retention)


def _rows(
    model: str, sizes: tuple[tuple[int, int], ...], retentions: tuple[float, ...], page: int = 64
) -> list[Row]:
    """Ragged, but for what is kept whole."""
    return [
        Row(model, requests, context, retention, "equal" if retention == 1.0 else "ragged", page)
        for requests, context in sizes
        for retention in retentions
    ]


DEFAULT_ROWS = [
    *(
        Row("Llama-3.1-8B", requests, context, 0.25, skew)
        for requests, context in ((1, 8192), (16, 8192), (64, 8192), (64, 32768))
        for skew in ("ragged", "equal")
    ),
    *_rows("Llama-3.1-8B", ((1, 1024), (1, 8192), (1, 32768), (32, 8192), (4, 102400)), (1.0,)),
    *_rows("Llama-3.1-8B", ((64, 32768),), (0.25,), page=16),
    *_rows("Llama-3.1-8B", ((1, 102400), (128, 1024)), (0.25,)),
    *_rows("Gemma-3-12B", ((16, 32768),), (0.25,)),
    *_rows("Gemma-3-12B", ((1, 8192),), (1.0,)),
    *_rows("Qwen3-4B", ((64, 8192),), (0.5,)),
    *_rows("Qwen3-30B-A3B", ((64, 32768),), (0.25,)),
    *_rows("GPT-OSS-20B", ((64, 32768),), (0.25,)),
    *_rows("GPT-OSS-20B", ((1, 8192),), (1.0,)),
]

SKEW_ROWS = [
    row for model in MODELS for row in _rows(model, ((1, 8192), (16, 8192), (64, 8192), (64, 32768)), (0.25,))
]

# Requests and contexts that a model has in the grid beside those of all: each number of requests is a program to compile.
GRID_SIZES = {
    "Llama-3.1-8B": ((1, 131_072), (4, 102_400), (128, 1024)),
    "Qwen3-4B": ((4, 131_072), (32, 1024)),
    "Qwen3-30B-A3B": ((4, 1024), (128, 131_072)),
    "Gemma-3-12B": ((1, 1024), (32, 131_072)),
    "GPT-OSS-20B": ((1, 131_072), (128, 8192)),
}
GRID_ROWS = [
    *(
        row
        for model in MODELS
        for row in (
            *_rows(model, ((1, 8192),), (1.0, 0.25)),
            *_rows(model, ((16, 8192), (64, 32768)), (1.0, 0.5, 0.25)),
            *_rows(model, GRID_SIZES[model], (1.0, 0.25)),
        )
    ),
    *(
        Row("Llama-3.1-8B", requests, context, 0.25, "equal")
        for requests, context in ((16, 8192), (64, 32768))
    ),
    # Twins with small pages.
    *_rows("Llama-3.1-8B", ((64, 32768),), (0.25,), page=16),
    *(row for model in MODELS for row in _rows(model, ((16, 8192),), (0.25,), page=16)),
]


def all_rows() -> list[Row]:
    """The five shapes, also with equal heads and, at a quarter kept, with small pages."""
    rows = []
    for model in MODELS:
        for requests in (1, 4, 16, 32, 64, 128):
            for context in (1024, 8192, 32768, MAX_CONTEXT):
                rows += _rows(model, ((requests, context),), (1.0, 0.5, 0.25))
                rows += [Row(model, requests, context, kept, "equal") for kept in (0.5, 0.25)]
                rows.append(Row(model, requests, context, 0.25, "ragged", page=16))
    return sorted(rows, key=lambda row: row.page != 64)  # a pool has pages of one size


MIXES = ("same", "one long", "lognormal")
DIVISION_ROWS = [
    Row("Llama-3.1-8B", 1, 8192, 0.25, "ragged"),
    *(
        Row("Llama-3.1-8B", requests, 8192, 0.25, "ragged", mix=mix)
        for requests in (4, 16, 32, 64, 128)
        for mix in MIXES
    ),
    Row("Llama-3.1-8B", 4, 102_400, 0.25, "ragged"),
    *(Row("Llama-3.1-8B", 64, 32_768, 0.25, "ragged", mix=mix) for mix in ("same", "lognormal")),
    *(Row("Qwen3-30B-A3B", 32, 8192, 0.25, "ragged", mix=mix) for mix in ("same", "one long")),
    *(Row("Gemma-3-12B", 16, 8192, 0.25, "ragged", mix=mix) for mix in ("same", "lognormal")),
    *(Row("GPT-OSS-20B", 64, 8192, 0.25, "ragged", mix=mix) for mix in ("same", "lognormal")),
]

EMPTY_ROWS = [
    Row("Llama-3.1-8B", 1, 8192, retention, skew, slots=slots, new=new)
    for retention, skew in ((0.25, "ragged"), (1.0, "equal"))
    for new in (False, True)
    for slots in (16, 128)
]
