"""What `bench --explain` says is what runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import asapc.kernels.library  # noqa: F401  registers torch.ops.asapc
from asapc.kernels import dispatch, native
from asapc.kernels.dispatch import explained
from asapc.kernels.thresholds import Thresholds, using

ATTENTION = [1.0, 1.0, 0.0, 0.0]


def sinkhorn(n: int, spread: float = 1.0) -> None:
    q, k, v = (torch.randn(2, 2, n, 4) * spread for _ in range(3))
    torch.ops.asapc.sinkhorn(q, k, v, None, None, 0.5, 4, True, ATTENTION)


built = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@built
@pytest.mark.parametrize(
    ("resident", "spread", "path"),
    [
        (1 << 24, 1.0, ", linear domain"),
        (1 << 24, 4.0, ", linear domain in float64"),
        (1 << 10, 1.0, ", streamed, linear domain"),
        (1 << 10, 100.0, ", streamed, log domain"),
    ],
)
def test_the_engine_tells_where_it_computed(resident: int, spread: float, path: str) -> None:
    with using(Thresholds(resident_bytes=resident)), explained() as choices:
        sinkhorn(40, spread)
    assert [(c.operator, c.kernel) for c in choices] == [("sinkhorn", f"CPU, {native.described()}{path}")]


def test_without_the_engine_the_plain_meaning_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASAPC_NATIVE", "0")
    monkeypatch.setattr(native, "missing", native.missing.__wrapped__)
    with explained() as choices:
        sinkhorn(40)
    assert [(c.kernel, c.reason) for c in choices] == [("plain PyTorch", "ASAPC_NATIVE=0")]
    assert native.described() == "no C++ engine: ASAPC_NATIVE=0"


def test_one_c_transform_from_the_keys_dual_is_torchs_attention() -> None:
    q = torch.randn(1, 2, 8, 4)
    with explained() as choices:
        torch.ops.asapc.asap(q, q, q, None, None, None, q[..., 0], 0.5, 1, ATTENTION)
        torch.ops.asapc.dual(q, q, None, None, [], torch.ones(1, 1), "norm", "target", 0.5, 3, True)
    assert [c.kernel for c in choices] == ["scaled_dot_product_attention", "CPU, norm"]


def test_other_devices_fall_back_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 8, 4, device="meta")
    with explained() as choices:
        assert dispatch.attention_backend("sinkhorn", q, q, q, None, 4) == "plain"
        assert dispatch.dual_backend("dual", q, q, "norm") == "plain"
        assert dispatch.attention_backend("asap", q, q, q, None, 1, from_key=True) == "softmax"
        assert dispatch.attention_backend("asap", q, q, q, None, 2, from_key=True) == "plain"
    assert all("meta devices" in c.reason for c in choices)


def test_importing_asapc_does_not_import_triton() -> None:
    """torch itself imports Triton in some builds: only what asapc adds counts."""
    script = (
        "import sys, torch, torch.export, torch._inductor\n"
        "if 'triton' not in sys.modules:\n"
        "    import asapc, asapc.pipeline, asapc.operators\n"
        "    sys.exit('triton' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
