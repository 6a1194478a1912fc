"""Fixtures of the tests of loading."""

import pytest

from models.huggingface import HuggingFaceDirectory
from tests.models.checkpoints import GOLDEN, Tensors


@pytest.fixture
def tiny():
    directory = HuggingFaceDirectory(GOLDEN / "tiny_tied")
    directory.open()
    return Tensors({name: directory.read(name) for name in directory.shapes}), directory.config


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
