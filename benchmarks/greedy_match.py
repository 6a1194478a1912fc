"""Greedy tokens of the default model at retention 1.0: an accelerator against the CPU in float32.

  python -m benchmarks.greedy_match                             the same as `compare`
  python -m benchmarks.greedy_match compare                     the real engine, fed with the CPU's tokens (teacher forcing)
  python -m benchmarks.greedy_match serve                       starts `python -m serve`, asks it over HTTP
  python -m benchmarks.greedy_match golden --out FILE           on a CPU: tokens, and the gap of the two best logits at each

`compare` runs greedily until a token differs from the CPU's, notes the position, and goes on after the CPU's token: so every
position is judged after the CPU's own prefix. A position where the CPU's two best logits lie closer than the noise of
bfloat16 may differ; it is excepted and counted. The noise is the 99th percentile of |gap in bfloat16 - gap in float32|, both
on the CPU: `compare --dtype bfloat16 --calibrate` there measures it and writes it into the golden file.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calibrate.samples import TEXTS
from models.conversion_cache import cache_dir
from models.registry import DEFAULT_MODEL
from serve.args import ServeConfig
from serve.build import build
from serve.engine import Engine
from serve.request import GenerationRequest, SamplingParams, TokenOutput

LENGTHS = (100, 200, 300, 450, 650, 900, 1200, 1500)  # prompt tokens, about
TOKENS = 64
BOOK = "persuasion"
QUESTION = "Who appears in this passage, and what happens in it?\n\n"
NOISE_PERCENTILE = 99
GOLDEN = Path(__file__).parent / "results" / "2026-11-21-greedy-golden.json"


def start_engine(dtype: str) -> tuple[Engine, Any, float]:
    """As `python -m serve --retention 1.0` starts it: engine, tokenizer, seconds."""
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    began = time.perf_counter()
    built = build(ServeConfig(retention=1.0, dtype=dtype))
    built.engine.start()
    return built.engine, built.model.tokenizer, time.perf_counter() - began


def generate(
    engine: Engine, name: str, prompt: list[int], count: int, forced: list[int]
) -> list[TokenOutput]:
    """Greedy outputs with their two and more best, up to the first that is not `forced` or until `count`."""
    outputs: list[TokenOutput] = []
    done = threading.Event()

    def on_output(output: TokenOutput) -> None:
        if done.is_set():
            return
        if output.token_id is not None:
            outputs.append(output)
            if forced and output.token_id != forced[len(outputs) - 1]:
                engine.abort(name)
                done.set()
        if output.finish_reason:
            done.set()

    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=20)
    engine.submit(GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling), on_output)
    if not done.wait(600):
        raise TimeoutError(f"{name}: no answer")
    return outputs


def make_golden(args: argparse.Namespace) -> None:
    engine, tokenizer, _ = start_engine("float32")
    text = (TEXTS / "heldout" / f"{BOOK}.txt").read_text(encoding="utf-8")
    cases = []
    for index, length in enumerate(LENGTHS):
        part = text[index * 20_000 :][: int(length * 4.2)]
        rendered = tokenizer.render_chat([{"role": "user", "content": QUESTION + part}], True)
        prompt = tokenizer.encode(rendered, add_special_tokens=False)
        outputs = generate(engine, f"golden-{index}", prompt, TOKENS, [])
        best = [(o.top_logprobs or [])[:2] for o in outputs]
        cases.append(
            {
                "prompt": prompt,
                "tokens": [o.token_id for o in outputs],
                "second": [pair[1][0] for pair in best],
                "gaps": [round(pair[0][1] - pair[1][1], 4) for pair in best],
            }
        )
        print(len(prompt), repr(tokenizer.decode(cases[-1]["tokens"])[:100]), flush=True)
    engine.stop()
    write_golden(args.out, {"model": DEFAULT_MODEL, "retention": 1.0, "noise": None, "cases": cases})


def write_golden(path: Path, golden: dict[str, Any]) -> None:
    """One line a case: lists of hundreds of numbers are not for reading."""
    cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in golden["cases"])
    head = json.dumps({k: v for k, v in golden.items() if k != "cases"})
    path.write_text(f'{head[:-1]}, "cases": [\n{cases}\n]}}\n')


def forced_run(engine: Engine, name: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    """One record per position: the token here, and the gap here between the CPU's best and second."""
    records: list[dict[str, Any]] = []
    tokens = case["tokens"]
    while len(records) < len(tokens):
        at = len(records)
        prompt = case["prompt"] + tokens[:at]
        outputs = generate(engine, f"{name}-{at}", prompt, len(tokens) - at, tokens[at:])
        if not outputs:
            raise RuntimeError(f"{name}: nothing after {at} tokens")
        for output in outputs:
            index = len(records)
            top = dict(output.top_logprobs or [])
            best, second = top.get(tokens[index]), top.get(case["second"][index])
            records.append(
                {
                    "same": output.token_id == tokens[index],
                    "cpu_gap": case["gaps"][index],
                    "gap": None if best is None or second is None else best - second,
                }
            )
    return records


