"""What `python -m serve` can be told, checked once, with errors that help. `serve.flags` reads it off a command line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from models.registry import DEFAULT_MODEL, QUANTIZATIONS
from models.registry import DTYPES as MODEL_DTYPES
from serve.speculation import Speculation
from serve.thought_prompt import PARSERS as REASONING_PARSERS
from serve.tool_formats import PARSERS
from tangram_jax.plan import CLUSTERS, DIVISIONS, Cluster, Division

SCORERS = ("expected_attention", "snapkv", "keydiff", "streaming_llm", "kv_compress")
DTYPES = ("auto", *MODEL_DTYPES)
KV_CACHE_DTYPES = (*DTYPES, "int8")
GENERATION_CONFIGS = ("auto", "vllm")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


class Batching(NamedTuple):
    """How much runs at once; see the fields of these names in ServeConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    max_num_partial_prefills: int


ON_CPU, ON_GPU = Batching(16, 512, 16, 1), Batching(128, 8192, 64, 4)


class ConfigError(ValueError):
    """All that is wrong with a configuration, one line each."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything that `python -m serve` can be told. None means: chosen from the model or the machine."""

    model: str = DEFAULT_MODEL
    served_model_names: tuple[str, ...] = ()  # empty: the model's own name
    hf_overrides: Mapping[str, Any] | None = None  # fields that replace those of the model's config.json
    dtype: str = "auto"
    quantization: str | None = None  # of the weights as they are loaded; None: as --dtype says
    kv_cache_dtype: str = "auto"  # as the model's, or int8
    max_model_len: int | None = None  # tokens; None: the model's
    chat_template: str | None = None  # a file, or the template itself; None: the tokenizer's
    seed: int = 0
    generation_config: str = "auto"  # whose defaults for sampling: the model's own, or none

    max_num_seqs: int | None = None  # requests (choices) that run at once
    max_num_partial_prefills: int | None = None  # prompts of which a step has a chunk
    max_num_batched_tokens: int | None = None  # tokens of one engine step
    page_size: int | None = None  # entries of a page
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    speculation: Speculation | None = None  # tokens drafted and verified; None: none
    prefix_cache: bool = True
    max_stored_sessions: int = 64
    kv_offloading_size: float = 0.0  # GiB of host memory for stored rows that must leave the pool
    tensor_parallel_size: int = 1  # devices over which the model and every page are spread

    profile: str | None = None  # a .npz file; None: the one shipped for the model, otherwise uniform budgets
    retention: float | None = None  # None: as calibrated
    max_retention: float | None = None  # that a request may ask for; None: the server's
    heads_per_page: int | None = None
    cluster: Cluster = "layer"
    decode_division: Division = "equal"  # of decode attention among the CTAs of a GPU
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
    stream_interval: int = 1  # tokens of a stream that are sent together
    api_server_count: int = 1  # processes that speak HTTP, beside the engine's
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
            ("--max-num-partial-prefills", self.max_num_partial_prefills, 1, 8),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 2**20),
            ("--num-pages", self.num_pages, 1, 2**31 - 1),
            ("--kv-cache-memory", self.kv_cache_bytes, 1, 2**50),
            ("--max-stored-sessions", self.max_stored_sessions, 0, 2**20),
            ("--heads-per-page", self.heads_per_page, 1, 1024),
            ("--tail-limit", self.tail_limit, 1, 2**24),
            ("--min-entries", self.min_entries, 0, 2**24),
            ("--drift-interval", self.drift_interval, 0, 10**7),
            ("--tensor-parallel-size", self.tensor_parallel_size, 1, 64),
            ("--port", self.port, 0, 65535),
            ("--max-choices", self.max_choices, 1, 65536),
            ("--max-body-bytes", self.max_body_bytes, 1024, 2**31 - 1),
            ("--stream-interval", self.stream_interval, 1, 1024),
            ("--api-server-count", self.api_server_count, 1, 64),
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
        choices: tuple[tuple[str, str | None, Sequence[str]], ...] = (
            ("--dtype", self.dtype, DTYPES),
            ("--quantization", self.quantization, QUANTIZATIONS),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("--cluster", self.cluster, CLUSTERS),
            ("--decode-division", self.decode_division, DIVISIONS),
            ("--scorer", self.scorer, SCORERS),
            ("--generation-config", self.generation_config, GENERATION_CONFIGS),
            ("--log-level", self.log_level, LOG_LEVELS),
            ("--tool-call-parser", self.tool_call_parser, PARSERS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        )

        def instead(value: str, known: Sequence[str]) -> str:
            if known is KV_CACHE_DTYPES and value.startswith("fp8"):
                return "int8, as large and more exact: every key and value has a scale of its own"
            if known is QUANTIZATIONS:
                return "fp8 or fp8-dynamic, or leave it out: how a checkpoint is quantised itself is found without it"
            return f"one of {', '.join(known)}"

        return [
            f"{flag} is '{value}': write {instead(value, known)}"
            for flag, value, known in choices
            if value is not None and value not in known
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
        if self.tensor_parallel_size > 1:
            for flag, there in (
                ("--drift-interval", self.drift_interval > 0),
                ("--cluster model", self.cluster == "model"),
            ):
                if there:
                    faults.append(
                        f"{flag} works on one device, not with --tensor-parallel-size: leave one out"
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
            self.max_num_partial_prefills or machine.max_num_partial_prefills,
        )
