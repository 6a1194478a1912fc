"""The systems that `benchmarks.cpu_speed` compares, each with one method: run B prompts, and say how long it took."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import tangram_jax as tj
from models.registry import LoadedModel
from serve.args import ServeConfig
from serve.build import MIN_ENTRIES, build_engine
from serve.profiles import choose_profile
from serve.request import GenerationRequest, SamplingParams, TokenOutput
from tangram_jax import sampling


class Timing(NamedTuple):
    prefill: float  # seconds for B * length prompt tokens
    decode: float  # seconds for B * steps generated tokens, all B at once
    whole: float  # seconds for everything
    tokens: list[list[int]]  # [B][steps + 1], greedy


class System(Protocol):
    name: str
    retention_reached: float  # of the KV entries, after the prompt

    def run(self, batch: int) -> Timing: ...


class Core:
    """The functions that others embed: one `prefill_chunk` a prompt, then `decode_step` and sampling in one program."""

    def __init__(self, model: LoadedModel, prompts: np.ndarray, steps: int, retention: float) -> None:
        self.name = f"tangram-jax, core, retention {retention:g}"
        self.prompts, self.steps, self.model = prompts, steps, model
        rows, length = prompts.shape
        config = model.config
        profile = choose_profile(ServeConfig(retention=retention), config, model.name)
        profile = dataclasses.replace(profile, retention=retention).normalized()  # as the server takes it
        self.plan = plan = tj.CachePlan.build(
            profile, heads_per_page=1, page_size=16, min_entries=MIN_ENTRIES
        )
        self.retention_reached = plan.retention(length)
        cache = tj.init_cache(
            plan,
            config,
            num_pages=rows * plan.pages(length, steps),
            max_requests=rows,
            max_tokens=length + steps,
            max_tail=steps,
        )
        # Committed to the device, as the results are: otherwise the second call compiles again.
        self.cache, self.sampler = jax.device_put(
            (cache, sampling.init_sampler(rows, config.vocab_size)), jax.local_devices()[0]
        )
        scorer = tj.get_scorer(ServeConfig().scorer)

        @partial(jax.jit, donate_argnums=(1, 2))
        def prefill(
            params: Any, cache: tj.Cache, sampler: Any, row: jax.Array, tokens: jax.Array
        ) -> tuple[jax.Array, tj.Cache, Any]:
            logits, cache = tj.prefill_chunk(
                params, config, plan, cache, scorer=scorer, row=row, tokens=tokens, count=jnp.int32(length)
            )
            token, *_, sampler = sampling.sample(logits[None], sampler, row[None], variant=sampling.GREEDY)
            return token[0], cache, sampler

        @partial(jax.jit, donate_argnums=(1, 2))
        def decode(
            params: Any, cache: tj.Cache, sampler: Any, rows: jax.Array
        ) -> tuple[jax.Array, tj.Cache, Any]:
            logits, cache = tj.decode_step(
                params, config, plan, cache, rows=rows, tokens=sampling.last_tokens(sampler, rows)
            )
            tokens, *_, sampler = sampling.sample(logits, sampler, rows, variant=sampling.GREEDY)
            return tokens, cache, sampler

        self._prefill, self._decode = prefill, decode

    def run(self, batch: int) -> Timing:
        params, plan, length = self.model.params, self.plan, self.prompts.shape[1]
        for row in range(batch):
            self.cache = tj.reserve(plan, self.cache, np.int32(row), np.int32(length), np.int32(self.steps))
        rows = np.arange(batch, dtype=np.int32)
        jax.block_until_ready(self.cache)
        began = time.perf_counter()
        first = []
        for row in range(batch):
            token, self.cache, self.sampler = self._prefill(
                params, self.cache, self.sampler, np.int32(row), self.prompts[row]
            )
            first.append(token)
        jax.block_until_ready(first)
        prefilled = time.perf_counter()
        tokens = [jnp.stack(first)]
        for _ in range(self.steps):
            token, self.cache, self.sampler = self._decode(params, self.cache, self.sampler, rows)
            tokens.append(token)
        jax.block_until_ready(tokens)
        done = time.perf_counter()
        for row in range(batch):
            self.cache = tj.release(plan, self.cache, np.int32(row))
        return Timing(prefilled - began, done - prefilled, done - began, np.stack(tokens, axis=1).tolist())


class Engine:
    """The engine behind `python -m serve`, without HTTP: scheduler, chunked prefill beside decode, pipelined steps."""

    def __init__(self, model: LoadedModel, prompts: np.ndarray, steps: int, retention: float) -> None:
        self.name = f"tangram-jax, engine, retention {retention:g}"
        self.prompts, self.steps = prompts, steps
        config = ServeConfig(
            retention=retention,
            max_model_len=2048,
            max_num_seqs=len(prompts),
            prefix_cache=False,
        )
        built = build_engine(config, model, dtype=jnp.float32)
        self.engine = built.engine
        self.retention_reached = built.plan.retention(prompts.shape[1])
        self.engine.start()
        self._count = 0

    def run(self, batch: int) -> Timing:
        """Prefill: requests of one token. Decode: the rate while all B decode, since the first begin before the last."""
        prefill, _, _ = self._generate(batch, 1)
        whole, times, tokens = self._generate(batch, self.steps + 1)
        begin, end = max(t[0] for t in times), min(t[-1] for t in times)
        between = sum(begin < t <= end for each in times for t in each)
        return Timing(prefill, batch * self.steps * (end - begin) / between, whole, tokens)

    def _generate(self, batch: int, count: int) -> tuple[float, list[list[float]], list[list[int]]]:
        """(seconds, the time of each token, tokens)."""
        tokens: list[list[int]] = [[] for _ in range(batch)]
        times: list[list[float]] = [[] for _ in range(batch)]
        finished = threading.Semaphore(0)
        errors = []

        def receive(i: int, output: TokenOutput) -> None:
            if output.token_id is not None:
                tokens[i].append(output.token_id)
                times[i].append(time.perf_counter())
            if output.finish_reason:
                errors.append(output.error)
                finished.release()

        greedy = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        for i in range(batch):
            self._count += 1
            request = GenerationRequest(
                request_id=str(self._count), prompt_ids=self.prompts[i].tolist(), sampling=greedy
            )
            self.engine.submit(request, partial(receive, i))
        for _ in range(batch):
            finished.acquire()
        if any(errors):
            raise RuntimeError(f"the engine failed: {errors}")
        return time.perf_counter() - began, times, tokens


class TransformersProcess:
    """transformers on the same weights, in the interpreter `python`, which has torch."""

    def __init__(
        self, python: str, model: LoadedModel, prompts: np.ndarray, steps: int, threads: int, directory: Path
    ) -> None:
        self.name = "transformers"
        self.retention_reached = 1.0
        self.caches: dict[int, str] = {}
        export(model, directory)
        np.save(directory / "prompts.npy", prompts)
        script = Path(__file__).with_name("cpu_speed_transformers.py")
        flags = ["--directory", str(directory), "--steps", str(steps), "--threads", str(threads)]
        self._process = subprocess.Popen(
            [python, str(script), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.versions: dict[str, str] = self._read()["versions"]

    def run(self, batch: int) -> Timing:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"batch": batch}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self.caches[batch] = answer["cache"]
        prefill, decode = answer["prefill"], answer["decode"]
        return Timing(prefill, decode, prefill + decode, answer["tokens"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the transformers process ended; does --torch-python have torch?")
        return json.loads(line)


def export(model: LoadedModel, directory: Path) -> None:
    """Write `model` as a Hugging Face directory that transformers loads as LlamaForCausalLM."""
    config, params = model.config, model.params
    if config.rope_scaling is not None:
        raise NotImplementedError("export of a model with RoPE scaling")
    hidden, group = config.hidden_size, config.group_size
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = params["lm_head"].T
    for i, layer in enumerate(params["layers"]):
        qkv = layer["qkv"]  # [E, K, G + 2, D]
        parts = {
            "input_layernorm": layer["attn_norm"],
            "self_attn.q_proj": qkv[:, :, :group].reshape(hidden, -1).T,
            "self_attn.k_proj": qkv[:, :, group].reshape(hidden, -1).T,
            "self_attn.v_proj": qkv[:, :, group + 1].reshape(hidden, -1).T,
            "self_attn.o_proj": layer["attn_out"].reshape(-1, hidden).T,
            "post_attention_layernorm": layer["mlp_norm"],
            "mlp.gate_proj": layer["gate_up"][:, 0].T,
            "mlp.up_proj": layer["gate_up"][:, 1].T,
            "mlp.down_proj": layer["down"].T,
        }
        tensors |= {f"model.layers.{i}.{name}.weight": x for name, x in parts.items()}
    directory.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()}
    save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    (directory / "config.json").write_text(json.dumps(described, indent=2))
