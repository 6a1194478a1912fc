"""The command line: vLLM's names, defaults, and errors that say what to write instead."""

import dataclasses

import pytest

from serve.args import ON_CPU, ON_GPU, ConfigError, ServeConfig
from serve.flags import make_parser, parse_args
from serve.sizes import parse_bytes


def test_defaults_are_those_of_the_dataclass(monkeypatch):
    monkeypatch.delenv("TANGRAM_API_KEY", raising=False)
    assert parse_args([]) == ServeConfig()


def test_every_field_has_a_flag():
    flags = {action.dest for action in make_parser()._actions} - {"help"}
    assert flags == {field.name for field in dataclasses.fields(ServeConfig)}


def test_all_flags(tmp_path):
    profile = tmp_path / "p.npz"
    profile.touch()
    argv = (
        "--model dir --served-model-name a b --dtype float32 --max-model-len 2048 --seed -3 --max-num-seqs 4 "
        "--max-num-batched-tokens 256 --block-size 64 --kv-cache-memory 1.5GiB --gpu-memory-utilization 0.5 "
        f"--no-enable-prefix-caching --max-stored-sessions 0 --profile {profile} --retention 0.25 --heads-per-page 3 "
        "--cluster model --scorer keydiff --tail-limit 128 --min-entries 32 --host 0.0.0.0 --port 0 --api-key k l "
        "--max-choices 9 --max-body-bytes 1MiB --stream-interval 5 --shutdown-timeout 0 --uvicorn-log-level debug "
        "--kv-cache-dtype int8 --generation-config vllm --quantization fp8 --allowed-origins https://a.org http://b:3000 "
        "--tool-call-parser mistral --reasoning-parser none --max-retention 0.75 --decode-division split_map "
        '--hf-overrides {"rope_scaling":{"factor":4.0}}'
    )
    assert parse_args(argv.split()) == ServeConfig(
        model="dir", served_model_names=("a", "b"), dtype="float32", max_model_len=2048, seed=-3, max_num_seqs=4,
        max_num_batched_tokens=256, page_size=64, kv_cache_bytes=3 * 2**29, gpu_memory_utilization=0.5,
        prefix_cache=False, max_stored_sessions=0, profile=str(profile), retention=0.25, heads_per_page=3,
        cluster="model", scorer="keydiff", tail_limit=128, min_entries=32, host="0.0.0.0", port=0,
        api_keys=("k", "l"), max_choices=9, max_body_bytes=2**20, stream_interval=5, shutdown_timeout=0, log_level="debug",
        kv_cache_dtype="int8", generation_config="vllm", tool_call_parser="mistral", reasoning_parser="none",
        max_retention=0.75, decode_division="split_map", quantization="fp8",
        allowed_origins=("https://a.org", "http://b:3000"),
        hf_overrides={"rope_scaling": {"factor": 4.0}},
    )  # fmt: skip
    assert parse_args(["--no-prefix-cache"]).prefix_cache is False
    assert parse_args(["--kv-offloading-size", "1.5"]).host_bytes == 3 * 2**29


