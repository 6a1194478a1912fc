"""Attention shapes of real models, shared by tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sinks: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


SHAPES = {
    "Llama-3.1-8B": Shape(32, 8, 128),
    "Gemma-3-12B": Shape(16, 8, 256),
    "Qwen3-4B": Shape(32, 8, 128),
    "Qwen3-30B-A3B": Shape(32, 4, 128),
    "GPT-OSS-20B": Shape(64, 8, 64, sinks=True),
    "Llama-3.2-3B": Shape(24, 8, 128),
    "Qwen3-14B": Shape(40, 8, 128),
}
