"""asapc::plan: a plan, or its logarithm, from scores that are given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.cpu import plan as cpu_plan
from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain
from asapc.kernels.plan import Task


def _plan(plain: Plain, scores: Tensor, **rest: Any) -> Any:
    task = Task.of(**rest)
    backend = dispatch.plan_backend("plan", scores, task, lambda: cpu_plan.described(scores, task))
    if backend == "gpu":
        from asapc.kernels.gpu.plan import plan

        return plan(scores, task)
    if backend == "cpu":
        return cpu_plan.plan(scores, task)
    if scores.is_cuda or task.as_written:
        return plain()
    return task.plain(scores.double()).to(scores.dtype)  # beside -1e4 float32 has three digits


attention("plan", _plan)
