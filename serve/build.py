"""From a checked configuration to an engine: model, profile, plan, buckets, and how many pages the memory holds."""

import contextlib
import dataclasses
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.registry import LoadedModel, load_model
from models.sharding import tensor_mesh
from models.tokenizer import ChatTemplateError
from pallas_kernels import byte_pages, ragged_decode
from serve.args import ON_CPU, ON_GPU, ConfigError, ServeConfig
from serve.buckets import Buckets, make_buckets
from serve.drift import DriftMonitor, Recipe, measuring_bytes
from serve.engine import Engine
from serve.errors import APIError
from serve.limits import Limits
from serve.profiles import check_provenance, choose_profile
from serve.protocol import CompletionRequest
from serve.runner import Runner
from serve.speculation import Speculation
from serve.transfers import allow_pinned, under_way_bytes
from serve.watched import WatchedEngine
from tangram_jax.cache import row_layout
from tangram_jax.plan import MAX_TOKENS, CachePlan, Cluster, default_heads_per_page
from tangram_jax.rings import SlidingLayers
from tangram_jax.scorers import get_scorer
from tangram_jax.sharding import TensorParallel

TAIL_LIMIT = 256  # generated tokens that stay whole until they are compressed
MIN_ENTRIES = 128  # prompts up to here are kept whole: there is next to nothing to save
CPU_POOL_SHARE, CPU_POOL_MOST = 0.25, 2 << 30  # of the free memory; bytes
GPU_RESERVE = 2 << 30  # bytes for everything beside weights, pool and what a chunk's tokens need

log = logging.getLogger("tangram.engine")


@dataclass(frozen=True)
class Built:
    """What `python -m serve` runs."""

    engine: Engine
    model: LoadedModel
    plan: CachePlan
    summary: str
    sampling_defaults: dict[str, Any]  # of requests that say nothing themselves


def sampling_defaults(config: ServeConfig, model: LoadedModel) -> dict[str, Any]:
    """What the model's generation_config.json says, if it was asked for. Raises ConfigError where it makes no sense."""
    defaults = dict(model.sampling_defaults) if config.generation_config == "auto" else {}
    try:
        CompletionRequest.parse({"prompt": ""}, defaults)
    except APIError as error:
        raise ConfigError(
            f"generation_config.json of {model.name}: {error.message} Mend it, or start with --generation-config vllm"
        ) from error
    if defaults:
        listed = ", ".join(f"{name} {value}" for name, value in defaults.items())
        log.info("Requests that say nothing else are sampled as generation_config.json says: %s", listed)
    return defaults


def read_chat_template(given: str) -> str:
    """The template that --chat-template gives. Raises ConfigError for neither a file that can be read nor a template."""
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" in given:  # of which no template has none
            return given
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--chat-template {given} cannot be read ({why}): write the path of a Jinja template, or the template itself"
        ) from error


def build(config: ServeConfig, *, progress: bool = True, programs: Path | None = None) -> Built:
    """Load, plan and allocate. Raises ConfigError, or the loader's errors, with what to do instead.

    `programs`: see `Runner`.
    """
    check_host_memory(config.host_bytes)
    allow_pinned(config.host_bytes)
    on_gpu = jax.default_backend() == "gpu"
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    cache_dtype(config, dtype)  # what is wrong with it is said before minutes of loading
    template = read_chat_template(config.chat_template) if config.chat_template is not None else None
    devices = config.tensor_parallel_size
    if devices > jax.device_count():
        raise ConfigError(
            f"--tensor-parallel-size {devices} is more devices than are here: write at most {jax.device_count()}"
        )
    model = load_model(
        config.model,
        dtype=jnp.dtype(dtype),
        progress=progress,
        overrides=config.hf_overrides,
        keep_mxfp4=True,
        quantization=config.quantization,
        mesh=tensor_mesh(devices) if devices > 1 else None,
    )
    if template is not None:
        try:
            model.tokenizer.use_chat_template(template)
        except ChatTemplateError as error:
            raise ConfigError(f"--chat-template is no Jinja template: {error}. Mend it there") from error
    return build_engine(config, model, dtype=jnp.dtype(dtype), on_gpu=on_gpu, programs=programs)


def cache_dtype(config: ServeConfig, dtype: Any) -> Any:
    """The pool's, for a model of `dtype`. Raises ConfigError for another float than that."""
    asked = config.kv_cache_dtype
    if asked == "int8":
        return byte_pages.DTYPE
    if asked not in ("auto", jnp.dtype(dtype).name):
        raise ConfigError(
            f"--kv-cache-dtype {asked} for a model in {jnp.dtype(dtype).name}: write auto, int8, or --dtype {asked} as well"
        )
    return dtype


