"""asapc::plan: a plan, or its logarithm, from scores that are given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asapc.kernels import dispatch
from asapc.kernels.cpu import plan as cpu_plan
from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain


def _plan(plain: Plain, scores: Tensor, **rest: Any) -> Any:
    task = cpu_plan.Task.of(**rest)
    describe = lambda: cpu_plan.described(scores, task)  # noqa: E731
    if dispatch.plan_backend("plan", scores, describe) == "plain":
        return plain()
    return cpu_plan.plan(scores, task)


attention("plan", _plan)
