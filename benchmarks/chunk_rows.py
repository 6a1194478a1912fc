"""What the benchmark of chunk prefill attention measures: chunks, histories, windows, several requests in one call."""

import dataclasses

import numpy as np

from benchmarks.ragged_rows import skewed_budgets
from pallas_kernels.ragged_decode.shapes import SHAPES, Shape


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    chunk: int  # tokens of each request
    context: int
    retention: float = 1.0
    page: int = 64
    window: int = 0  # tokens that a query sees, itself included; then there are window - 1 before the chunk, and no pages
    requests: int = 1  # packed into one call

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def tokens(self) -> int:
        return self.requests * self.chunk

    @property
    def behind(self) -> int:
        """Keys before the chunk's, in order."""
        return max(self.window - 1, 0)

    def lengths(self) -> np.ndarray:
        """i32[requests, K]: history entries."""
        heads = self.shape.num_kv_heads
        kept = np.ones(heads) if self.retention == 1.0 else skewed_budgets(heads, self.retention)
        return np.tile(np.ceil(kept * self.context).astype(np.int32), (self.requests, 1))

    def flops(self) -> float:
        """4 D for each query and visible entry."""
        own = self.chunk * self.window if self.window else self.chunk * (self.chunk + 1) / 2
        history = self.chunk * int(self.lengths().sum())
        heads = self.shape.num_kv_heads * self.requests
        return 4 * self.shape.head_dim * self.shape.group * (history + heads * own)


MODELS = ("Llama-3.1-8B", "Gemma-3-12B", "GPT-OSS-20B")
GROUP_MODELS = ("Llama-3.2-3B", "Qwen3-14B")  # groups of three and of five query heads
WINDOWS = {"Gemma-3-12B": 1024, "GPT-OSS-20B": 128}
HISTORIES = ((0, 1.0), (25600, 1.0), (102400, 0.25), (102400, 1.0))
MORE_HISTORIES = ((2048, 1.0), (8192, 1.0), (8192, 0.25), (25600, 0.25))


def _rows(
    models: tuple[str, ...], chunks: tuple[int, ...], histories: tuple[tuple[int, float], ...]
) -> list[Row]:
    return [
        Row(model, chunk, context, retention)
        for model in models
        for chunk in chunks
        for context, retention in histories
    ]


SETS = {
    "main": _rows(MODELS, (512, 2048, 8192), HISTORIES),
    "more": [
        *_rows(MODELS, (512, 2048, 8192), ((25600, 0.25),)),
        *_rows(("Llama-3.1-8B",), (1024, 4096), (*HISTORIES, (25600, 0.25))),
        *_rows(MODELS, (2048,), ((8192, 1.0), (8192, 0.25))),
    ],
    "windows": [
        Row(model, chunk, 0, window=window)
        for model, window in WINDOWS.items()
        for chunk in (512, 2048, 8192)
    ],
    "requests": [
        Row(model, 256, context, retention, requests=8)
        for model in MODELS
        for context, retention in ((0, 1.0), (8192, 1.0), (8192, 0.25))
    ],
    "groups": _rows(GROUP_MODELS, (512, 2048, 8192), HISTORIES[:3]),
    "short": _rows(MODELS, (32, 128), ((8192, 1.0), (8192, 0.25), (102400, 0.25), (102400, 1.0))),
    "pages": [Row("Llama-3.1-8B", 2048, 25600, page=page) for page in (16, 32, 128)],
}
ALL_ROWS = list(
    dict.fromkeys(
        [
            *(row for rows in SETS.values() for row in rows),
            *_rows(MODELS + GROUP_MODELS, (512, 1024, 2048, 4096, 8192), (*HISTORIES, *MORE_HISTORIES)),
        ]
    )
)
