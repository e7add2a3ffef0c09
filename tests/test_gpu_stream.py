"""While a CUDA graph is recorded operators never wait for the GPU: outputs, and gradients but for two.

Without a GPU: their plain code on a device that is not there (second_device), and the host side of the
Triton kernels on the CPU, where nothing may read a number back. With one: CUDA's own check, a graph that
is replayed, and torch.compile without a break.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gpu_env import DEVICE
from second_device import GPU, WAITING, NeverWaiting, OnGpu, one_gpu
from test_every_operator import CALLS, is_float, ops
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from test_gpu_features import ALL, parameters_of, width_of
from test_gpu_loops import Case

from asapc.device import moved
from asapc.kernels.gpu import backward, dual, plan, resident, sinkhorn, tiles
from asapc.kernels.loop import Loop, Tail
from asapc.kernels.plan import Task

HAS_GPU = DEVICE == "cuda"


def on(arguments: Sequence[Any], device: torch.device) -> list[Any]:
    return list(moved(list(arguments), device))


def forward_and_backward(operator: Any, given: Sequence[Any], gradient: bool) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(gradient) if is_float(x) else x for x in given]
    result = operator(*leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    wanted = [x for x in outputs if x.requires_grad]
    inputs = [x for x in leaves if is_float(x)]
    if not wanted:
        return outputs
    ones = [torch.ones_like(x) for x in wanted]
    return [*outputs, *(x for x in torch.autograd.grad(wanted, inputs, ones, allow_unused=True)
                        if x is not None)]  # fmt: skip


# Their gradient runs autograd below the dispatcher, where a device that is not there has none.
FORWARD = (
    ops.esp_hard, ops.esp_hard_attention, ops.esp_released_hard_attention, ops.hybrid_esp_hard,
    ops.hybrid_esp_hard_attention,
)  # fmt: skip


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", CALLS)
def test_plain_code_never_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, arguments = CALLS[name]
    gradient = operator not in FORWARD
    expected = forward_and_backward(operator, arguments, gradient)
    one_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with torch.cuda.device(0):
        given = on(arguments, GPU)
    with NeverWaiting():
        found = forward_and_backward(operator, given, gradient)
    for own, exact in zip(found, expected, strict=True):
        assert isinstance(own, OnGpu)
        assert torch.allclose(own.inner, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_exact_sorting_waits_where_no_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """To learn what ties: docs/gpu.md says so."""
    operator, arguments = CALLS["esp_hard"]
    one_gpu(monkeypatch)
    with torch.cuda.device(0):
        given = on(arguments, GPU)
    with NeverWaiting(), torch.no_grad(), pytest.raises(RuntimeError, match="waits for the GPU"):
        operator(*given)


class NeverRead(TorchDispatchMode):
    """On the CPU, where the kernels run interpreted: nothing of their host side reads a number back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WAITING or (name == "_to_copy" and (kwargs or {}).get("device") is not None):
            raise RuntimeError(f"{func} would wait for the GPU")
        return func(*args, **(kwargs or {}))


def host_sides() -> dict[str, Callable[[], Any]]:
    """Calls of the kernels, on the CPU, where they run interpreted."""
    q, k, v, keep, bias = Case((2, 2, 17, 18, 8, 8), masked=True, bias=(1, 2)).given()
    scores, f = tiles.Scores(q, k, keep, bias, 0.4), torch.zeros(2, 2, 17)
    loop = Loop(0.4, 5, "row", [1.0, 1.0, 0.0, 1.0])
    weights = torch.ones(2, width_of(ALL, 8))
    fitted = (keep, None, parameters_of(ALL, 2, 8), weights, ALL)
    task = Task.of(
        None, None, score_multiplier=-0.7, half_steps=5, rows_first=True,
        output_factor=[2.0, 1.0, 0.0, 0.0], by_head=[1.0, 0.5],
    )  # fmt: skip
    return {
        "resident": lambda: resident.resident_loop(scores, v, None, loop),
        "streaming": lambda: sinkhorn.streaming_loop(scores, v, None, loop),
        "dual and row mass": lambda: dual.dual_and_row_mass(q, k, *fitted, 0.4, 5, True),
        "plan": lambda: plan.plan(torch.ones(3, 2, 4, 4), task),
        "gradients": lambda: backward.sinkhorn_backward(
            v[:, :, :17], q, k, v, keep, None, f, Loop(0.4, 4, "column", [1.0, 1.0, 0.0, 0.0]), Tail(4)
        ),
    }  # fmt: skip


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", host_sides())
def test_host_sides_read_nothing_back(name: str) -> None:
    call = host_sides()[name]
    with NeverRead():
        call()


@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")
@pytest.mark.parametrize("gradient", [False, True], ids=["outputs", "and gradients"])
@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_graph_holds_it(name: str, gradient: bool) -> None:
    """Captured without a wait, and replayed on other numbers."""
    operator, arguments = CALLS[name]
    gradient = gradient and operator is not ops.esp_released_hard_attention
    given = on(arguments, torch.device("cuda"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # kernels are compiled, and workspaces made
            forward_and_backward(operator, given, gradient)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = forward_and_backward(operator, given, gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for first in [x for x in given if is_float(x)][:1]:  # none where all are masks
        first.mul_(1.25)
    graph.replay()
    torch.cuda.synchronize()
    for own, again in zip(found, forward_and_backward(operator, given, gradient), strict=True):
        assert torch.allclose(own, again, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")
@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_takes_it_whole(name: str) -> None:
    operator, arguments = CALLS[name]
    given = on(arguments, torch.device("cuda"))
    torch._dynamo.reset()  # or the calls before count towards its limit of recompilations
    compiled = torch.compile(lambda *inputs: operator(*inputs), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        expected = operator(*given)
        for _ in range(3):  # traced, recorded, replayed
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(*given)
        pairs = zip(*(pytree.tree_leaves(x) for x in (found, expected)), strict=True)
        assert all(torch.allclose(own, exact, rtol=1e-3, atol=1e-4) for own, exact in pairs)


@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_operator_agrees_with_the_cpu(name: str, dtype: torch.dtype) -> None:
    """At most four times as wrong as the CPU's own kernels in that dtype, against float64 there."""
    operator, arguments = CALLS[name]

    def at(wanted: torch.dtype) -> list[Any]:
        return [x.to(wanted) if is_float(x) else x for x in arguments]

    # Numbers that dtype holds, so that all of them are given the same.
    exact = operator(*[x.double() if is_float(x) else x for x in at(dtype)])
    honest, own = operator(*at(dtype)), operator(*on(at(dtype), torch.device("cuda")))
    for true, rough, found in zip(*(pytree.tree_leaves(x) for x in (exact, honest, own)), strict=True):
        shown = true.isfinite()
        true = true.double()  # a mask too
        error, allowed = ((x.cpu().double() - true)[shown].abs().amax() for x in (found, rough))
        step = torch.finfo(dtype).eps * max(1.0, float(true[shown].abs().amax()))
        assert float(error) <= 4 * float(allowed) + 4 * step
