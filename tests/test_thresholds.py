"""Where kernels change path: whose sizes count, and that nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asapc.errors import InputError
from asapc.kernels.thresholds import Thresholds, thresholds, using


@pytest.fixture(autouse=True)
def none_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASAPC_THRESHOLDS", raising=False)


def tensors(n: int = 60, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 3, n, 8, dtype=dtype), torch.zeros(2, 3, n, 8, dtype=dtype)


def test_shipped_sizes() -> None:
    own = thresholds(*tensors())
    assert own.tile_bytes == 1 << 19 and own.resident_bytes == 1 << 26


def test_the_users_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.json").write_text(json.dumps({"cpu": {"tile_bytes": 4096}}))
    monkeypatch.setenv("ASAPC_THRESHOLDS", str(tmp_path / "own.json"))
    assert thresholds(*tensors()) == Thresholds(4096, 1 << 26)
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
