"""The shapes that a server compiles, and what it advises when the memory is too small."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from models.registry import LoadedModel
from models.testing import random_params, tiny_config, tiny_tokenizer
from serve.args import DIVISIONS, ConfigError, ServeConfig
from serve.buckets import make_buckets
from serve.build import build, build_engine, read_chat_template, sampling_defaults
from serve.flags import make_parser, parse_args
from serve.request import RequestRejected
from tangram_jax import plan
from tangram_jax.profile import BudgetProfile


@pytest.mark.parametrize(
    ("requests", "batches"),
    [(1, (1,)), (3, (1, 3)), (16, (1, 4, 8, 16)), (20, (1, 4, 10, 16, 20)), (128, (1, 4, 16, 32, 64, 128))],
)
def test_batches_are_at_most_four_times_apart_and_twice_beyond_16(requests, batches):
    assert make_buckets(requests, 512, 32, 4096).batches == batches


@pytest.mark.parametrize(
    ("tokens", "length", "mixed", "largest", "scored"),
    [
        (512, 8192, (32, 128), 512, 128),
        (8192, 131_072, (32, 128, 512, 2048), 8192, 512),
        (8192, 1000, (32, 128, 512), 1024, 512),
        (1000, 1000, (32, 128, 512), 1000, 512),
        (16, 8192, (32,), 32, 32),
    ],
)
def test_chunks_hold_a_window_and_little_more_than_the_longest_request(
    tokens, length, mixed, largest, scored
):
    buckets = make_buckets(4, tokens, 32, length)
    assert (buckets.mixed_chunks, buckets.largest_chunk, buckets.prompt_logprobs) == (mixed, largest, scored)


@pytest.mark.parametrize(
    ("requests", "tokens", "length", "packed", "places", "slots", "few"),
    [
        (16, 512, 8192, (128,), 4, 13, 0),
        (128, 8192, 131_072, (128, 512), 4, 125, 28),
        (128, 8192, 1000, (128,), 4, 125, 28),  # four times 512 are more than the largest chunk
        (256, 8192, 8192, (128, 512), 4, 253, 60),
        (64, 8192, 8192, (128, 512), 4, 61, 12),
        (2, 512, 8192, (128,), 2, 1, 0),
        (1, 512, 8192, (), 1, 1, 0),
        (16, 16, 8192, (), 4, 13, 0),
    ],
)
def test_packed_chunks_take_no_more_memory_than_one_and_as_many_rows_of_logits(
    requests, tokens, length, packed, places, slots, few
):
    buckets = make_buckets(requests, tokens, 32, length, 4)
    assert (buckets.packed_chunks, buckets.places) == (packed, places)
    assert {*packed} <= {*buckets.mixed_chunks}
    assert all(size * places <= buckets.largest_chunk for size in packed)
    assert places + slots == 1 + buckets.batches[-1]
    assert buckets.few == (few + places if few else 0)
    assert {buckets.few} <= {0, *buckets.batches}  # so that nothing else is compiled to sample them
    shapes = buckets.shapes
    assert len(shapes) == len({shape.name for shape in shapes})
    for size in packed:
        beside = {shape.slots for shape in shapes if (shape.chunk, shape.places) == (size, places)}
        assert beside == ({slots, few} if few and size >= 512 else {slots})
        assert buckets.packed(size, few) == (size, places, few if few and size >= 512 else slots)
        assert buckets.packed(size, few + 1) == (size, places, slots)


@pytest.mark.parametrize("count", [1, 32, 33, 512, 600, 2048, 2049])
@pytest.mark.parametrize("decoding", [0, 31, 32, 128])
def test_every_chunk_has_a_program_of_which_little_is_empty(count, decoding):
    """Beside 31 decode tokens or less large chunks have 31 slots, of 128."""
    buckets = make_buckets(128, 8192, 32, 131_072, 4)
    size, slots = buckets.single(count, decoding)
    if slots is None:
        assert size == buckets.largest_chunk
        return
    assert size >= count
    assert slots >= decoding
    assert slots == (31 if size >= 512 and decoding <= 31 else 128)
    assert any(shape[:3] == (size, 1, slots) for shape in buckets.shapes)


def test_what_fits_exactly_runs_in_the_program_of_that_size():
    buckets = make_buckets(128, 8192, 32, 131_072, 4, drafts=3, drafting=16)
    for size in buckets.packed_chunks:
        assert [buckets.packed(count, 9)[0] for count in (size - 1, size)] == [size, size]
    assert [buckets.packed(129, 9)[0], buckets.single(2048, 9)[0], buckets.single(2049, 9)] == [
        512,
        2048,
        (8192, None),
    ]
    assert [buckets.batch(count) for count in (1, 2, 4, 128)] == [1, 4, 4, 128]
    assert [buckets.draft_batch(count) for count in (4, 5, 16)] == [4, 16, 16]
    assert make_buckets(4, 512, 20, 4096).mixed_chunks[0] == 24  # a window of 20, in whole eights


@pytest.mark.parametrize(
    ("positions", "who"), [(plan.MAX_TOKENS - 1, "tiny"), (plan.MAX_TOKENS + 1, "this engine")]
)
def test_more_tokens_than_there_can_be(positions, who, caplog):
    config = tiny_config(num_layers=1, max_positions=positions)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    with pytest.raises(
        ConfigError, match=f"is more than {who} can: write at most {min(positions, plan.MAX_TOKENS)}"
    ):
        build_engine(ServeConfig(max_model_len=plan.MAX_TOKENS + 2), model, dtype=jnp.float32)
    with pytest.raises(ConfigError):
        build_engine(ServeConfig(kv_cache_bytes=1, max_num_seqs=1), model, dtype=jnp.float32)
    assert (f"tiny can {positions} tokens, this engine {plan.MAX_TOKENS}" in caplog.text) == (
        positions > plan.MAX_TOKENS
    )


LEAST = ["--min-entries", "--tail-limit"]  # where no retention helps


@pytest.mark.parametrize(
    ("flags", "advised"),
    [
        (["--kv-cache-memory", "1"], ["--kv-cache-memory", *LEAST]),
        (["--num-pages", "1"], ["--num-pages", *LEAST, "--max-model-len"]),
        (["--num-pages", "2", "--max-model-len", "256"], ["--num-pages", *LEAST, "--max-model-len"]),
    ],
)
def test_advice_for_a_small_pool_can_be_followed(flags, advised):
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")

    def build(*argv):
        values = vars(make_parser().parse_args([*argv, "--max-num-seqs", "1"]))
        return build_engine(ServeConfig(**values), model, dtype=jnp.float32)

    with pytest.raises(ConfigError) as refused:
        build(*flags)
    advice = re.findall(r"(--[a-z-]+)(?: (\d\w*))?", str(refused.value))
    assert [flag for flag, _ in advice] == advised
    for flag, value in advice:
        if value:
            build(*flags, flag, value)  # the last one counts


def test_a_pool_of_bytes_holds_more_tokens_in_the_same_memory():
    config = tiny_config(num_layers=2, head_dim=64)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")

    def build(stores):
        served = ServeConfig(kv_cache_dtype=stores, kv_cache_bytes=8 << 20, max_num_seqs=1, page_size=64)
        return build_engine(served, model, dtype=jnp.float32)

    floats, ints = build("float32"), build("int8")
    assert build("auto").summary == floats.summary
    assert "8 MiB of 8-bit keys and values;" in ints.summary and "8-bit" not in floats.summary
    pages = [built.engine.stats().pages_total for built in (floats, ints)]
    assert pages[1] == pages[0] * 4 * 64 // 65  # a row of scales for the 64 entries of a page
    with pytest.raises(ConfigError, match="bfloat16 for a model in float32: write auto, int8, or --dtype bf"):
        build("bfloat16")


def test_host_memory_is_said_and_must_be_there(monkeypatch):
    config = tiny_config(num_layers=2)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    built = build_engine(
        ServeConfig(kv_offloading_size=0.5, max_num_seqs=1, num_pages=4000), model, dtype=jnp.float32
    )
    assert built.summary.endswith("64 stored and more in 0.5 GiB of host memory")
    assert built.engine.stats().host_bytes_total == built.engine._scheduler.offload.store.limit == 2**29
    with pytest.raises(
        ConfigError, match=r"--kv-offloading-size 1e\+06 is more GiB than this machine's memory has \("
    ):
        build(ServeConfig(kv_offloading_size=1e6))


def test_heads_that_would_leave_columns_empty_are_refused():
    config = tiny_config(num_layers=2)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    most = config.num_kv_heads
    for cluster, heads in (("layer", most + 1), ("model", 2 * most + 1)):
        served = ServeConfig(cluster=cluster, heads_per_page=heads, max_num_seqs=1)
        with pytest.raises(ConfigError, match=f"write at most {heads - 1}"):
            build_engine(served, model, dtype=jnp.float32)


@pytest.mark.parametrize("division", DIVISIONS)
def test_the_division_of_decode_attention_is_the_plan_s(division):
    assert DIVISIONS == plan.DIVISIONS
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    served = ServeConfig(decode_division=division, max_num_seqs=1, num_pages=2000)
    assert build_engine(served, model, dtype=jnp.float32).plan.division == division


@pytest.mark.parametrize(
    ("flags", "places", "packed"), [([], 1, ()), (["--max-num-partial-prefills", "3"], 3, (128,))]
)
def test_several_prompts_share_a_step_if_asked_for(flags, places, packed):
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    served = parse_args([*flags, "--max-num-batched-tokens", "512", "--num-pages", "2000"])
    engine = build_engine(served, model, dtype=jnp.float32).engine
    limits, buckets = engine._scheduler.limits, engine._runner.buckets
    assert (limits.packed_places, limits.packed_chunks) == (places, packed)
    assert (buckets.places, buckets.packed_chunks) == (places, packed)


def test_a_chat_template_is_a_file_or_written_out(tmp_path, monkeypatch):
    path = tmp_path / "chat.jinja"
    path.write_text("{{ 'ä' }}", encoding="utf-8")
    assert read_chat_template(str(path)) == "{{ 'ä' }}"
    assert read_chat_template("{{ messages }}" * 1000) == "{{ messages }}" * 1000
    for wrong, why in (
        (str(path) + "2", "No such file"),
        (str(tmp_path), "Is a directory"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)--chat-template .*{why}.* the path of a Jinja template"):
            read_chat_template(wrong)
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    monkeypatch.setattr("serve.build.load_model", lambda *_, **__: model)
    settings = {"num_pages": 900, "max_model_len": 128, "max_num_seqs": 1}
    with pytest.raises(ConfigError, match="--chat-template is no Jinja template: line 1: "):
        build(ServeConfig(chat_template="{% if %}", **settings))
    built = build(ServeConfig(chat_template=str(path), **settings))
    assert built.model.tokenizer.render_chat([{"role": "user", "content": "x"}]) == "ä"


def test_a_model_whose_own_chat_template_cannot_be_read_is_served_with_a_warning(monkeypatch, caplog):
    config = tiny_config(num_layers=1)
    settings = ServeConfig(num_pages=900, max_model_len=128, max_num_seqs=1)
    for template, said in (
        ("{% if %}", "line 1: "),
        (5, "no text: 5), so that chats are refused: fetch it again"),
        ({"tool_use": "{{ tools }}", "rag": "{{ 1 }}"}, "none of tool_use, rag is the 'default')"),
        ({"default": ["x"]}, "no text: "),
        ("{{ messages[7].content }}", ""),
        ("", ""),
    ):
        tokenizer = tiny_tokenizer(chat_template=template)
        model = LoadedModel(config, random_params(config), tokenizer, "tiny")
        monkeypatch.setattr("serve.build.load_model", lambda *_, model=model, **__: model)
        caplog.clear()
        build(settings)
        assert ("template of tiny cannot be read (" in caplog.text) == bool(said)
        assert said in caplog.text


def test_sampling_defaults_are_the_models_unless_they_make_no_sense(caplog):
    config = tiny_config(num_layers=1)
    caplog.set_level("INFO")

    def defaults(generation_config="auto", **said):
        model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny", said)
        return sampling_defaults(ServeConfig(generation_config=generation_config), model)

    assert defaults() == {}
    assert not caplog.records
    assert defaults(temperature=0.6, top_k=20) == {"temperature": 0.6, "top_k": 20}
    assert "temperature 0.6, top_k 20" in caplog.text
    assert defaults("vllm", temperature=0.6) == {}
    for wrong in ({"top_p": 3.0}, {"temperature": "warm"}, {"top_k": 2.5}):
        with pytest.raises(ConfigError, match=f"of tiny: .*'{next(iter(wrong))}'.* --generation-config vllm"):
            defaults(**wrong)
        assert defaults("vllm", **wrong) == {}


def test_models_with_sliding_windows():
    """The largest request that fits counts the rings; only the other layers have budgets."""
    config = tiny_config(sliding_window=100, sliding_layers=(0, 1, 3))
    model = LoadedModel(
        config=config, params=random_params(config, 0), tokenizer=tiny_tokenizer(), name="tiny"
    )
    options = ServeConfig(retention=0.5, max_model_len=2048, kv_cache_bytes=64 << 20)
    built = build_engine(options, model, dtype=np.dtype("float32"))
    plan = built.plan
    assert plan.group_of.shape == (1, 4)
    assert plan.rings.layers == 3 and plan.rings.slots >= 100 + 256 + plan.window
    assert "4 layers (3 of them with a window of 100 tokens)" in built.summary
    assert built.engine._scheduler.rows.pages.empty().owned.shape == (plan.num_page_lists,)


def test_heads_share_pages_where_they_keep_alike_shares(tmp_path):
    """A group holds what its largest head does: heads that differ in a layer may have their like in another one."""
    config = tiny_config(num_kv_heads=4, num_heads=4, num_layers=4)
    model = LoadedModel(
        config=config, params=random_params(config, 0), tokenizer=tiny_tokenizer(), name="tiny"
    )

    def built(budgets, **options):
        ratios = np.broadcast_to(np.float32(budgets), (2, config.num_layers, 4))
        BudgetProfile.from_ratios(ratios, retention=0.25).save(tmp_path / "p.npz")
        kept = {"max_model_len": 1000, "min_entries": 0, "profile": str(tmp_path / "p.npz")}
        return build_engine(
            ServeConfig(kv_cache_bytes=64 << 20, **kept, **options), model, dtype=np.dtype("float32")
        )

    different, alike = [0.1, 0.1, 0.2, 0.6], [0.25] * 4
    for budgets, options, heads, kept in (
        (different, {}, 1, 0.25),
        (different, {"heads_per_page": 4}, 4, 0.6),
        (different, {"cluster": "model"}, 4, 0.25),
        (different, {"retention": 1.0}, 4, 1.0),
        (different, {"retention": 1.0, "max_retention": 1.0}, 1, 1.0),
        (alike, {}, 4, 0.25),
    ):
        plan = built(budgets, **options).plan
        assert plan.heads_per_page == heads
        assert plan.retention(1000) == pytest.approx(kept, abs=0.01)


def test_requests_may_keep_as_much_as_the_server_or_as_it_is_told(tmp_path):
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    profile = BudgetProfile(budgets=np.array([[0.1, 0.2, 0.4, 0.9]]), retention=0.4)
    profile.save(tmp_path / "p.npz")

    def plan(**options):
        given = ServeConfig(profile=str(tmp_path / "p.npz"), num_pages=4000, max_model_len=1024, **options)
        return build_engine(given, model, dtype=jnp.float32).plan

    assert [plan(**o).max_retention for o in ({}, {"retention": 0.2}, {"max_retention": 0.7})] == [
        0.4,
        0.2,
        0.7,
    ]
    with pytest.raises(
        ConfigError, match=r"--max-retention \(0.3\) is below what .* keep .* \(0.4, the profile's\)"
    ):
        plan(max_retention=0.3)
    assert plan(retention=0.3, max_retention=0.3).max_retention == 0.3
    full = plan(retention=1.0, heads_per_page=1)
    assert (full.group_ppm == 1_000_000).all()
    assert full.budgets_at(0.25).tolist() == plan(retention=0.25, heads_per_page=1).group_ppm.tolist()


def test_between_a_profiles_target_and_what_its_margin_keeps_the_most_is_named(tmp_path):
    """One that is advised is taken, though it is no round number; 0.6 once was told to keep 0.5, where others keep 0.65."""
    config = tiny_config(num_layers=1)
    model = LoadedModel(config, random_params(config), tiny_tokenizer(), "tiny")
    BudgetProfile(budgets=np.full((1, 4), 0.65), retention=0.512345678).save(tmp_path / "p.npz")
    served = ServeConfig(profile=str(tmp_path / "p.npz"), num_pages=4000, max_model_len=1024)
    scheduler = build_engine(served, model, dtype=jnp.float32).engine._scheduler
    with pytest.raises(RequestRejected, match=r"0\.6 is above .* may keep more, by the profile's") as refused:
        scheduler.check(5, 5, 0.6)
    (most,) = re.findall(r"ask for at most ([0-9.]+),", str(refused.value))
    scheduler.check(5, 5, float(most))
    assert float(most) == 0.512345678
