"""The command line of `python -m serve`: vLLM's names where it has them, checked once, with errors that help."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from models.overrides import parse_overrides
from serve.sizes import parse_bytes
from serve.thought_prompt import PARSERS as REASONING_PARSERS
from serve.tool_formats import PARSERS

DEFAULT_MODEL = "smollm2-135m-instruct"
Cluster = Literal["layer", "model", "adjacent"]
CLUSTERS = get_args(Cluster)
SCORERS = ("expected_attention", "snapkv", "keydiff", "streaming_llm")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8")
GENERATION_CONFIGS = ("auto", "vllm")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
API_KEY_VARIABLE = "TANGRAM_API_KEY"


class Batching(NamedTuple):
    """How much runs at once; see the fields of these names in ServeConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int


ON_CPU, ON_GPU = Batching(16, 512, 16), Batching(128, 8192, 64)


class ConfigError(ValueError):
    """All that is wrong with a configuration, one line each."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything that `python -m serve` can be told. None means: chosen from the model or the machine."""

    model: str = DEFAULT_MODEL
    served_model_names: tuple[str, ...] = ()  # empty: the model's own name
    hf_overrides: Mapping[str, Any] | None = None  # fields that replace those of the model's config.json
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"  # as the model's, or int8
    max_model_len: int | None = None  # tokens; None: the model's
    seed: int = 0
    generation_config: str = "auto"  # whose defaults for sampling: the model's own, or none

    max_num_seqs: int | None = None  # requests (choices) that run at once
    max_num_batched_tokens: int | None = None  # tokens of one engine step
    page_size: int | None = None  # entries of a page
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True
    max_stored_sessions: int = 64
    kv_offloading_size: float = 0.0  # GiB of host memory for stored rows that must leave the pool

    profile: str | None = None  # a .npz file; None: the one shipped for the model, otherwise uniform budgets
    retention: float | None = None  # None: as calibrated
    max_retention: float | None = None  # that a request may ask for; None: the server's
    heads_per_page: int | None = None
    cluster: Cluster = "layer"
    scorer: str = "expected_attention"
    tail_limit: int | None = None  # generated tokens that may stay whole
    min_entries: int | None = None  # entries that every group keeps at least
    drift_interval: float = 0.0  # seconds between two prompts whose wants are measured; 0: none are

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call the API
    max_choices: int = 128
    tool_call_parser: str = "auto"  # how the model writes calls of tools
    reasoning_parser: str = "auto"  # how it writes thoughts
    max_body_bytes: int = 8 * 2**20
    shutdown_timeout: int = 15  # seconds
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Check every value; raises ConfigError with all faults at once."""
        faults = [*self._range_faults(), *self._choice_faults(), *self._joint_faults()]
        if faults:
            raise ConfigError("\n".join(faults))

    def _range_faults(self) -> list[str]:
        ranges: tuple[tuple[str, float | None, float, float], ...] = (
            ("--max-model-len", self.max_model_len, 2, 2**24),
            ("--seed", self.seed, -(2**63), 2**63 - 1),
            ("--max-num-seqs", self.max_num_seqs, 1, 65536),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 2**20),
            ("--num-pages", self.num_pages, 1, 2**31 - 1),
            ("--kv-cache-memory", self.kv_cache_bytes, 1, 2**50),
            ("--max-stored-sessions", self.max_stored_sessions, 0, 2**20),
            ("--heads-per-page", self.heads_per_page, 1, 1024),
            ("--tail-limit", self.tail_limit, 1, 2**24),
            ("--min-entries", self.min_entries, 0, 2**24),
            ("--drift-interval", self.drift_interval, 0, 10**7),
            ("--port", self.port, 0, 65535),
            ("--max-choices", self.max_choices, 1, 65536),
            ("--max-body-bytes", self.max_body_bytes, 1024, 2**31 - 1),
            ("--shutdown-timeout", self.shutdown_timeout, 0, 86400),
        )
        faults = [
            f"{flag} is {value}: write a number from {low} to {high}"
            for flag, value, low, high in ranges
            if value is not None and not low <= value <= high
        ]
        if self.page_size not in (None, 4, 8, 16, 32, 64, 128, 256):
            faults.append(f"--block-size is {self.page_size}: write a power of two from 4 to 256, e.g. 16")
        for flag, fraction in (
            ("--retention", self.retention),
            ("--max-retention", self.max_retention),
            ("--gpu-memory-utilization", self.gpu_memory_utilization),
        ):
            # The comparison is false for NaN too.
            if fraction is not None and not 0.0 < fraction <= 1.0:
                hint = f", e.g. {fraction / 100:g} for {fraction:g}%" if 1 < fraction <= 100 else ""
                faults.append(f"{flag} is {fraction:g}: write a fraction above 0 and at most 1{hint}")
        if not 0.0 <= self.kv_offloading_size <= 2**20:
            faults.append(
                f"--kv-offloading-size is {self.kv_offloading_size:g}: write GiB of host memory, e.g. 16, or 0 for none"
            )
        return faults

    def _choice_faults(self) -> list[str]:
        choices = (
            ("--dtype", self.dtype, DTYPES),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("--cluster", self.cluster, CLUSTERS),
            ("--scorer", self.scorer, SCORERS),
            ("--generation-config", self.generation_config, GENERATION_CONFIGS),
            ("--log-level", self.log_level, LOG_LEVELS),
            ("--tool-call-parser", self.tool_call_parser, PARSERS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        )

        def instead(value: str, known: Sequence[str]) -> str:
            if known is KV_CACHE_DTYPES and value.startswith("fp8"):
                return "int8, as large and more exact: every key and value has a scale of its own"
            return f"one of {', '.join(known)}"

        return [
            f"{flag} is '{value}': write {instead(value, known)}"
            for flag, value, known in choices
            if value not in known
        ]

    def _joint_faults(self) -> list[str]:
        faults = []
        if self.drift_interval and self.retention == 1.0:
            faults.append(
                "--drift-interval has nothing to watch where --retention 1.0 keeps all: leave one out"
            )
        if not self.model:
            faults.append(f"--model is empty: write a name or a directory, e.g. {DEFAULT_MODEL}")
        if not self.host:
            faults.append("--host is empty: write 127.0.0.1 for this machine alone, 0.0.0.0 for all")
        if not all(self.served_model_names):
            faults.append("--served-model-name is empty: write a name")
        if not all(key and key == key.strip() for key in self.api_keys):
            faults.append(
                "--api-key is empty or begins or ends with a space: write a key, or leave the flag out"
            )
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                faults.append(
                    f"--allowed-origins {origin}: write a scheme and a host without a path, e.g. https://example.org, or *"
                )
        if self.profile is not None and not Path(self.profile).is_file():
            faults.append(
                f"--profile {self.profile}: no such file; make one with "
                f"`python -m calibrate --model {self.model or DEFAULT_MODEL} --out {self.profile}`"
            )
        parsers = {self.tool_call_parser, self.reasoning_parser}
        if "harmony" in parsers and not parsers <= {"auto", "harmony", "none"}:
            faults.append(
                "--tool-call-parser harmony and --reasoning-parser harmony are one format: write it, or auto, for both"
            )
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            faults.append("--num-pages and --kv-cache-memory say the same thing: write one of them")
        if self.max_retention is not None and self.max_retention < (self.retention or 0.0):
            faults.append(
                f"--max-retention ({self.max_retention:g}) is below --retention ({self.retention:g}): write at least that"
            )
        if self.kv_offloading_size > 0 and not (self.prefix_cache and self.max_stored_sessions):
            off = "--no-enable-prefix-caching" if not self.prefix_cache else "--max-stored-sessions 0"
            faults.append(
                f"--kv-offloading-size {self.kv_offloading_size:g} keeps stored conversations, of which {off} leaves none: "
                "write one of them"
            )
        tokens, requests = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and requests is not None and 1 <= tokens < requests:
            faults.append(
                f"--max-num-batched-tokens ({tokens}) is below --max-num-seqs ({requests}), so that not every running "
                f"request gets a token in a step: write at least {requests}"
            )
        return faults

    @property
    def host_bytes(self) -> int:
        """Of `kv_offloading_size`."""
        return int(self.kv_offloading_size * 2**30)

    def on(self, machine: Batching) -> Batching:
        """What was asked for, the rest as `machine` has it, so that every running request gets a token in a step."""
        requests, tokens = self.max_num_seqs, self.max_num_batched_tokens
        return Batching(
            requests or min(machine.max_num_seqs, tokens or machine.max_num_seqs),
            tokens or max(machine.max_num_batched_tokens, requests or 1),
            self.page_size or machine.page_size,
        )


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
    model.add_argument("--model", help=f"name, hub name or directory (default {default.model})")
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
        "--max-model-len", type=int, metavar="N", help="longest prompt plus generation, in tokens"
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
    budget.add_argument("--retention", type=float, help="kept fraction of the KV cache; 1.0 keeps everything")
    budget.add_argument(
        "--max-retention",
        type=float,
        metavar="F",
        help="the most that a request may keep by its kv_retention (default: --retention)",
    )
    budget.add_argument("--heads-per-page", type=int, metavar="N", help="KV heads that share a page table")
    budget.add_argument("--cluster", help=f"how heads are grouped: {', '.join(CLUSTERS)} (default layer)")
    budget.add_argument("--scorer", help=f"which tokens stay: {', '.join(SCORERS)} (default {SCORERS[0]})")
    budget.add_argument("--tail-limit", type=int, metavar="N", help="generated tokens that may stay whole")
    budget.add_argument(
        "--min-entries",
        type=int,
        metavar="N",
        help="entries that each head keeps at least; below 36 first tokens get lost",
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
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens of one step, the chunk of prefill included "
        + by_machine.format(ON_CPU.max_num_batched_tokens, ON_GPU.max_num_batched_tokens),
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
