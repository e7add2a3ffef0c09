"""CPU twin of operators/plan.py: the loop in the linear domain, by the engine.

K = exp(S - top) is formed once, with the largest score of every row, or of every column where columns are
closed first; every half-step is then a matrix-vector product,

    a = mu / (K b),    b = nu / (K' a),    P = diag(a) K diag(b),    log P = S - top + log a + log b.

Damped scalings are powers of these quotients. They do not take up what is subtracted, so nothing is.
A kernel that is given takes the place of exp(S); it is divided by its largest entry.

Matrices of at most SMALL entries are worked on side by side, one in each lane of a register. What the
linear domain cannot hold is found after the loop, matrix by matrix, and computed in logarithms instead,
by the reference unless a teacher's order of adding duals is known: a column (or row) whose largest entry
of K is near 0, or scalings that spread too far for what has left K at the lower end of the format to be
without effect.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from asapc.errors import BranchError
from asapc.features.clouds import WIDE
from asapc.ir import Ending, Stabiliser
from asapc.kernels import native
from asapc.kernels.plan import SMALL, Changes, Settings, Task, is_small
from asapc.kernels.plan import changes as plain_changes
from asapc.operators import plan as reference
from asapc.operators.sinkhorn import widen

NEAR, FAR = -2e3, -1e7  # scores of masks that are low, but not so low that nothing is left of them
ALIKE = 1e-5  # difference of the logarithms of two totals that are meant to be one
ROUNDED = 500.0  # size of duals from which on what float32 rounds off may show


def described(scores: Tensor, task: Task) -> tuple[str, str]:
    """What runs, and why."""
    queries, keys = scores.shape[-2:]
    if is_small(scores):
        return "CPU, matrices side by side", f"{queries} x {keys} entries a matrix"
    if task.stabiliser is not None:
        why = "the constant in its divisions is kept; in float64 where scores spread"
        return "CPU, linear domain", why
    return "CPU, linear domain", "what it cannot hold is computed in the log domain"


def plan(scores: Tensor, task: Task) -> Tensor:
    """[B, H, N, M] in the dtype of the scores, see operators.plan."""
    batch, heads, queries, keys = scores.shape
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    settings, stabiliser, masses = task.settings, task.stabiliser, (task.log_mu, task.log_nu)
    has_masses = (masses[0] is not None, masses[1] is not None)
    way = scores.numel() and _way(task.known, has_masses, queries, keys, dtype, scores.dtype is dtype)
    if not way:
        return task.plain(scores).contiguous()
    if way is OF_LOGS:
        return plan(reference.logs_of(widen(scores)), task.of_scores()).to(scores.dtype)
    given, log_mu, log_nu = _given(scores, task, dtype)
    offset = 0.0
    if stabiliser is not None:
        if stabiliser.start == "tensor":
            offset = float(_largest(given, settings["score_multiplier"])) * settings["score_multiplier"]
            if offset == math.inf:  # beside it nothing is left of any other matrix
                return task.plain(scores).contiguous()
        if task.has_masses and (
            settings["log"]
            or (stabiliser.form == "plan" and not _alike_in_total(scores, task, stabiliser))
        ):
            require_masses(task)
            return task.plain(scores).contiguous()  # totals that differ would drive its scalings apart
    if settings["damping"] is not None and any(map(_are_lost, (log_mu, log_nu), settings["damping"])):
        return task.plain(scores).contiguous()
    out, lost = native.plan(given, log_mu, log_nu, offset, way)
    if lost is not None:
        matrices = (-1, queries, keys)
        _beyond(given.view(matrices), (batch, heads), task, out.view(matrices), lost, scores.dtype)
    for logs, is_first in ((log_mu, task.rows_first), (log_nu, not task.rows_first)):
        if logs is not None and stabiliser is None and (is_first or settings["half_steps"] > 1):
            empty = logs.amax(-1).isneginf()
            if bool(empty.any()):  # where no score is finite either, the engine has no number
                none = -math.inf if settings["log"] else 0.0
                out.view(-1, queries, keys).masked_fill_(empty.view(-1, 1, 1), none)
    return out if scores.dtype is dtype else out.to(scores.dtype)


def at_once(scores: Tensor, *settings: Any) -> Tensor | None:
    """`plan` of small matrices without masses, with the settings as a call has them: the engine's first
    answer.  None where more has to be looked at, which computes it again."""
    queries, keys = scores.shape[2:]
    if not 0 < queries * keys <= SMALL:
        return None
    way = _way_at_once(
        queries, keys, scores.dtype, *[tuple(x) if type(x) is list else x for x in settings]
    )
    return native.plans_of_all(scores.contiguous(), way) if way and scores.numel() else None


@lru_cache(4096)
def _way_at_once(queries: int, keys: int, dtype: torch.dtype, *settings: Any) -> bytes:
    known = Task.of_values(None, None, settings).known
    of_tensor = known.stabiliser is not None and known.stabiliser.start == "tensor"
    if dtype not in WIDE or known.ending is not None or known.values["by_head"] is not None or of_tensor:
        return b""
    way = _way(known, (False, False), queries, keys, dtype, True)
    return b"" if way is OF_LOGS else way


def changes(scores: Tensor, task: Task, ending: Ending) -> Changes:
    """As of kernels.plan, by the engine where it holds all matrices: of so many half-steps at first, and
    twice as many each time that more are asked for."""
    log_mu, log_nu = ending.masses(task.log_mu, task.log_nu, scores)
    given = _given(scores, Task(log_mu, log_nu, task.known), torch.float64)
    has_masses = (log_mu is not None, log_nu is not None)
    half_steps, told, most = FIRST_HALF_STEPS, 0, task.settings["half_steps"]
    while told < (steps := (min(half_steps, most) + task.rows_first) // 2):
        way = _way_of_changes(task.known, has_masses, *scores.shape[2:], min(half_steps, most))
        found = native.plan_changes(*given, steps, ending.moves == "scalings", way)
        if found is None:
            yield from itertools.islice(plain_changes(scores, task, ending), told, None)
            return
        yield from (found.mean(0) / (1 if ending.summed else scores.shape[2])).tolist()[told:]
        half_steps, told = 2 * half_steps, steps


FIRST_HALF_STEPS = 8


@lru_cache(4096)
def _way_of_changes(
    known: Settings, has_masses: tuple[bool, bool], queries: int, keys: int, half_steps: int
) -> bytes:
    """The engine's settings for the changes of so many half-steps of a loop without a constant."""
    some = torch.empty(0)  # stands for masses
    settings = {
        **known.values, "half_steps": half_steps, "threshold": None, "constant": None,
        "is_kernel": False, "log": False,
    }  # fmt: skip
    task = Task.of(*(some if has else None for has in has_masses), **settings)
    near = ROUNDED if task.as_written else math.inf
    start = ("row" if task.rows_first else "column") if task.settings["damping"] is None else "plain"
    return native.plan_settings(
        task, queries, keys, torch.float64, start, near, FAR, queries * keys <= SMALL, False
    )


