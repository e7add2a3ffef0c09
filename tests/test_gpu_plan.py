"""The Triton kernel of small matrices against operators/plan.py in float64; interpreted without a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_env import DEVICE
from torch import Tensor

triton = pytest.importorskip("triton")

from asapc.kernels.gpu.plan import plan, supported  # noqa: E402
from asapc.kernels.plan import Task  # noqa: E402

SETTINGS: dict[str, Any] = {
    "score_multiplier": -0.7, "half_steps": 5, "rows_first": True, "output_factor": [2.0, 1.0, 0.0, 0.0],
}  # fmt: skip
CLAMPED = {"constant": 1e-3, "form": "plan", "kind": "clamp"}
CASES: dict[str, dict[str, Any]] = {
    "rows": {},
    "columns": {"rows_first": False, "half_steps": 4},
    "one half-step": {"half_steps": 1},
    "log": {"log": True},
    "one epsilon a head": {"by_head": [1.0, 0.5]},
    "damped": {"damping": [0.8, 0.6], "half_steps": 6},
    "damped columns, log": {"damping": [1.0, 0.6], "log": True, "rows_first": False},
    "clamped": {**CLAMPED},
    "added, from a softmax": {**CLAMPED, "kind": "add", "start": "softmax", "shares": True},
    "added, from the matrix": {**CLAMPED, "kind": "add", "start": "matrix", "half_steps": 4},
    "clamped, from rows": {**CLAMPED, "start": "row", "rows_first": False},
}
SHAPES = ((70, 2, 4, 4), (3, 2, 7, 16), (1, 2, 16, 3), (1, 2, 1, 5), (2, 2, 5, 1), (1, 2, 1, 1))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def agrees(scores: Tensor, task: Task) -> None:
    """At most twice the error of the meaning at its dtype."""
    assert supported(scores, task) is None
    marginals = [None if t is None else t.to(DEVICE) for t in (task.log_mu, task.log_nu)]
    found = plan(scores.to(DEVICE), replace(task, log_mu=marginals[0], log_nu=marginals[1])).cpu()
    assert found.dtype == scores.dtype
    exact, rough = task.plain(scores.double()), task.plain(scores)
    exact, rough, found = (x.double() for x in (exact, rough, found))
    if task.settings["log"]:
        exact, rough, found = (x.clamp(min=-80) for x in (exact, rough, found))
    largest = max(1e-3, float(exact.abs().max()))
    honest = float((rough - exact).abs().max())
    rounding = max(1e-5, torch.finfo(scores.dtype).eps / 2)  # interpreted, bfloat16 is cut off
    assert float((found - exact).abs().max()) <= 2 * honest + rounding * largest


SAMPLED = [*zip(CASES, itertools.cycle(SHAPES)), *zip(CASES, itertools.cycle(SHAPES[3:] + SHAPES[:3]))]


@pytest.mark.parametrize(("case", "shape"), SAMPLED, ids=str)
def test_as_good_as_the_reference(case: str, shape: tuple[int, ...]) -> None:
    for spread in (1.0, 30.0):
        agrees(spread * random(*shape), Task.of(None, None, **{**SETTINGS, **CASES[case]}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    agrees(random(5, 2, 4, 6).to(dtype), Task.of(None, None, **SETTINGS))


def test_marginals_and_strides() -> None:
    scores = random(9, 6, 5, 2).permute(0, 3, 2, 1)  # [9, 2, 5, 6]
    log_mu, log_nu = torch.zeros(9, 1, 5), random(6, seed=1)
    log_mu[2, 0, 1], log_nu[-1] = -math.inf, -math.inf
    for log in (True, False):
        agrees(scores, Task.of(log_mu, log_nu, **SETTINGS, log=log))
        agrees(scores, Task.of(log_mu, None, **SETTINGS, log=log, damping=[0.5, 0.9]))


def test_what_it_does_not_take() -> None:
    task = Task.of(None, None, **SETTINGS)
    assert supported(random(1, 1, 4, 4).double(), task) is not None
    assert supported(random(1, 1, 40, 40), task) is not None
    assert supported(random(0, 1, 4, 4), task) is not None
    scaling = Task.of(None, None, **SETTINGS, **{**CLAMPED, "form": "scaling"})
    assert supported(random(1, 1, 4, 4), scaling) is not None
