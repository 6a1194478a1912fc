"""Fixtures of the tests of loading."""

import pytest

from tests.models.checkpoints import golden_tensors


@pytest.fixture
def tiny():
    return golden_tensors("tiny_tied")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
