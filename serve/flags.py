"""The command line of `python -m serve`: vLLM's names where it has them."""

import argparse
import os
from collections.abc import Sequence

from models.overrides import parse_overrides
from serve.args import (
    CLUSTERS,
    DIVISIONS,
    DTYPES,
    LOG_LEVELS,
    ON_CPU,
    ON_GPU,
    SCORERS,
    ConfigError,
    ServeConfig,
)
from serve.sizes import parse_bytes
from serve.speculation import parse_speculation
from serve.tool_formats import PARSERS

API_KEY_VARIABLE = "TANGRAM_API_KEY"


def make_parser() -> argparse.ArgumentParser:
    """The parser; every destination is a field of ServeConfig."""
    parser = argparse.ArgumentParser(
        prog="python -m serve",
        description="Serve a model over an OpenAI-compatible HTTP API, with a KV-cache budget for every head.",
        argument_default=argparse.SUPPRESS,  # defaults live in ServeConfig alone
        allow_abbrev=False,
    )
    default = ServeConfig()
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", help=f"short name, hub name, directory or .gguf file (default {default.model})"
    )
    model.add_argument(
        "--served-model-name",
        dest="served_model_names",
        nargs="+",
        metavar="NAME",
        help="names that requests may give; the first one is the default (default: the model's name)",
    )
    model.add_argument(
        "--hf-overrides",
        type=parse_overrides,
        metavar="JSON",
        help='fields that replace those of config.json; as {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}} '
        "for a longer context",
    )
    model.add_argument("--dtype", help=f"{', '.join(DTYPES)} (default {default.dtype})")
    model.add_argument(
        "--quantization",
        "-q",
        help="fp8: the weights of the layers' products become FP8 as they are loaded, half of bfloat16's memory, read as "
        "they are by a Hopper GPU (elsewhere slower than without); fp8-dynamic: where a step has many, the tokens that "
        "they multiply too, which makes prompts and steps of many requests faster",
    )
    model.add_argument(
        "--max-model-len", type=int, metavar="N", help="longest prompt plus generation, in tokens"
    )
    model.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template of conversations in place of the tokenizer's: a file, or the template itself",
    )
    model.add_argument("--seed", type=int, help="of requests that bring none (default 0)")
    model.add_argument(
        "--generation-config",
        help="sampling of requests that say nothing: as the model's generation_config.json says (auto, the default), "
        "or plainly at temperature 1 (vllm)",
    )

    budget = parser.add_argument_group("budgets of the heads")
    budget.add_argument(
        "--profile", metavar="FILE", help="calibrated budgets (.npz), from `python -m calibrate`"
    )
    budget.add_argument(
        "--retention",
        type=float,
        help="kept fraction of the KV cache; 1.0 keeps everything (default: as calibrated)",
    )
    budget.add_argument(
        "--max-retention",
        type=float,
        metavar="F",
        help="the most that a request may keep by its kv_retention (default: --retention, or the profile's target)",
    )
    budget.add_argument(
        "--heads-per-page",
        type=int,
        metavar="N",
        help="KV heads that share pages, as long as their largest budget (default: up to 4, if budgets are alike)",
    )
    budget.add_argument("--cluster", help=f"how heads are grouped: {', '.join(CLUSTERS)} (default layer)")
    budget.add_argument(
        "--decode-division",
        help=f"how a GPU's work on decode attention is divided: {', '.join(DIVISIONS)} (default equal shares)",
    )
    budget.add_argument("--scorer", help=f"which tokens stay: {', '.join(SCORERS)} (default {SCORERS[0]})")
    budget.add_argument(
        "--tail-limit", type=int, metavar="N", help="generated tokens that may stay whole (default 256)"
    )
    budget.add_argument(
        "--min-entries",
        type=int,
        metavar="N",
        help="entries that each head keeps at least (default 128); below 36 first tokens get lost",
    )
    budget.add_argument(
        "--drift-interval",
        type=float,
        metavar="S",
        help="measure a prompt every S seconds at most, as calibration did, and warn when prompts want more than the "
        "budgets; each time costs a dense prefill of as many tokens as a sample has (default 0: never)",
    )

    memory = parser.add_argument_group("batch and memory")
    by_machine = "(default {0} on a CPU, {1} on a GPU)"
    memory.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help=f"requests at once {by_machine.format(ON_CPU.max_num_seqs, ON_GPU.max_num_seqs)}",
    )
    memory.add_argument(
        "--max-num-partial-prefills",
        type=int,
        metavar="N",
        help="short prompts prefilled in one step, at most "
        f"{by_machine.format(ON_CPU.max_num_partial_prefills, ON_GPU.max_num_partial_prefills)}; with more than one a CPU "
        "takes a minute longer to start, since one program is N times as large",
    )
    memory.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens of one step, the chunk of prefill included "
        + by_machine.format(ON_CPU.max_num_batched_tokens, ON_GPU.max_num_batched_tokens),
    )
    memory.add_argument(
        "--speculative-config",
        dest="speculation",
        type=parse_speculation,
        metavar="JSON",
        help='draft tokens from what the conversation says already and verify several in one step, as {"method": "ngram", '
        '"num_speculative_tokens": 3}; faster for few requests at a time whose answers quote, edit or repeat (default: none '
        "are drafted)",
    )
    memory.add_argument(
        "--block-size",
        "--page-size",
        dest="page_size",
        type=int,
        metavar="N",
        help=f"entries of a page {by_machine.format(ON_CPU.page_size, ON_GPU.page_size)}",
    )
    memory.add_argument(
        "--kv-cache-dtype",
        metavar="DTYPE",
        help="of keys and values: auto, as the model (default), or int8, half the bytes of bfloat16",
    )
    memory.add_argument("--num-pages", type=int, metavar="N", help="pages of the pool")
    memory.add_argument(
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        dest="kv_cache_bytes",
        type=parse_bytes,
        metavar="SIZE",
        help="size of the pool, e.g. 2GiB (instead of --num-pages)",
    )
    memory.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="F",
        help="part of a GPU's memory to use (default 0.9)",
    )
    memory.add_argument(
        "--enable-prefix-caching",
        "--prefix-cache",
        dest="prefix_cache",
        action=argparse.BooleanOptionalAction,
        help="keep the compressed pages of conversations for their next turn (default: on)",
    )
    memory.add_argument(
        "--max-stored-sessions", type=int, metavar="N", help=f"(default {default.max_stored_sessions})"
    )
    memory.add_argument(
        "--kv-offloading-size",
        type=float,
        metavar="GIB",
        help="host memory for conversations that the pool has no room for until they go on (default 0: none)",
    )
    memory.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        metavar="N",
        help="devices over which the model and its KV cache are spread (default 1)",
    )

    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", help=f"address to listen on (default {default.host}; 0.0.0.0: all)")
    http.add_argument("--port", type=int, help=f"(default {default.port}; 0: any free one)")
    http.add_argument(
        "--api-key",
        dest="api_keys",
        nargs="+",
        metavar="KEY",
        help=f"clients must send one of these keys (or set {API_KEY_VARIABLE})",
    )
    http.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="web pages of these origins may call the API, e.g. https://example.org; * for all (default: none)",
    )
    http.add_argument(
        "--max-choices", type=int, metavar="N", help="prompts times n of one request (default 128)"
    )
    http.add_argument(
        "--tool-call-parser",
        help=f"how the model writes calls of tools: {', '.join(PARSERS)} (default auto: as its chat template says)",
    )
    http.add_argument(
        "--reasoning-parser",
        help="how the model writes thoughts: think (between <think> and </think>), harmony, none, or as its chat template "
        "says (auto, the default)",
    )
    http.add_argument(
        "--max-body-bytes", type=parse_bytes, metavar="SIZE", help="of a request (default 8MiB)"
    )
    http.add_argument(
        "--stream-interval",
        type=int,
        metavar="N",
        help="tokens of a choice that are sent together, but for its first one: the more, the less work for the server and "
        "the less smooth a stream (default 1)",
    )
    http.add_argument(
        "--api-server-count",
        type=int,
        metavar="N",
        help="processes that speak HTTP beside the engine's, each for 20,000 events a second or so (default 1)",
    )
    http.add_argument(
        "--shutdown-timeout", type=int, metavar="S", help="seconds for running responses (default 15)"
    )
    http.add_argument(
        "--log-level", "--uvicorn-log-level", dest="log_level", help=f"{', '.join(LOG_LEVELS)} (default info)"
    )
    return parser


def parse_args(argv: Sequence[str] | None = None) -> ServeConfig:
    """The checked configuration; prints what is wrong and exits with status 2 otherwise."""
    parser = make_parser()
    values = vars(parser.parse_args(argv))
    for name in ("served_model_names", "api_keys", "allowed_origins"):
        if name in values:
            values[name] = tuple(values[name])
    if "api_keys" not in values and os.environ.get(API_KEY_VARIABLE):
        values["api_keys"] = (os.environ[API_KEY_VARIABLE],)
    try:
        return ServeConfig(**values)
    except ConfigError as error:
        faults = str(error).splitlines()
        parser.error("\n  ".join(faults) if len(faults) == 1 else "\n  " + "\n  ".join(faults))