def _given(scores: Tensor, task: Task, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores and masses as the engine reads them."""
    given = scores if scores.dtype is dtype else scores.to(dtype)
    if task.settings["by_head"] is not None:
        given = reference.scaled(given, 1.0, task.settings["by_head"])
    log_mu, log_nu = (
        None if logs is None else _by_token(logs.to(dtype), (*scores.shape[:2], size)).contiguous()
        for logs, size in zip((task.log_mu, task.log_nu), scores.shape[2:], strict=True)
    )
    return given.contiguous(), log_mu, log_nu


OF_LOGS = b"logs"  # of a kernel, whose logarithms are taken first


@lru_cache(4096)
def _way(
    known: Settings, has_masses: tuple[bool, bool], queries: int, keys: int, dtype: torch.dtype,
    is_own: bool,
) -> bytes:  # fmt: skip
    """What settings and sizes alone decide: the engine's settings, or OF_LOGS, or nothing where the
    reference runs.  is_own: whether the scores are of the dtype."""
    settings, stabiliser = known.values, known.stabiliser
    some = torch.empty(0)  # stands for masses
    mu, nu = (some if has else None for has in has_masses)
    task = Task(mu, nu, known)
    units = task.as_written and not settings["shares"] and not all(has_masses)  # masses of 1, which damp
    of_plan = stabiliser is not None and stabiliser.form == "plan"  # which is never damped
    if settings["half_steps"] < 1 or (settings["damping"] and (units or of_plan)):
        return b""
    starts: str | None = None if stabiliser is None else stabiliser.start
    scaled = settings["score_multiplier"] != 1.0 or settings["by_head"] is not None
    if settings["is_kernel"] and (scaled or task.as_written or starts == "tensor"):
        return OF_LOGS
    first = "matrix" if settings["is_kernel"] else "row" if task.rows_first else "column"
    start = starts or (first if settings["damping"] is None else "plain")
    near = ROUNDED if task.as_written else torch.inf
    return native.plan_settings(
        task, queries, keys, dtype, start, near, FAR, queries * keys <= SMALL, task.as_written and is_own
    )


def require_masses(task: Task) -> None:
    """Raises BranchError where a mass has no logarithm; looked at only where the engine gives up."""
    if any(logs is not None and bool(logs.isnan().any()) for logs in (task.log_mu, task.log_nu)):
        raise BranchError("masses of a plan >= 0", True)


def _alike_in_total(scores: Tensor, task: Task, stabiliser: Stabiliser) -> bool:
    """Whether both sides of every matrix have the same mass, but for what a few half-steps forgive."""
    totals = [
        torch.tensor(1.0 if stabiliser.shares else size).log() if logs is None
        else logs.expand(*logs.shape[:-1], size).double().logsumexp(-1)
        for logs, size in zip((task.log_mu, task.log_nu), scores.shape[-2:], strict=True)
    ]  # fmt: skip
    return bool(((totals[0] - totals[1]).abs() <= ALIKE).all())


def _are_lost(logs: Tensor | None, damping: float) -> bool:
    """Whether a mass is 0 of which a damped half-step makes more: exp(-200) to the power 0.01 is 0.14."""
    return logs is not None and bool(((logs.exp() == 0) & ((damping * logs).exp() > 0)).any())


def _by_token(logs: Tensor, shape: Sequence[int]) -> Tensor:
    """[G, X] of a side, or [1, X] where all matrices have the same."""
    logs = logs.expand(*logs.shape[:-1], shape[-1])
    return (logs if logs.numel() == shape[-1] else logs.broadcast_to(shape)).reshape(-1, shape[-1])


def _largest(scores: Tensor, multiplier: float) -> Tensor:
    """Of all scores, the one that is largest once it is multiplied; 0 where all are -inf then."""
    top = scores.amax() if multiplier > 0 else scores.amin()
    return torch.where((top * multiplier).isneginf(), 0.0, top)


def _beyond(
    given: Tensor, leads: Sequence[int], task: Task, out: Tensor, which: Tensor, dtype: torch.dtype
) -> None:
    """Some matrices [g] of `given` [G, N, M] that the engine does not hold, into `out`, by the reference.
    leads: B and H; dtype: of the scores, in which a known order of the sums is followed."""
    require_masses(task)
    chosen = given[which][:, None]
    if task.settings["is_kernel"]:
        chosen, task = reference.logs_of(chosen), task.of_scores()
    stabiliser = task.stabiliser
    if task.as_written:
        chosen = chosen.to(dtype)
    elif stabiliser or FAR < -float(chosen.masked_fill(chosen.isinf(), 0.0).abs().amax()) < NEAR:
        chosen = chosen.double()  # duals as large as a mask of -1e4 leave no digits to float32

    def own(logs: Tensor | None) -> Tensor | None:
        if logs is None or logs.numel() == logs.shape[-1]:
            return logs
        return logs.broadcast_to(*leads, logs.shape[-1]).reshape(-1, 1, logs.shape[-1])[which]

    settings = {**task.settings, "by_head": None}
    if stabiliser is not None and stabiliser.start == "tensor":
        top = _largest(given, settings["score_multiplier"])
        chosen, settings = chosen - top, settings | {"start": "plain"}
    task = Task.of(own(task.log_mu), own(task.log_nu), **settings)
    out[which] = task.plain(chosen)[:, 0].to(out.dtype)
