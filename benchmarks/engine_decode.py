"""What the engine adds to a decode step: scheduling, sampling and reading tokens, Llama-3.1-8B's shape, random weights.

  python -m benchmarks.engine_decode                              32 requests of 8K at retention 0.25 on one Hopper GPU
  python -m benchmarks.engine_decode --requests 1 --shape small --context 4000     one request, SmolLM2-135M's shape

Per kind of sampling: the time between two tokens of a request while all of them decode, and its ratio to the decode step
alone (`benchmarks.decode_step`, same run, same budgets, its pool not larger than needed). Random weights make flat logits
(a standard deviation of 0.026), so that top-p 0.9 keeps tens of thousands of tokens; at temperature 0.001 it keeps one to
four, as it mostly does for a real model.
"""

import argparse
import json
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import decode_step, shapes
from benchmarks.options import add_fp8, add_heads_per_page
from models.config import ModelConfig
from models.fp8_weights import with_fp8_weights
from models.registry import LoadedModel
from pallas_kernels import byte_pages
from serve.args import ServeConfig
from serve.build import build_engine
from serve.engine import Engine
from serve.program_store import keep_compiled
from serve.request import GenerationRequest, SamplingParams, TokenOutput
from tangram_jax import sampling

SMALL = ModelConfig(
    name="smollm2-135m",
    vocab_size=49_152,
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    rope_theta=100_000.0,
)
SHAPES = shapes.SHAPES | {"small": SMALL}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top-p 0.9, peaked": {"temperature": 0.001, "top_p": 0.9},
    "top-p 0.9, flat": {"temperature": 1.0, "top_p": 0.9},
}


class Outputs:
    """Collects what the engine says to some requests, and when."""

    def __init__(self, requests: int) -> None:
        self.made = time.perf_counter()
        self.at: list[list[float]] = [[] for _ in range(requests)]  # when each request's tokens came
        self.tokens: list[list[int]] = [[] for _ in range(requests)]
        self.cached = 0  # prompt tokens that the engine still held
        self.began, self.done = threading.Event(), threading.Event()
        self.errors: list[str] = []
        self._left = requests

    def receiver(self, i: int) -> Any:
        def receive(output: TokenOutput) -> None:
            self.cached += output.cached_tokens
            if output.token_id is not None:
                self.at[i].append(time.perf_counter())
                self.tokens[i].append(output.token_id)
                if not self.began.is_set() and all(self.at):
                    self.began.set()
            if output.finish_reason:
                if output.error:
                    self.errors.append(output.error)
                self._left -= 1
                if not self._left:
                    self.done.set()

        return receive

    def interval(self) -> float:
        """Median seconds between two tokens while all requests decode."""
        start, end = max(a[0] for a in self.at), min(a[-1] for a in self.at)
        steps = [t for t in self.at[0] if start < t < end]
        return float(np.median(np.diff(steps)))


def run(engine: Engine, prompts: np.ndarray, steps: int, most: int, params: dict[str, Any]) -> dict[str, Any]:
    """All prompts at once; they decode together for `steps` tokens after the last one's prefill, `most` in all."""
    outputs = Outputs(len(prompts))
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        how = SamplingParams(max_tokens=most, ignore_eos=True, seed=i, **params)
        request = GenerationRequest(request_id=str(i), prompt_ids=prompt.tolist(), sampling=how)
        engine.submit(request, outputs.receiver(i))
    while not outputs.began.wait(1.0) and not outputs.done.is_set():
        pass
    prefill = time.perf_counter() - began
    while not outputs.errors and min(len(a) for a in outputs.at) < steps:
        time.sleep(0.05)
    if outputs.errors:
        raise RuntimeError(outputs.errors[0])
    for i in range(len(prompts)):
        engine.abort(str(i))
    until_idle(engine)
    return {"ms": outputs.interval() * 1e3, "prefill_tokens_per_s": prompts.size / prefill}


def answer_all(
    engine: Engine, prompts: list[list[int]], generate: int, ignore_eos: bool = True
) -> tuple[float, Outputs]:
    """Seconds until all are answered greedily with `generate` tokens, and what came."""
    how = SamplingParams(max_tokens=generate, ignore_eos=ignore_eos, temperature=0.0)
    outputs = Outputs(len(prompts))
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        request = GenerationRequest(request_id=str(i), prompt_ids=prompt, sampling=how)
        engine.submit(request, outputs.receiver(i))
    outputs.done.wait()
    seconds = time.perf_counter() - began
    if outputs.errors:
        raise RuntimeError(outputs.errors[0])
    until_idle(engine)
    return seconds, outputs