def test_api_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("TANGRAM_API_KEY", "from-env")
    assert parse_args([]).api_keys == ("from-env",)
    assert parse_args(["--api-key", "flag"]).api_keys == ("flag",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--retention 50", "--retention is 50: write a fraction above 0 and at most 1, e.g. 0.5 for 50%"),
        ("--retention nan", "--retention is nan: write a fraction"),
        ("--retention 0", "--retention is 0"),
        ("--max-retention 2", "--max-retention is 2: write a fraction above 0 and at most 1"),
        ("--retention 0.5 --max-retention 0.25", "(0.25) is below --retention (0.5): write at least that"),
        ("--gpu-memory-utilization 1.5", "at most 1, e.g. 0.015 for 1.5%"),
        ("--block-size 17", "--block-size is 17: write a power of two from 4 to 256, e.g. 16"),
        ("--max-num-seqs 0", "--max-num-seqs is 0: write a number from 1 to 65536"),
        ("--max-num-seqs 600 --max-num-batched-tokens 512", "write at least 600"),
        ("--max-model-len -1", "--max-model-len is -1"),
        ("--port 70000", "from 0 to 65535"),
        ("--cluster heads", "--cluster is 'heads': write one of layer, model, adjacent"),
        ("--decode-division even", "--decode-division is 'even': write one of equal, split_map, uniform"),
        ("--scorer h2o", "write one of expected_attention, snapkv, keydiff, streaming_llm, kv_compress"),
        ("--generation-config mine", "write one of auto, vllm"),
        ("--tool-call-parser pythonic", "write one of auto, harmony, hermes, llama3_json, mistral"),
        (
            "--reasoning-parser qwen3",
            "--reasoning-parser is 'qwen3': write one of auto, harmony, none, think",
        ),
        (
            "--reasoning-parser harmony --tool-call-parser hermes",
            "are one format: write it, or auto, for both",
        ),
        ("--allowed-origins example.org", "write a scheme and a host without a path, e.g. https"),
        ("--hf-overrides {x}", "'{x}' is not JSON: Expecting property name"),
        ("--hf-overrides [1]", "'[1]' is not a JSON object: write for example"),
        (
            "--quantization int4",
            "--quantization is 'int4': write fp8 or fp8-dynamic, or leave it out: how a checkpoint is quantised",
        ),
        (
            "--drift-interval 60 -tp 2",
            "--drift-interval works on one device, not with --tensor-parallel-size: leave one out",
        ),
        ("--dtype int8", "write one of auto, float32, bfloat16, float16"),
        (
            "--kv-cache-dtype fp8_e4m3",
            "is 'fp8_e4m3': write int8, as large and more exact: every key and value has a",
        ),
        ("--kv-cache-dtype int4", "is 'int4': write one of auto, float32, bfloat16, float16, int8"),
        (
            "--profile none.npz",
            "no such file; make one with `python -m calibrate --model smollm2-135m-instruct",
        ),
        ("--num-pages 5 --kv-cache-memory 1G", "write one of them"),
        ("--kv-offloading-size -1", "--kv-offloading-size is -1: write GiB of host memory, e.g. 16, or 0"),
        ("--kv-offloading-size nan", "--kv-offloading-size is nan: write GiB"),
        (
            "--kv-offloading-size 2 --no-enable-prefix-caching",
            "keeps stored conversations, of which --no-enable-prefix-caching leaves none: write one of them",
        ),
        ("--kv-offloading-size 2 --max-stored-sessions 0", "of which --max-stored-sessions 0 leaves none"),
        ("--kv-cache-memory lots", "'lots' is not a size: write for example 2GiB"),
        ("--seed x", "invalid int value"),
        ("--max-model 5", "unrecognized arguments"),
        ("--host=", "--host is empty"),
        ("--model=", "--model is empty"),
        ("--served-model-name=", "--served-model-name is empty"),
    ],
)
def test_faults_say_what_to_write(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(argv.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "on_cpu", "on_gpu"),
    [
        ("", (16, 512, 16, 1), (128, 8192, 64, 4)),
        ("--max-num-seqs 600 --block-size 32", (600, 600, 32, 1), (600, 8192, 32, 4)),
        ("--max-num-batched-tokens 64", (16, 64, 16, 1), (64, 64, 64, 4)),
        ("--max-num-seqs 4 --max-num-batched-tokens 100", (4, 100, 16, 1), (4, 100, 64, 4)),
        ("--max-num-partial-prefills 2", (16, 512, 16, 2), (128, 8192, 64, 2)),
    ],
)
def test_what_runs_at_once_is_chosen_by_machine_unless_given(argv, on_cpu, on_gpu):
    config = parse_args(argv.split())
    assert (config.on(ON_CPU), config.on(ON_GPU)) == (on_cpu, on_gpu)


def test_all_faults_at_once():
    with pytest.raises(ConfigError) as caught:
        ServeConfig(port=-1, cluster="x", retention=2.0, api_keys=("",))
    assert len(str(caught.value).splitlines()) == 4


def test_sizes():
    assert [parse_bytes(t) for t in ("1000", "2k", "2KiB", "1.5g", "1 GiB")] == [
        1000,
        2000,
        2048,
        1500000000,
        2**30,
    ]


def test_help_names_the_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    assert "--max-num-batched-tokens N" in capsys.readouterr().out
