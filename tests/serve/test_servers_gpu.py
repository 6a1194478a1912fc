"""`python -m serve` on GPUs, with random checkpoints whose sizes have the kernels of large models."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import pytest
from safetensors.numpy import save_file

from models.config import config_from_huggingface
from models.testing import tiny_tokenizer
from tests.models.checkpoints import GOLDEN, random_tensors
from tests.serve.request_kinds import Client, ask_all

COMMON: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "num_hidden_layers": 4, "vocab_size": 264, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("tiny_untied_llama3", {}),
    "gemma": (
        "tiny_gemma3",
        {
            "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 256, "sliding_window": 512,
            "query_pre_attn_scalar": 256,
        },
    ),
    "mixture": (
        "tiny_qwen3_moe",
        {"moe_intermediate_size": 512, "num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4},
    ),
}  # fmt: skip
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
# A pool that cannot hold what is asked at once: conversations go to the host, requests lose their rows.
SHORT = ("--kv-cache-memory", "24MiB", "--kv-offloading-size", "1")
SERVERS: dict[str, tuple[str, ...]] = {
    "llama": (),
    "llama drafts in-bytes fp8": (
        *DRAFTS, "--retention", "0.5", "--kv-cache-dtype", "int8", "--quantization", "fp8-dynamic", "--scorer", "snapkv",
    ),
    "llama groups-of-layers": (
        *SHORT, "--retention", "0.5", "--cluster", "model", "--heads-per-page", "4", "--decode-division", "split_map",
        "--scorer", "kv_compress",
    ),
    "gemma drafts": (*DRAFTS, "--retention", "0.4", "--api-server-count", "2"),
    "mixture drafts": (*DRAFTS, "--retention", "0.5", "--stream-interval", "4"),
    "llama two-gpus": (*DRAFTS, "--retention", "0.5", "--tensor-parallel-size", "2"),
    "gemma two-gpus": (*SHORT, "--retention", "0.5", "--quantization", "fp8", "--tensor-parallel-size", "2"),
    "mixture two-gpus": ("--kv-cache-dtype", "int8", "--tensor-parallel-size", "2"),
}  # fmt: skip


def make_checkpoint(directory: Path, name: str, **changes: Any) -> None:
    golden, own = CHECKPOINTS[name]
    said = json.loads((GOLDEN / golden / "config.json").read_text()) | COMMON | own | changes
    if len(said.get("layer_types") or []) != said["num_hidden_layers"]:
        said.pop("layer_types", None)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(said))
    tiny_tokenizer().save(str(directory))
    tensors = random_tensors(config_from_huggingface(said, name))
    save_file({k: x.astype(ml_dtypes.bfloat16) for k, x in tensors.items()}, directory / "model.safetensors")


@contextlib.contextmanager
def serving(
    directory: Path, cache: Path, log: Path, *flags: str, seconds: float = 300
) -> Iterator[tuple[subprocess.Popen, str]]:
    """The process of a server that is ready, and its address. What it says is in the file `log`."""
    environment = os.environ | {"TANGRAM_CACHE": str(cache), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "serve", "--model", str(directory), "--port", "0", *flags]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process,
    ):
        try:
            until = time.monotonic() + seconds
            while not (said := re.search(r"Ready .*(http://\S+)", log.read_text())):
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield process, said[1]
        finally:
            process.kill()


def check(directory: Path, cache: Path, log: Path, *flags: str) -> None:
    with serving(directory, cache, log, *flags) as (process, url), Client(url) as client:
        ask_all(client)
        deadline = time.monotonic() + 20  # clients that left are noticed at the next write
        while (
            client.metric("num_requests_running")
            or client.metric("num_requests_waiting")
            or client.metric("kv_pages_used") != client.metric("kv_pages_stored")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.metric("compilations_after_warmup") == 0
        assert ("--speculative-config" in flags) == (client.metric("spec_decode_num_draft_tokens_total") > 0)
        assert ("--kv-offloading-size" in flags) == (client.metric("kv_restored_tokens_total") > 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    # Nor has a kernel been replaced with a warning.
    assert not re.search(r"ERROR|Traceback|XLA operations|cuDNN", log.read_text()), log.read_text()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for them, and for what servers keep."""
    directory = tmp_path_factory.mktemp("servers")
    yield directory
    shutil.rmtree(directory)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVERS)
def test_all_kinds_of_requests(name: str, checkpoints: Path) -> None:
    model, flags = name.split()[0], SERVERS[name]
    if "two-gpus" in name and jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    if not (checkpoints / model).exists():
        make_checkpoint(checkpoints / model, model)
    sizes = ("--max-num-batched-tokens", "2048", "--max-model-len", "4096", "--max-num-seqs", "32")
    pool = () if "--kv-cache-memory" in flags else ("--kv-cache-memory", "512MiB")
    check(checkpoints / model, checkpoints / "cache", checkpoints / "log", *sizes, *pool, *flags)
