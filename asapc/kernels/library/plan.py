"""asapc::plan: a plan, or its logarithm, from scores that are given."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asapc.kernels import dispatch, native
from asapc.kernels.cpu import plan as cpu_plan
from asapc.kernels.library.attention import attention
from asapc.kernels.library.registration import Plain
from asapc.kernels.plan import Task, changes
from asapc.operators import plan as reference
from asapc.operators.sinkhorn import widen


def _plan(plain: Plain, scores: Tensor, **rest: Any) -> Any:
    by_engine = scores.device.type == "cpu" and native.missing() is None
    task = Task.of(**rest).ended(scores, cpu_plan.changes if by_engine else changes)
    backend = dispatch.plan_backend(scores, task, lambda: cpu_plan.described(scores, task))
    if backend == "gpu":
        from asapc.kernels.gpu.plan import plan

        if not task.settings["is_kernel"]:
            return plan(scores, task)
        return plan(reference.logs_of(widen(scores)), task.of_scores()).to(scores.dtype)
    if backend == "cpu":
        return cpu_plan.plan(scores, task)
    if scores.device.type == "cpu":
        cpu_plan.require_masses(task)
    return task.plain(scores)


def _at_once(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, *settings: Any
) -> Tensor | None:
    """What _plan makes of most calls, without what takes longer than the loop of a small matrix."""
    if dispatch.listening() or native.missing() is not None:
        return None
    if log_mu is None and log_nu is None and (found := cpu_plan.at_once(scores, *settings)) is not None:
        return found
    task = Task.of_values(log_mu, log_nu, settings).ended(scores, cpu_plan.changes)
    return cpu_plan.plan(scores, task)


attention("plan", _plan, at_once=_at_once)
