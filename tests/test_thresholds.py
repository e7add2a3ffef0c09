"""Where kernels change path: whose sizes count, and that nothing else is believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asapc.errors import InputError
from asapc.kernels import thresholds as module
from asapc.kernels.thresholds import Thresholds, key_of, remember, thresholds, using, without_cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ASAPC_THRESHOLDS", raising=False)
    monkeypatch.delenv("ASAPC_NO_TUNE", raising=False)
    for cached in (module._cached, module._users):
        cached.cache_clear()
    yield
    for cached in (module._cached, module._users):
        cached.cache_clear()


def tensors(n: int = 60, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 3, n, 8, dtype=dtype), torch.zeros(2, 3, n, 8, dtype=dtype)


def test_shipped_sizes() -> None:
    own = thresholds(*tensors())
    assert own.tile_bytes == 1 << 19 and own.resident_bytes == 1 << 26


def test_the_cache_counts_for_its_bucket_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    path = remember(key_of(*tensors()), Thresholds(tile_bytes=1 << 18, resident_bytes=1 << 22))
    assert path == module.cache_file() and path.exists()
    assert thresholds(*tensors()).tile_bytes == 1 << 18
    assert thresholds(*tensors(50)).tile_bytes == 1 << 18  # 50 and 60 are both up to 64
    assert thresholds(*tensors(70)).tile_bytes == 1 << 19
    assert thresholds(*tensors(dtype=torch.float64)).tile_bytes == 1 << 19
    with without_cache():
        assert thresholds(*tensors()).tile_bytes == 1 << 19
    monkeypatch.setenv("ASAPC_NO_TUNE", "1")
    assert thresholds(*tensors()).tile_bytes == 1 << 19


def test_other_kernels_are_tuned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(key_of(*tensors()), Thresholds(1 << 18, 1 << 22))
    monkeypatch.setattr(module, "_source", lambda: "another")
    assert thresholds(*tensors()).tile_bytes == 1 << 19


def test_the_users_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(key_of(*tensors()), Thresholds(1 << 18, 1 << 22))
    (tmp_path / "own.json").write_text(json.dumps({"cpu": {"tile_bytes": 4096}}))
    monkeypatch.setenv("ASAPC_THRESHOLDS", str(tmp_path / "own.json"))
    assert thresholds(*tensors()) == Thresholds(4096, 1 << 22)
    with using(Thresholds(1, 2)):
        assert thresholds(*tensors()) == Thresholds(1, 2)


BAD = ['{"cuda": {"warps": 3}}', '{"cuda": {"stages": 99}}', '{"cuda": {"tile_x": 4096}}',
       "{", "[]", '{"cpu": 3}', '{"tpu": {}}', '{"cpu": {"tile_bytes": -1}}', '{"cpu": {"tile": 1}}']


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_of_the_user_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "own.json").write_text(text)
    monkeypatch.setenv("ASAPC_THRESHOLDS", str(tmp_path / "own.json"))
    with pytest.raises(InputError, match="ASAPC_THRESHOLDS"):
        thresholds(*tensors())


@pytest.mark.parametrize("text", ["{", "[]", "", '{"a": 3}'])
def test_a_damaged_cache_is_left_aside(text: str) -> None:
    path = module.cache_file()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    if text in ("{", ""):
        with pytest.warns(UserWarning, match="left aside"):
            assert thresholds(*tensors()).tile_bytes == 1 << 19
    else:
        assert thresholds(*tensors()).tile_bytes == 1 << 19