def until_idle(engine: Engine) -> None:
    """Its numbers are of all that was then."""
    while engine.stats().requests_running or engine.stats().requests_waiting:
        time.sleep(0.01)


def most_tokens(args: argparse.Namespace) -> int:
    """Tokens that a request may generate: `steps`, and what the first ones get while the last ones' prompts are prefilled.

    Prompts are prefilled one after another, beside decode in chunks of a quarter of the largest; twice as many for safety.
    """
    return args.steps + 2 * args.requests * -(-args.context // min(2048, max(args.chunk // 4, 32)))


def start_engine(
    config: ModelConfig, params: Any, retention: float, *, programs: str | None = None, **options: Any
) -> Engine:
    """A running engine with lognormal budgets around the retention; `options` are fields of ServeConfig.

    `programs`: directory that keeps traced programs for the next start.
    """
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        decode_step.ragged(config, retention).save(file.name)
        served = ServeConfig(model=config.name, profile=file.name, min_entries=0, dtype="bfloat16", **options)
        model = LoadedModel(config, params, cast(Any, None), config.name)  # nobody asks for text here
        built = build_engine(
            served, model, dtype=jnp.bfloat16, on_gpu=jax.default_backend() == "gpu",
            programs=Path(programs) / "programs" if programs else None,
        )  # fmt: skip
    print(built.summary, flush=True)
    began = time.perf_counter()
    built.engine.start()
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    return built.engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--retention", type=float, default=0.25)
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    add_fp8(parser)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--devices", type=int, default=1, help="GPUs over which model and cache are spread")
    parser.add_argument("--sampling", nargs="*", choices=SAMPLING, default=list(SAMPLING))
    parser.add_argument("--scorer", default="snapkv")
    parser.add_argument("--plain", action="store_true", help="sampling without sampling.compiler_options()")
    parser.add_argument(
        "--programs", help="directory that keeps programs for the next start, as a server's cache does"
    )
    add_heads_per_page(parser)
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    if args.programs:
        keep_compiled(Path(args.programs) / "xla")
    config = decode_step.first_layers(SHAPES[args.shape], args.layers)
    if args.fp8:
        config = with_fp8_weights(config, dynamic=args.fp8 == "dynamic")
    longest = args.context + most_tokens(args)
    if longest > config.max_positions:
        parser.error(f"{longest} tokens a request are more than {config.max_positions}: lower --context")
    params = decode_step.random_weights(config, args.devices)
    alone = decode_step.measure(
        params, config, args.requests, args.context, args.retention,
        argparse.Namespace(
            page_size=args.page_size, pool_gib=0.0, heads_per_page=args.heads_per_page, empty_slots=0, profile=False,
            devices=args.devices, unlinked=False, cluster="layer",
        ),
        roof=1.0,  # its ratio to the memory's pace is for benchmarks.decode_step to say
        dtype=byte_pages.DTYPE if args.kv_cache_dtype == "int8" else jnp.bfloat16,
    )  # fmt: skip
    print(f"{jax.devices()[0].device_kind}: decode step alone {alone['ms']} ms")
    with mock.patch.object(sampling, "compiler_options", lambda: None) if args.plain else nullcontext():
        engine = start_engine(
            config, params, args.retention, tensor_parallel_size=args.devices,
            max_num_seqs=args.requests, max_num_batched_tokens=args.chunk, max_model_len=longest,
            page_size=args.page_size, heads_per_page=args.heads_per_page, prefix_cache=False, scorer=args.scorer,
            programs=args.programs, kv_cache_dtype=args.kv_cache_dtype,
        )  # fmt: skip
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (args.requests, args.context))
    rows = []
    for name in args.sampling:
        row = {"sampling": name} | run(engine, prompts, args.steps, most_tokens(args), SAMPLING[name])
        row["ratio"] = row["ms"] / alone["ms"]
        rows.append(row)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    engine.stop()
    if args.out:
        what = {
            "device": jax.devices()[0].device_kind,
            "arguments": vars(args),
            "alone_ms": alone["ms"],
            "rows": rows,
        }
        Path(args.out).write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
