"""From a checked configuration to an engine: model, profile, plan, pool and buckets."""

import contextlib
import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.registry import LoadedModel, load_model, platform
from models.sharding import tensor_mesh
from models.tokenizer import ChatTemplateError
from pallas_kernels import ragged_decode
from serve.args import ON_CPU, ON_GPU, ConfigError, ServeConfig
from serve.buckets import Buckets, make_buckets
from serve.drift import DriftMonitor, Recipe
from serve.engine import Engine
from serve.errors import APIError
from serve.limits import Limits
from serve.pool_size import cache_dtype, pool_bytes, shorter_request
from serve.profiles import check_provenance, choose_profile
from serve.protocol import CompletionRequest
from serve.runner import Runner
from serve.speculation import Speculation
from serve.transfers import allow_pinned
from serve.watched import WatchedEngine
from tangram_jax.cache import row_layout
from tangram_jax.grouping import heads_per_page_for
from tangram_jax.plan import MAX_TOKENS, CachePlan
from tangram_jax.profile import BudgetProfile
from tangram_jax.rings import SlidingLayers
from tangram_jax.scorers import get_scorer
from tangram_jax.sharding import TensorParallel

TAIL_LIMIT = 256  # generated tokens that stay whole until they are compressed
MIN_ENTRIES = 128  # prompts up to here are kept whole: there is next to nothing to save

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
    on_gpu = platform() == "gpu"
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
    elif fault := model.tokenizer.chat_template_fault():
        log.warning(
            "The chat template of %s cannot be read (%s), so that chats are refused: fetch it again, or start with "
            "--chat-template FILE",
            model.name,
            fault,
        )
    return build_engine(config, model, dtype=jnp.dtype(dtype), on_gpu=on_gpu, programs=programs)


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
        who = model.name if longest == shape.max_positions else "this engine"
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than {who} can: write at most {longest}"
        )
    if config.max_model_len is None and longest < shape.max_positions:
        log.warning("%s can %d tokens, this engine %d", model.name, shape.max_positions, longest)
    max_model_len = config.max_model_len or longest
    tail = min(config.tail_limit if config.tail_limit is not None else TAIL_LIMIT, max_model_len)
    batching = config.on(ON_GPU if on_gpu else ON_CPU)
    devices = config.tensor_parallel_size
    profile = _profile_of(config, model)
    plan = _plan_of(config, model, profile, batching.page_size, tail)
    try:
        parallel = TensorParallel.of(shape, plan, devices) if devices > 1 else None
    except ValueError as error:
        raise ConfigError(f"--tensor-parallel-size {devices}: {error}") from error
    recipe = Recipe.of(plan.scaled, max_model_len) if config.drift_interval else None
    stored = config.max_stored_sessions if config.prefix_cache else 0
    rows = batching.max_num_seqs + stored
    stores = cache_dtype(config, dtype)
    page_bytes = plan.page_bytes(shape.head_dim, stores) // devices  # these and all others: of one device
    if config.num_pages:
        num_pages = config.num_pages
    elif config.kv_cache_bytes:
        num_pages = config.kv_cache_bytes // page_bytes
    else:
        free = pool_bytes(
            config, model, plan, parallel, recipe,
            step=batching.max_num_batched_tokens, length=max_model_len, tail=tail, rows=rows, dtype=dtype,
            on_gpu=on_gpu,
        )  # fmt: skip
        widest = row_layout(plan, max_model_len, tail).width  # of rows that ask for the most
        # Never more than all rows can fill.
        num_pages = max(1, min(free // page_bytes, widest * rows))
    if num_pages < row_layout(plan, max_model_len, tail, plan.group_ppm).width:
        max_model_len = shorter_request(config, plan, num_pages, max_model_len, tail, page_bytes)
        if recipe:
            recipe = Recipe.of(plan.scaled, max_model_len)
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
        num_rows=rows,
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
    summary = _summary(config, model, plan, limits, num_pages, page_bytes)
    return Built(engine, model, plan, summary, defaults)


def _profile_of(config: ServeConfig, model: LoadedModel) -> BudgetProfile:
    """Raises ConfigError for one that is not the model's, or does not fit what requests may ask for."""
    profile = choose_profile(config, model.config, model.name)
    check_provenance(profile, model, config.scorer)
    kept = config.retention or profile.retention
    if config.max_retention is not None and config.max_retention < kept:
        raise ConfigError(
            f"--max-retention ({config.max_retention:g}) is below what requests keep that ask for nothing ({kept:g}, the "
            "profile's): write at least that, or a --retention of at most --max-retention"
        )
    return profile


def _plan_of(
    config: ServeConfig, model: LoadedModel, profile: BudgetProfile, page_size: int, tail: int
) -> CachePlan:
    """Groups and budgets of the heads. Raises ConfigError for what the model cannot do."""
    shape, budgets = model.config, profile
    if config.retention is not None:
        budgets = dataclasses.replace(profile, retention=config.retention).normalized()
    asked = [budgets, profile] if config.max_retention else [budgets]  # by requests, which may keep less
    heads_per_page = config.heads_per_page or min(
        heads_per_page_for(each, config.cluster, config.tensor_parallel_size) for each in asked
    )
    heads = shape.num_kv_heads * (len(shape.full_layers) if config.cluster == "model" else 1)
    if heads_per_page > heads:
        raise ConfigError(
            f"--heads-per-page {heads_per_page} leaves columns of every page empty: {model.name} has {heads} KV heads "
            f"to put together with --cluster {config.cluster}, write at most {heads}"
        )
    return CachePlan.build(
        budgets,
        heads_per_page=heads_per_page,
        page_size=page_size,
        cluster=config.cluster,
        division=config.decode_division,
        min_entries=MIN_ENTRIES if config.min_entries is None else config.min_entries,
        sliding=SlidingLayers.of(shape, tail),
        scaled=profile,
        max_retention=config.max_retention or config.retention or profile.retention,
    )


def _summary(
    config: ServeConfig, model: LoadedModel, plan: CachePlan, limits: Limits, num_pages: int, page_bytes: int
) -> str:
    """A line of the log; `page_bytes`: of one device."""
    shape, length = model.config, limits.max_model_len
    largest = row_layout(plan, length, limits.max_tail, plan.group_ppm).width
    full = length * plan.group_of.size // (plan.heads_per_page * plan.page_size)
    full += int(plan.group_pages(length)[plan.num_groups :].sum())  # rings are as large whatever is kept
    mib = [round(pages * page_bytes / 2**20) for pages in (largest, full, num_pages)]
    windows = (
        f" ({plan.rings.layers} of them with a window of {plan.rings.window} tokens)" if plan.rings else ""
    )
    devices = config.tensor_parallel_size
    each = f" on each of {devices} devices" if devices > 1 else ""
    in_fp8 = ", weights in FP8" if shape.weights_fp8 else ""
    in_fp8 += ", activations of steps with many tokens too" if shape.activations_fp8 else ""
    in_bytes = " of 8-bit keys and values" if config.kv_cache_dtype == "int8" else ""
    summary = (
        f"{model.name}{in_fp8}: {shape.num_layers} layers{windows}, {shape.num_kv_heads} KV heads in {plan.num_groups} "
        f"groups of {plan.heads_per_page}; retention {plan.retention(length):.2f} at {length} tokens "
        f"({mib[0]} of {mib[1]} MiB a request); {num_pages} pages, {mib[2]} MiB{in_bytes}{each}; "
        f"{limits.max_running} requests at once, {limits.max_stored} stored"
    )
    if config.host_bytes:
        summary += f" and more in {config.kv_offloading_size:g} GiB of host memory"
    if limits.drafts:
        summary += f"; {limits.drafts} tokens drafted for each of at most {limits.drafting} requests"
    return summary


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
