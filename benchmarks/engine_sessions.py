"""Conversations that come back: what a turn takes when the histories fit in the KV memory compressed, and full do not.

  python -m benchmarks.engine_sessions                   16 conversations of 30K tokens, 8B shape, on one Hopper GPU
  python -m benchmarks.engine_sessions --sessions 6 --history 100000

All conversations send a turn at once: `--add` new tokens, `--generate` tokens back. They differ in retention alone and
have as much memory for keys and values, by default what vLLM has beside the weights of Llama-3.1-8B on a card of 80 GB.
Weights are random, budgets lognormal over the heads around the retention. "cached" is the share of the prompts' tokens that
the engine still held.
"""

import argparse
import gc
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import decode_step
from benchmarks.engine_decode import SHAPES
from models.config import ModelConfig
from models.registry import LoadedModel
from serve.args import ServeConfig
from serve.build import build_engine
from serve.engine import Engine
from serve.request import GenerationRequest, SamplingParams, TokenOutput


def start(config: ModelConfig, params: Any, args: argparse.Namespace, retention: float) -> Engine:
    longest = args.history + args.turns * (args.add + args.generate)
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        decode_step.ragged(config, retention).save(file.name)
        served = ServeConfig(
            model=config.name,
            profile=file.name,
            max_num_seqs=args.sessions,
            max_stored_sessions=args.sessions,
            max_num_batched_tokens=args.chunk,
            max_model_len=longest,
            kv_cache_bytes=int(args.kv_gib * 2**30),
            page_size=args.page_size,
            min_entries=0,
            scorer=args.scorer,
            dtype="bfloat16",
        )
        model = LoadedModel(config, params, cast(Any, None), config.name)  # nobody asks for text here
        built = build_engine(served, model, dtype=jnp.bfloat16, on_gpu=jax.default_backend() == "gpu")
    print(built.summary, flush=True)
    began = time.perf_counter()
    built.engine.start()
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    return built.engine


def take_turn(
    engine: Engine, prompts: list[list[int]], generate: int
) -> tuple[float, float, list[list[int]]]:
    """Seconds until all have answered, the share of prompt tokens found in the cache, the answers."""
    answers: list[list[int]] = [[] for _ in prompts]
    cached, left, done = [0], [len(prompts)], threading.Event()
    errors: list[str] = []

    def receiver(i: int) -> Any:
        def receive(output: TokenOutput) -> None:
            cached[0] += output.cached_tokens
            if output.token_id is not None:
                answers[i].append(output.token_id)
            if output.finish_reason:
                if output.error:
                    errors.append(output.error)
                left[0] -= 1
                if not left[0]:
                    done.set()

        return receive

    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        how = SamplingParams(max_tokens=generate, ignore_eos=True, temperature=0.0)
        engine.submit(GenerationRequest(request_id=str(i), prompt_ids=prompt, sampling=how), receiver(i))
    done.wait()
    seconds = time.perf_counter() - began
    if errors:
        raise RuntimeError(errors[0])
    return seconds, cached[0] / sum(map(len, prompts)), answers


def converse(engine: Engine, vocab: int, args: argparse.Namespace) -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, args.history).tolist() for _ in range(args.sessions)]
    rows = []
    for turn in range(args.turns):
        seconds, cached, answers = take_turn(engine, prompts, args.generate)
        rows.append({"turn": turn + 1, "seconds": round(seconds, 2), "cached": round(cached, 3)})
        print(rows[-1], flush=True)
        new = rng.integers(0, vocab, (args.sessions, args.add)).tolist()
        prompts = [p + a + n for p, a, n in zip(prompts, answers, new, strict=True)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--history", type=int, default=30_000, help="tokens of the first turn's prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--add", type=int, default=500)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--retention", type=float, nargs="*", default=[1.0, 0.25])
    parser.add_argument("--kv-gib", type=float, default=55.0, help="memory for keys and values")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--scorer", default="snapkv")
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    config = SHAPES[args.shape]
    if args.layers:
        config = config.replace(num_layers=args.layers)
    params = decode_step.random_weights(config)
    device = jax.devices()[0].device_kind
    print(device, flush=True)
    results: dict[str, Any] = {"device": device, "arguments": vars(args)}
    for retention in args.retention:
        engine = start(config, params, args, retention)
        rows = results[f"retention {retention:g}"] = converse(engine, config.vocab_size, args)
        engine.stop()
        del engine
        gc.collect()  # its pool must go before the next one comes
        if retention != args.retention[0]:
            first = results[f"retention {args.retention[0]:g}"]
            ratios = [round(a["seconds"] / b["seconds"], 2) for a, b in zip(first, rows, strict=True)]
            print(f"{args.retention[0]:g} / {retention:g}, turn by turn: {ratios}", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
