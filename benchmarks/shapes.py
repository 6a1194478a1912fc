"""Shapes of models that the benchmarks take, with random weights."""

from models.config import ModelConfig, RopeScaling
from models.gemma import gemma3_fields
from models.gpt_oss import gpt_oss_fields

LLAMA_8B = ModelConfig(
    name="llama-3.1-8b",
    vocab_size=128_256,
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131_072,
    rope_theta=500_000.0,
)
LLAMA_70B = LLAMA_8B.replace(
    name="llama-3.1-70b", num_layers=80, hidden_size=8192, intermediate_size=28_672, num_heads=64
)
LLAMA_3B = LLAMA_8B.replace(
    name="llama-3.2-3b",
    num_layers=28,
    hidden_size=3072,
    intermediate_size=8192,
    num_heads=24,
    tie_embeddings=True,
)
LLAMA_1B = LLAMA_8B.replace(
    name="llama-3.2-1b",
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    head_dim=64,
    tie_embeddings=True,
)
QWEN3_4B = ModelConfig(
    name="qwen3-4b",
    vocab_size=151_936,
    num_layers=36,
    hidden_size=2560,
    intermediate_size=9728,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131_072,
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
)
QWEN3_1B7 = QWEN3_4B.replace(
    name="qwen3-1.7b", num_layers=28, hidden_size=2048, intermediate_size=6144, num_heads=16
)
QWEN3_14B = QWEN3_4B.replace(
    name="qwen3-14b",
    num_layers=40,
    hidden_size=5120,
    intermediate_size=17_408,
    num_heads=40,
    tie_embeddings=False,
)
QWEN2_7B = QWEN3_4B.replace(
    name="qwen2.5-7b",
    vocab_size=152_064,
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18_944,
    num_heads=28,
    num_kv_heads=4,
    tie_embeddings=False,
    qk_norm=False,
    qkv_bias=True,
)
GEMMA_3_12B = ModelConfig(
    name="gemma-3-12b",
    vocab_size=262_208,
    num_layers=48,
    hidden_size=3840,
    intermediate_size=15_360,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    max_positions=131_072,
    rope_theta=1_000_000.0,
    rope_scaling=RopeScaling(kind="linear", factor=8.0),
    norm_eps=1e-6,
    tie_embeddings=True,
    sliding_window=1024,
    sliding_layers=tuple(layer for layer in range(48) if layer % 6 != 5),
    sliding_rope_theta=10_000.0,
    **gemma3_fields(hidden_size=3840, query_scale=256**-0.5),
)
GEMMA_3_27B = GEMMA_3_12B.replace(
    name="gemma-3-27b",
    num_layers=62,
    hidden_size=5376,
    intermediate_size=21_504,
    num_heads=32,
    num_kv_heads=16,
    head_dim=128,
    sliding_layers=tuple(layer for layer in range(62) if layer % 6 != 5),
    **gemma3_fields(hidden_size=5376, query_scale=168**-0.5),
)
QWEN3_30B_A3B = ModelConfig(
    name="qwen3-30b-a3b",
    vocab_size=151_936,
    num_layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    max_positions=262_144,
    rope_theta=10_000_000.0,
    norm_eps=1e-6,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
    expert_size=768,
)
GPT_OSS_20B = ModelConfig(
    name="gpt-oss-20b",
    vocab_size=201_088,
    num_layers=24,
    hidden_size=2880,
    intermediate_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    max_positions=131_072,
    rope_theta=150_000.0,
    rope_scaling=RopeScaling.yarn(32.0, 4096, truncate=False),
    sliding_window=128,
    sliding_layers=tuple(range(0, 24, 2)),
    num_experts=32,
    experts_per_token=4,
    expert_size=2880,
    experts_mxfp4=True,
    **gpt_oss_fields(),
)
GPT_OSS_120B = GPT_OSS_20B.replace(
    name="gpt-oss-120b", num_layers=36, sliding_layers=tuple(range(0, 36, 2)), num_experts=128
)
SHAPES = {
    shape.name: shape
    for shape in (
        LLAMA_8B,
        LLAMA_70B,
        LLAMA_3B,
        LLAMA_1B,
        QWEN3_4B,
        QWEN3_1B7,
        QWEN3_14B,
        QWEN2_7B,
        GEMMA_3_12B,
        GEMMA_3_27B,
        QWEN3_30B_A3B,
        GPT_OSS_20B,
        GPT_OSS_20B.replace(name="gpt-oss-20b-bf16", experts_mxfp4=False),
        GPT_OSS_120B,
    )
}