def build_engine(
    config: ServeConfig,
    model: LoadedModel,
    *,
    dtype: Any,
    on_gpu: bool = False,
    programs: Path | None = None,
) -> Built:
    """The engine of a loaded model, not started yet."""
    shape, defaults = model.config, sampling_defaults(config, model)
    longest = min(shape.max_positions, MAX_TOKENS)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than {model.name} can: write at most {longest}"
        )
    max_model_len = config.max_model_len or longest
    tail = min(config.tail_limit if config.tail_limit is not None else TAIL_LIMIT, max_model_len)
    batching = config.on(ON_GPU if on_gpu else ON_CPU)
    devices = config.tensor_parallel_size
    heads_per_page = config.heads_per_page or default_heads_per_page(shape.num_kv_heads, devices)
    heads = shape.num_kv_heads * (len(shape.full_layers) if config.cluster == "model" else 1)
    if heads_per_page > heads:
        raise ConfigError(
            f"--heads-per-page {heads_per_page} leaves columns of every page empty: {model.name} has {heads} KV heads "
            f"to put together with --cluster {config.cluster}, write at most {heads}"
        )
    profile = choose_profile(config, shape, model.name)
    check_provenance(profile, model, config.scorer)
    kept = config.retention or profile.retention
    if config.max_retention is not None and config.max_retention < kept:
        raise ConfigError(
            f"--max-retention ({config.max_retention:g}) is below what requests keep that ask for nothing ({kept:g}, the "
            "profile's): write at least that, or a --retention of at most --max-retention"
        )
    plan = CachePlan.build(
        profile
        if config.retention is None
        else dataclasses.replace(profile, retention=config.retention).normalized(),
        heads_per_page=heads_per_page,
        page_size=batching.page_size,
        cluster=cast(Cluster, config.cluster),
        division=config.decode_division,
        min_entries=MIN_ENTRIES if config.min_entries is None else config.min_entries,
        sliding=SlidingLayers.of(shape, tail),
        scaled=profile,
        max_retention=config.max_retention or kept,
    )
    try:
        parallel = TensorParallel.of(shape, plan, devices) if devices > 1 else None
    except ValueError as error:
        raise ConfigError(f"--tensor-parallel-size {devices}: {error}") from error
    recipe = Recipe.of(profile, max_model_len) if config.drift_interval else None
    stored = config.max_stored_sessions if config.prefix_cache else 0
    stores = cache_dtype(config, dtype)
    page_bytes = plan.page_bytes(shape.head_dim, stores) // devices  # these and all others: of one device
    largest = row_layout(plan, max_model_len, tail, plan.group_ppm).width
    if config.num_pages:
        num_pages = config.num_pages
    elif config.kv_cache_bytes:
        num_pages = config.kv_cache_bytes // page_bytes
    else:
        chunk = _chunk_bytes(
            parallel.share if parallel else shape,
            min(batching.max_num_batched_tokens, max_model_len),
            jnp.dtype(dtype).itemsize,
        )
        if recipe:  # a prompt may be measured while a chunk runs
            chunk += measuring_bytes(shape, recipe.tokens, jnp.dtype(dtype).itemsize)
        if byte_pages.is_bytes(stores):  # a chunk unpacks one layer's pages after another's: room for two
            most = shape.num_kv_heads * max(row_layout(plan, max_model_len, tail).capacity)
            chunk += 2 * most * plan.page_bytes(shape.head_dim, dtype) // plan.heads_per_page // devices
        widest = row_layout(plan, max_model_len, tail).width  # of rows that ask for the most
        chunk += under_way_bytes(page_bytes * devices, widest, config.host_bytes) // devices
        on_cpu = _free_on_cpu() // devices
        free = _free_on_gpu(config.gpu_memory_utilization, model.params, chunk) if on_gpu else on_cpu
        # Never more than all rows can fill.
        num_pages = max(1, min(free // page_bytes, widest * (batching.max_num_seqs + stored)))
    if num_pages < largest:
        # Shorter contexts still fit: serve what does, and say so, unless the length was asked for.
        fits = _longest_that_fits(plan, num_pages, tail, max_model_len)
        if config.max_model_len is not None or fits < plan.window * 2:
            size = math.ceil(largest * page_bytes / 2**20)
            more = f"--num-pages {largest}" if config.num_pages else f"--kv-cache-memory {size}MiB"
            shorter = f", or --max-model-len {fits}" if fits > 1 else ""
            raise ConfigError(
                f"the KV pool has {num_pages} pages, one request of {max_model_len} tokens needs up to {largest}: "
                f"write {more}, or a lower --retention{shorter}"
            )
        log.warning("The KV pool holds one request of %d tokens at most; --max-model-len set to that", fits)
        max_model_len = fits
        largest = row_layout(plan, max_model_len, tail, plan.group_ppm).width
        if recipe:
            recipe = Recipe.of(profile, max_model_len)
    drafts = config.speculation.num_speculative_tokens if config.speculation else 0
    if on_gpu:
        _check_drafts(drafts, shape, stores)
    buckets = make_buckets(
        *batching[:2],
        plan.window,
        max_model_len,
        batching.max_num_partial_prefills,
        drafts,
        config.speculation.disable_by_batch_size if config.speculation else 0,
    )
    runner = Runner(
        model.params,
        shape,
        plan,
        get_scorer(config.scorer),
        buckets,
        num_pages=num_pages,
        num_rows=batching.max_num_seqs + stored,
        max_model_len=max_model_len,
        max_tail=tail,
        cache_dtype=stores,
        programs=programs,
        host_bytes=config.host_bytes,
        parallel=parallel,
    )
    limits = Limits(
        max_running=batching.max_num_seqs,
        max_stored=stored,
        max_model_len=max_model_len,
        max_tail=tail,
        max_chunk=buckets.largest_chunk,
        chunks_beside_decode=buckets.mixed_chunks,
        prompt_logprob_chunk=buckets.prompt_logprobs,
        packed_chunks=buckets.packed_chunks,
        packed_places=buckets.places,
        host_bytes=config.host_bytes,
        **_drafting(config.speculation, buckets),
    )
    engine: Engine
    if recipe:
        drift = DriftMonitor(shape, plan, recipe, interval=config.drift_interval)
        engine = WatchedEngine(runner, limits, drift, num_pages=num_pages, seed=config.seed)
    else:
        engine = Engine(runner, limits, num_pages=num_pages, seed=config.seed)
    full = max_model_len * plan.group_of.size // (plan.heads_per_page * plan.page_size)
    full += int(
        plan.group_pages(max_model_len)[plan.num_groups :].sum()
    )  # rings are as large whatever is kept
    mib = [round(pages * page_bytes / 2**20) for pages in (largest, full, num_pages)]
    windows = (
        f" ({plan.rings.layers} of them with a window of {plan.rings.window} tokens)" if plan.rings else ""
    )
    each = f" on each of {devices} devices" if parallel else ""
    in_fp8 = ", weights in FP8" if shape.weights_fp8 else ""
    in_fp8 += ", activations of long chunks too" if shape.activations_fp8 else ""
    in_bytes = " of 8-bit keys and values" if byte_pages.is_bytes(stores) else ""
    summary = (
        f"{model.name}{in_fp8}: {shape.num_layers} layers{windows}, {shape.num_kv_heads} KV heads in {plan.num_groups} "
        f"groups of {plan.heads_per_page}; retention {plan.retention(max_model_len):.2f} at {max_model_len} tokens "
        f"({mib[0]} of {mib[1]} MiB a request); {num_pages} pages, {mib[2]} MiB{in_bytes}{each}; "
        f"{batching.max_num_seqs} requests at once, {stored} stored"
    )
    if config.host_bytes:
        summary += f" and more in {config.kv_offloading_size:g} GiB of host memory"
    if limits.drafts:
        summary += f"; {limits.drafts} tokens drafted for each of at most {limits.drafting} requests"
    return Built(engine, model, plan, summary, defaults)


def _check_drafts(drafts: int, model: ModelConfig, stores: Any) -> None:
    """Raises ConfigError for more than the decode kernel verifies at once; `stores`: the cache's dtype."""
    most = ragged_decode.max_queries(model.head_dim, stores) // model.group_size - 1
    if drafts > max(most, 0):
        instead = f"write at most {most}" if most > 0 else "leave --speculative-config out"
        raise ConfigError(
            f"num_speculative_tokens {drafts}: with {model.group_size} query heads for each KV head, {instead}"
        )


def _drafting(speculation: Speculation | None, buckets: Buckets) -> dict[str, Any]:
    """Fields of `Limits`."""
    if not speculation:
        return {}
    lookup = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    return {"drafts": buckets.drafts, "drafting": buckets.draft_slots[-1], "lookup": lookup}


def _chunk_bytes(model: ModelConfig, tokens: int, itemsize: int) -> int:
    """Bytes for a prefill step of so many tokens: their keys and values of all layers twice, and a layer's inner values.

    Read off programs compiled for an H200 (`benchmarks.gpu_program --decode 0 --chunk N --layers L`).
    """
    kept = model.num_layers * model.num_kv_heads * model.head_dim
    return 4 * tokens * itemsize * (kept + model.intermediate_size)


def _free_on_gpu(utilization: float, params: Any, chunk: int) -> int:
    """Bytes for the pool."""
    stats = jax.local_devices()[0].memory_stats() or {}
    weights = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.itemsize for x in jax.tree.leaves(params))
    return int(utilization * stats.get("bytes_limit", 0)) - weights - chunk - GPU_RESERVE


def check_host_memory(wanted: int) -> None:
    """Raises ConfigError where a machine does not have so many bytes."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file: no limit of this process's own
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    if wanted > most:
        raise ConfigError(
            f"--kv-offloading-size {wanted / 2**30:g} is more GiB than this machine's memory has ({most / 2**30:.1f}): "
            "write less"
        )


def _free_on_cpu() -> int:
    """Bytes for the pool."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * CPU_POOL_SHARE), CPU_POOL_MOST)


def _longest_that_fits(plan: CachePlan, num_pages: int, tail: int, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = row_layout(plan, middle, tail, plan.group_ppm).width <= num_pages
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
