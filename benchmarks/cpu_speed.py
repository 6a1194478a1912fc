"""Prefill and decode tokens/s on a CPU against transformers: same weights, float32, same threads, one run.

  python -m benchmarks.cpu_speed --torch-python PATH     PATH: a Python with torch and transformers; about 5 minutes

Prompts of 512 held-out tokens, 64 generated greedily, 1 and 8 requests at once. The systems take turns within each
repeat; medians are over the repeats, and ratios are those of the same repeat. A timing during which other processes
took more than a tenth of a core is thrown away and repeated, up to 20 times; what stayed noisy is counted in the result.
Before anything is timed, retention 1.0 must give the tokens of transformers.

"core" calls `prefill_chunk` and `decode_step`. "engine" is the scheduler and batching loop without HTTP; its decode rate
is that while all requests decode. "Whole requests": generated tokens over the time from submission to the last of them,
prefill included. "Start": from `python -m serve` on a warm cache to the first token of the first request.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.cpu_speed_systems import System, Timing
    from models.registry import LoadedModel

PROMPT, STEPS, BATCHES = 512, 64, (1, 8)
QUANTITIES = {"prefill": "prefill", "decode": "decode", "whole": "output of whole requests"}
RESULTS = Path(__file__).parent / "results" / "cpu_speed.json"
ATTEMPTS, OTHERS = 20, 0.1  # tries of a timing, and cores that others may use during it


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch-python", help="interpreter with torch and transformers; without it, ours alone"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-engine", action="store_true", help="the core functions alone")
    parser.add_argument("--no-start", action="store_true", help="leave out the start of the server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < arguments.threads:
        parser.error(f"--threads is {arguments.threads}, this process may use {len(cores)} cores")
    # XLA and torch both take as many threads as they may use cores; must come before JAX is imported.
    os.sched_setaffinity(0, cores[: arguments.threads])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    console = Console(stderr=True)
    result = measure(arguments, console)
    if not arguments.no_start:
        console.print("Starting the server ...")
        result["start_seconds"] = [start_to_first_token() for _ in range(3)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    report(result, Console())
    return 0


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All systems, taking turns: {"seconds": {system: {batch: {"prefill": [...], ...}}}, ...}."""
    import jax

    from benchmarks.cpu_speed_systems import Core, Engine, TransformersProcess
    from models.conversion_cache import cache_dir
    from models.registry import load_model

    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    model = load_model(dtype="float32")
    prompts = make_prompts(model)
    systems: list[System] = []
    with tempfile.TemporaryDirectory() as directory:
        other = None
        pids = [os.getpid()]
        if arguments.torch_python:
            other = TransformersProcess(
                arguments.torch_python, model, prompts, STEPS, arguments.threads, Path(directory)
            )
            systems.append(other)
            pids.append(other.pid)
        systems += [Core(model, prompts, STEPS, retention) for retention in (1.0, 0.5)]
        if not arguments.no_engine:
            systems += [Engine(model, prompts, STEPS, retention) for retention in (1.0, 0.5)]
        with console.status("Warming up") as status:
            agreed: dict[int, dict[str, float]] = {}
            for batch in BATCHES:
                warm = {}
                for system in systems:
                    status.update(f"Warming up: {system.name}, {batch} at once")
                    warm[system.name] = system.run(batch)
                agreed[batch] = agreement(warm)
            seconds: dict[str, dict[str, Any]] = {
                s.name: {str(b): {what: [] for what in QUANTITIES} for b in BATCHES} for s in systems
            }
            noisy = 0
            for repeat in range(arguments.repeats):
                # Another order each time: none always runs after the same one.
                turn = systems[repeat % len(systems) :] + systems[: repeat % len(systems)]
                for batch in BATCHES:
                    for system in turn:
                        status.update(f"Repeat {repeat + 1} of {arguments.repeats}: {system.name}")
                        timing, quiet = quiet_run(system, batch, pids)
                        noisy += not quiet
                        for what in QUANTITIES:
                            seconds[system.name][str(batch)][what].append(getattr(timing, what))
        if other:
            other.close()
    return {
        "machine": {"cpu": cpu_name(), "threads": arguments.threads},
        "versions": {"python": platform.python_version(), "jax": jax.__version__}
        | (other.versions if other else {}),
        "model": model.name,
        "dtype": "float32",
        "prompt_tokens": PROMPT,
        "generated_tokens": STEPS,
        "transformers_cache": other.caches if other else {},
        "same_tokens_as_transformers": agreed,
        "retention_reached": {s.name: round(s.retention_reached, 4) for s in systems},
        "noisy_timings": noisy,
        "seconds": seconds,
    }


