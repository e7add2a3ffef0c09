"""What `bench --explain` says is what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.kernels import dispatch
from asapc.kernels.cpu import sinkhorn as cpu
from asapc.kernels.cpu.sinkhorn import FEW
from asapc.kernels.dispatch import explained
from asapc.kernels.thresholds import Thresholds, using

ATTENTION = [1.0, 1.0, 0.0, 0.0]


def sinkhorn(
    n: int, spread: float = 1.0, dtype: torch.dtype = torch.float32, half_steps: int = 4
) -> None:
    q, k, v = (torch.randn(2, 2, n, 4).to(dtype) * spread for _ in range(3))
    torch.ops.asapc.sinkhorn(q, k, v, None, None, 0.5, half_steps, True, ATTENTION)


@pytest.mark.parametrize(
    ("n", "resident", "tile", "spread", "path"),
    [
        (8, 1 << 24, 1 << 19, 1.0, "heads stacked, linear domain"),
        (40, 1 << 24, 1 << 12, 1.0, "one head a tile, linear domain"),
        (40, 1 << 10, 1 << 9, 1.0, "streamed, linear domain"),
        (40, 1 << 10, 1 << 9, 100.0, "streamed, log domain"),
    ],
)
def test_the_cpu_path_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, n: int, resident: int, tile: int, spread: float, path: str
) -> None:
    streamed: list[int] = []
    groups: list[int] = []
    stream_head, own_tile = cpu.stream_head, cpu._tile

    def count_streamed(*arguments: Any) -> Any:
        streamed.append(1)
        return stream_head(*arguments)

    def count_groups(scaled_q: Any, *arguments: Any) -> Any:
        groups.append(len(scaled_q))
        return own_tile(scaled_q, *arguments)

    monkeypatch.setattr(cpu, "stream_head", count_streamed)
    monkeypatch.setattr(cpu, "_tile", count_groups)
    with using(Thresholds(tile, resident)), explained() as choices:
        sinkhorn(n, spread, half_steps=FEW + 1)
    assert [(c.operator, c.kernel) for c in choices] == [("sinkhorn", f"CPU, {path}")]
    assert bool(streamed) == ("streamed" in path)
    assert any(size > 1 for size in groups) == ("stacked" in path)


def test_a_few_half_steps_of_short_sequences_are_a_few_calls() -> None:
    with explained() as choices:
        sinkhorn(8, half_steps=FEW)
        sinkhorn(200, half_steps=FEW)
    assert [c.kernel for c in choices] == ["CPU, log domain", "CPU, heads stacked, linear domain"]


def test_one_c_transform_from_the_keys_dual_is_torchs_attention() -> None:
    q = torch.randn(1, 2, 8, 4)
    with explained() as choices:
        torch.ops.asapc.asap(q, q, q, None, None, None, q[..., 0], 0.5, 1, ATTENTION)
        torch.ops.asapc.dual(
            q, q, None, None, [], torch.ones(1, 1), "norm", "target", 0.5, 3, True
        )
    assert [c.kernel for c in choices] == ["scaled_dot_product_attention", "CPU, norm"]


def test_two_duals_without_a_c_transform_are_the_plain_meaning() -> None:
    q = torch.randn(1, 2, 8, 4)
    with explained() as choices:
        torch.ops.asapc.asap(q, q, q, None, None, q[..., 0], q[..., 1], 0.5, 0, ATTENTION)
    assert [(c.kernel, "ablation" in c.reason) for c in choices] == [("plain PyTorch", True)]


def test_nothing_is_collected_outside() -> None:
    with explained() as choices:
        pass
    sinkhorn(8)
    assert choices == []


def test_other_devices_fall_back_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 8, 4, device="meta")
    with explained() as choices:
        assert dispatch.attention_backend("sinkhorn", q, q, q, None, None, 1.0) == "plain"
        assert dispatch.dual_backend("dual", q, q, "norm") == "plain"
        arguments = ("asap", q, q, q, None, None, 1.0)
        assert dispatch.attention_backend(*arguments, c_transforms=1, from_key=True) == "softmax"
        assert dispatch.attention_backend(*arguments, c_transforms=2, from_key=True) == "plain"
    assert all("meta devices" in c.reason for c in choices)


def test_importing_asapc_does_not_import_triton() -> None:
    import subprocess
    import sys

    script = "import sys, asapc, asapc.pipeline, asapc.operators; sys.exit('triton' in sys.modules)"
    # torch itself imports Triton in some builds: only what asapc adds counts.
    base = "import sys, torch, torch.export, torch._inductor; sys.exit('triton' in sys.modules)"
    if subprocess.run([sys.executable, "-c", base], check=False).returncode == 0:
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