def compare(args: argparse.Namespace) -> None:
    golden = json.loads(args.golden.read_text())
    engine, _, seconds = start_engine(args.dtype)
    with ThreadPoolExecutor(len(golden["cases"])) as pool:  # together, so that decode batches form
        runs = pool.map(
            lambda item: forced_run(engine, f"case-{item[0]}", item[1]), enumerate(golden["cases"])
        )
        records = [
            record | {"case": i, "at": at} for i, run in enumerate(runs) for at, record in enumerate(run)
        ]
    compilations = engine.stats().compilations_after_warmup
    engine.stop()
    moved = np.array([abs(r["gap"] - r["cpu_gap"]) for r in records if r["gap"] is not None])
    if args.calibrate:
        golden["noise"] = round(float(np.percentile(moved, NOISE_PERCENTILE)), 4)
        write_golden(args.golden, golden)
    noise = golden["noise"]
    different = [r for r in records if not r["same"]]
    result = {
        "device": jax.devices()[0].device_kind,
        "dtype": args.dtype,
        "ready_s": round(seconds, 1),
        "positions": len(records),
        "different": len(different),
        "excepted": sum(r["cpu_gap"] <= noise for r in different),
        "not_excepted": sum(r["cpu_gap"] > noise for r in different),
        "noise": noise,
        "positions_within_noise": sum(r["cpu_gap"] <= noise for r in records),
        "gap_error_median": round(float(np.median(moved)), 4),
        "gap_error_p99": round(float(np.percentile(moved, 99)), 4),
        "gap_error_max": round(float(moved.max()), 4),
        "compilations_after_warmup": compilations,
        "differences": [{k: r[k] for k in ("case", "at", "cpu_gap", "gap")} for r in different],
    }
    report(args.out, "compare " + args.dtype, result)


def report(path: Path | None, name: str, result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=1), flush=True)
    if path is not None:
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {name: result}, indent=1) + "\n")


def ask_server(args: argparse.Namespace) -> None:
    golden = json.loads(args.golden.read_text())
    base = f"http://127.0.0.1:{args.port}"
    command = [sys.executable, "-m", "serve", "--retention", "1.0", "--port", str(args.port)]
    began = time.perf_counter()
    server = subprocess.Popen(command)
    try:
        while not _answers(base + "/v1/models"):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with status {server.returncode}")
            time.sleep(0.1)
        ready = time.perf_counter() - began
        rows = [_ask(base, case, golden["noise"]) for case in golden["cases"]]
    finally:
        server.terminate()
        server.wait(60)
    result = {"device": "of the server", "ready_s": round(ready, 1), "completions": rows}
    result["whole_or_excepted"] = sum(r["whole"] or r["excepted"] for r in rows)
    report(args.out, "serve", result)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _ask(base: str, case: dict[str, Any], noise: float) -> dict[str, Any]:
    """Free-running tokens of one completion up to where they leave the CPU's, and the CPU's gap there."""
    body = {
        "model": DEFAULT_MODEL, "prompt": case["prompt"], "max_tokens": TOKENS, "temperature": 0,
        "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        choice = json.load(response)["choices"][0]
    took = time.perf_counter() - began
    pairs = list(zip(choice["token_ids"], case["tokens"], strict=True))
    at = next((i for i, (here, cpu) in enumerate(pairs) if here != cpu), None)
    gap = None if at is None else case["gaps"][at]
    return {
        "prompt": len(case["prompt"]),
        "whole": at is None,
        "left_at": at,
        "cpu_gap": gap,
        "excepted": gap is not None and gap <= noise,
        "seconds": round(took, 2),
    }


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments, among them `run`: what to do with them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, run in (("golden", make_golden), ("compare", compare), ("serve", ask_server)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--out", type=Path, required=name == "golden")
        if name != "golden":
            command.add_argument("--golden", type=Path, default=GOLDEN, help="the CPU's tokens")
    commands.choices["compare"].add_argument("--dtype", default="auto")
    commands.choices["compare"].add_argument("--calibrate", action="store_true")
    commands.choices["serve"].add_argument("--port", type=int, default=8123)
    return parser.parse_args(argv or ["compare"])


def main() -> None:
    args = parse(sys.argv[1:])
    args.run(args)


if __name__ == "__main__":
    main()
