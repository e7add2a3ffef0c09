"""Sizes that are tried, and what is remembered of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asapc.kernels import thresholds as module
from asapc.kernels.thresholds import Thresholds, cache_file, thresholds
from asapc.measure import tuning
from asapc.measure.tuning import sizes_for, tune


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module._cached.cache_clear()


def q_and_k(tokens: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 2, tokens, 8), torch.zeros(1, 2, tokens, 8)


@pytest.mark.parametrize("gain", [2.0, 1.01])
def test_the_best_is_remembered_where_it_gains(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = q_and_k()
    start = thresholds(q, k)
    wanted = 1 << 18

    def medians(runs: dict[str, Any], **_: Any) -> dict[str, dict[str, float]]:
        found = {}
        for name, run in runs.items():
            run()
            found[name] = {"median_ms": 1.0 if thresholds_seen[-1].tile_bytes == wanted else gain}
        return found

    thresholds_seen: list[Thresholds] = []
    monkeypatch.setattr(tuning, "interleaved_medians", medians)
    found = tune(lambda: thresholds_seen.append(thresholds(q, k)), q, k, repeats=3)
    assert {limits.tile_bytes for limits in thresholds_seen} >= {*tuning.TILE_BYTES}
    if gain > 1 / tuning.WORTH_KEEPING:
        assert found.best.tile_bytes == wanted and found.gain == gain
        assert thresholds(q, k).tile_bytes == wanted  # the next process, too
        assert json.loads(cache_file().read_text())
    else:
        assert found.best == start and found.gain == 1.0
    assert found.refused == 0


def test_on_a_gpu_tiles_are_tried_and_those_that_do_not_compile_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), shape=(1, 2, 4096, 64))
    start = Thresholds(resident_tokens=128)
    sizes = sizes_for(start, gpu, gpu)
    assert sizes[0] == start and len(sizes) == 1 + len(tuning.TILES)
    few: Any = SimpleNamespace(device=torch.device("cuda"), shape=(1, 2, 100, 64))
    assert sizes_for(start, few, few)[-1].resident_tokens == 0
    swept = sizes_for(Thresholds(resident_tokens=128, sweep_tokens=1024), few, few)
    paths = {(x.resident_tokens, x.sweep_tokens) for x in swept}
    assert paths == {(128, 1024), (0, 1024), (0, 0), (128, 0)}
    monkeypatch.setattr(tuning, "sizes_for", lambda *_: sizes)
    q, k = q_and_k()

    def call() -> None:
        if thresholds(q, k).tile_x == 256:
            raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(tuning, "thresholds", lambda *_: start)
    found = tune(call, q, k, repeats=1)
    assert found.refused == sum(tile[0] == 256 for tile in tuning.TILES) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs on the CPU")
def test_a_tuned_tile_computes_the_same() -> None:
    pytest.importorskip("triton")
    import gpu_env  # noqa: F401 -- the interpreter

    from asapc.kernels.gpu.sinkhorn import streaming_loop
    from asapc.kernels.loop import Loop

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 37, 8, generator=generator) for _ in range(3))
    loop = Loop(0.3, 3, "row", [1.0, 1.0, 0.0, 0.0])
    outputs = []
    for limits in (Thresholds(), Thresholds(tile_x=16, tile_y=32, warps=8, stages=3)):
        with module.using(limits):
            outputs.append(streaming_loop(q, k, v, None, None, None, loop))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    assert not torch.equal(*outputs)  # other tiles add in another order