def quiet_run(system: System, batch: int, pids: list[int]) -> tuple[Timing, bool]:
    """A timing on an otherwise idle machine; False with the last try if there was none."""
    for _ in range(ATTEMPTS):
        wait_until_quiet(pids)
        began, others = time.perf_counter(), others_seconds(pids)
        timing = system.run(batch)
        if others_seconds(pids) - others < OTHERS * (time.perf_counter() - began):
            return timing, True
    return timing, False


def wait_until_quiet(pids: list[int]) -> None:
    """Until others were idle for a second, or for half a minute; the last system's worker threads fall asleep too."""
    for _ in range(30):
        before = others_seconds(pids)
        time.sleep(1.0)
        if others_seconds(pids) - before < OTHERS:
            return


def others_seconds(pids: list[int]) -> float:
    """CPU seconds since boot of everything but the processes `pids` (Linux; 0 elsewhere)."""
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks -= int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def make_prompts(model: LoadedModel) -> np.ndarray:
    """i32[8, PROMPT] of held-out text."""
    import numpy as np

    from calibrate.samples import heldout_samples

    samples = heldout_samples(model.tokenizer, max(BATCHES), PROMPT)
    return np.stack([np.asarray(sample.tokens[:PROMPT], np.int32) for sample in samples])


def agreement(timings: dict[str, Timing]) -> dict[str, float]:
    """Share of each system's tokens that come before its first difference from transformers'.

    Raises RuntimeError if a system at retention 1.0 differs early: then it is not the same model that is timed.
    """
    reference = timings.get("transformers")
    if reference is None:
        return {}
    shares = {}
    for name, timing in timings.items():
        same = 0
        for mine, theirs in zip(timing.tokens, reference.tokens, strict=True):
            same += next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
        shares[name] = same / (len(reference.tokens) * len(reference.tokens[0]))
        if "retention 1" in name and shares[name] < 0.7:
            raise RuntimeError(f"{name}: only {shares[name]:.0%} of the tokens are those of transformers")
    return shares


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def start_to_first_token() -> float:
    """Seconds from the start of `python -m serve` to the first streamed token; caches must be warm."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "serve", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    body = {"model": "smollm2-135m-instruct", "max_tokens": 4, "stream": True}
    body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        while True:
            try:
                with urllib.request.urlopen(request, timeout=600) as answer:
                    for line in answer:
                        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get(
                            "content"
                        ):
                            return time.perf_counter() - began
                raise RuntimeError("the server answered without a token")
            except (urllib.error.URLError, ConnectionError) as error:
                if isinstance(error, urllib.error.HTTPError) or server.poll() is not None:
                    raise RuntimeError(f"python -m serve failed: {error}") from error
                time.sleep(0.05)
    finally:
        server.terminate()
        server.wait(60)


def report(result: dict[str, Any], console: Console) -> None:
    """The table of medians, and of ratios to transformers where it ran."""
    machine = result["machine"]
    table = Table(
        title=f"{result['model']}, {result['dtype']}, {machine['threads']} threads of {machine['cpu']}: tokens/s, "
        "median (times transformers)"
    )
    seconds = result["seconds"]
    table.add_column("")
    for name in seconds:
        table.add_column(name, justify="right")
    for what, batch in ((what, batch) for what in QUANTITIES for batch in BATCHES):
        tokens = batch * result["prompt_tokens" if what == "prefill" else "generated_tokens"]
        cells = []
        for name, times in seconds.items():
            mine = times[str(batch)][what]
            cell = f"{tokens / statistics.median(mine):.1f}"
            if "transformers" in seconds and name != "transformers":
                theirs = seconds["transformers"][str(batch)][what]
                ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
                cell += f" ({ratio:.2f})"
            cells.append(cell)
        table.add_row(f"{QUANTITIES[what]}, {batch} at once", *cells)
    console.print(table)
    if "start_seconds" in result:
        console.print(
            f"Start of the server to its first token: {statistics.median(result['start_seconds']):.1f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
