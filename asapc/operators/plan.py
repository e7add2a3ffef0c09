"""The plan of a finite Sinkhorn loop from scores or costs that are given, or its logarithm.

    f_i = log mu_i - logsumexp_j(S_ij + g_j),    g_j = log nu_j - logsumexp_i(S_ij + f_i)
    P_ij = factor * exp(S_ij + f_i + g_j),       S = score_multiplier * by_head * scores

An unbalanced loop damps its updates, f_i = damping * (log mu_i - logsumexp_j(S_ij + g_j)) and columns
alike, by rho / (rho + epsilon) for a penalty rho KL(P 1 | mu) on the marginal.

The loop is that of operators.sinkhorn, and with a constant in its divisions that of operators.stabilised;
what is new is where it begins and ends. Matchers return log P, mixers multiply by P what no attention
layer would, and costs need not be inner products. Plain PyTorch, any dtype, differentiable; the fast twin
is asapc.kernels.cpu.plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from asapc.ir import Ending, PlanConvention, Side, Stabiliser
from asapc.operators.c_transforms import closed_log_plan, log_marginals
from asapc.operators.sinkhorn import alternate, factor_value, initial_duals, loop_settings, widen
from asapc.operators.stabilised import stabilised_plans, unit_mass


def log_plan_of(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, half_steps: int, rows_first: bool,
    damping: Sequence[float] | None = None,
) -> Tensor:  # fmt: skip
    """log P [.., N, M] after `half_steps` half-steps from zero duals.

    scores: [.., N, M] in units of epsilon; log_mu, log_nu: broadcastable to [.., N] and [.., M],
    None for 1/N and 1/M each, -inf where a token has no mass.
    """
    if damping is not None:
        *_, (f, g) = duals(scores, log_mu, log_nu, half_steps, rows_first, damping)
        return scores + f[..., :, None] + g[..., None, :]
    mu, nu = _log_masses(scores, log_mu, log_nu)
    for step in range(half_steps):
        rows = (step % 2 == 0) == rows_first
        scores = closed_log_plan(scores, -1 if rows else -2, mu[..., None] if rows else nu[..., None, :])
    return scores


def written_steps(
    s: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, rows_first: bool, form: str, shares: bool,
    damping: Sequence[float] | None,
) -> Iterator[tuple[Callable[[], Tensor], Tensor]]:  # fmt: skip
    """(What gives log P, f [.., N]) before the first and after every half-step, in the dtype of the
    scores, its terms added in the order in which a teacher's code adds them.

    Next to a mask of -1e9 a float32 dual keeps no digit: what is left of a row or column that is hidden
    as a whole depends on that order. s, log_mu, log_nu: as log_plan_of takes them; form, shares: as in
    ir.Written, whose "softmax" tells no f.
    """
    f, g = torch.zeros_like(s[..., :1]), torch.zeros_like(s[..., :1, :])
    # Counted, not asked for: a graph of this holds for every size.
    logs = [torch.ones_like(x).sum(axis, keepdim=True).log() for x, axis in ((f, -2), (g, -1))]
    mu = -logs[0] * shares if log_mu is None else log_mu.to(s.dtype)[..., :, None]
    nu = -logs[1] * shares if log_nu is None else log_nu.to(s.dtype)[..., None, :]
    (rows, columns), turn = damping or (1.0, 1.0), True
    for step in itertools.count():
        given, count = (log_mu, logs[0]) if turn else (log_nu, logs[1])
        yield partial(_added, form, s, f, g, count * (given is None and not shares)), f[..., 0]
        turn = (step % 2 == 0) == rows_first
        axis, mass = (-1, mu) if turn else (-2, nu)
        if form == "softmax":
            s = s.log_softmax(axis) + mass
        elif form == "logs":
            total = s.logsumexp(axis, keepdim=True)
            s = s - total + mass
            f = f + (mass - total).double() if turn else f  # beside what hides it, too, all digits count
        elif form == "increments":
            change = mass - (s + f + g).logsumexp(axis, keepdim=True)
            f, g = (f + change, g) if turn else (f, g + change)
        elif turn:
            f = rows * (mass - (s + g).logsumexp(axis, keepdim=True))
        else:
            g = columns * (mass - (s + f).logsumexp(axis, keepdim=True))


def _added(form: str, s: Tensor, f: Tensor, g: Tensor, off: Tensor) -> Tensor:
    """log P of scores that are changed themselves, or of duals."""
    if form in ("softmax", "logs"):
        return s - off
    return (s + (f + g) if form == "summed" else s + g + f if form == "reversed" else s + f + g) - off


def plan(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, score_multiplier: float,
    half_steps: int, rows_first: bool, output_factor: Sequence[float], log: bool = False,
    by_head: Sequence[float] | None = None, constant: float | None = None, form: str = "plan",
    kind: str = "clamp", start: str = "plain", shares: bool = False, start_share: bool = False,
    damping: Sequence[float] | None = None, is_kernel: bool = False, threshold: float | None = None,
    moves: str = "duals", summed: bool = False, after: int = 0, ones: bool = False,
) -> Tensor:  # fmt: skip
    """factor * P, or its logarithm: [B, H, N, M] in the dtype of the scores.

    scores: [B, H, N, M]; costs have a score_multiplier below 0.  log_mu: broadcastable to [B, H, N];
    log_nu: to [B, H, M]; None where uniform.  output_factor: [coefficient, N power, M power, n power],
    n = M.  by_head: [H], None for 1 each.  constant, and what follows: ir.Stabiliser.
    damping: [of rows, of columns], None for 1 each; not beside a constant of a plan.
    form: without a constant, of ir.Written, "plan" where no order is known; shares: uniform masses are
    1/N and 1/M in that order, not 1.  is_kernel: exp(scores) is given in their place, 0 where hidden.
    threshold: None for a loop that never ends early; it and what follows: ir.Ending.
    """
    if scores.numel() == 0:
        return scores.clone()
    dtype = scores.dtype
    if is_kernel:
        scores = logs_of(widen(scores))
    is_written = constant is None and form != "plan"
    s = scaled(scores if is_written else widen(scores), score_multiplier, by_head)
    if threshold is not None:
        ending = Ending(moves, threshold, summed, after, ones)  # type: ignore[arg-type]
        with torch.no_grad():
            loop = half_steps, rows_first, damping, form
            moved = changes(ending, s, widen(log_mu), widen(log_nu), *loop)
            half_steps = half_steps_until(ending, moved, half_steps, rows_first)
    factor: Any = factor_value(output_factor, scores.shape[-2], scores.shape[-1], None)
    if is_written:
        written = written_steps(s, log_mu, log_nu, rows_first, form, shares, damping)
        logs = next(itertools.islice(written, half_steps, None))[0]()
        return (logs + torch.log(s.new_full((), factor)) if log else logs.exp() * factor).to(dtype)
    if constant is None:
        log_plan = log_plan_of(s, widen(log_mu), widen(log_nu), half_steps, rows_first, damping)
        if not log:
            return (log_plan.exp() * factor).to(dtype)
        return (log_plan + torch.log(log_plan.new_full((), factor))).to(dtype)
    if damping is not None and form == "plan":
        raise ValueError("a constant in the divisions of a plan is known of balanced loops alone")
    stabiliser = Stabiliser.of(form, kind, constant, start, shares, start_share)
    steps = stabilised_plans(s.double(), rows_first, stabiliser, log_mu, log_nu, damping)
    a, exps, b = next(itertools.islice(steps, max(half_steps, 1) - 1, None))
    given = log_mu is not None or log_nu is not None
    queries, keys = scores.shape[-2:]
    unit = unit_mass(stabiliser, half_steps, rows_first, queries, keys, given)
    result = a * (factor * unit) * exps * b.transpose(-1, -2)
    return (result.log() if log else result).to(dtype)


def half_steps_until(
    ending: Ending, changes: Iterable[Tensor | float], half_steps: int, rows_first: bool
) -> int:
    """How many half-steps are done, of as many at most.  changes: by the half-steps on rows, in order; no
    more are asked for than are needed."""
    steps = range(1 if rows_first else 2, half_steps + 1, 2)
    due = (step for step, change in zip(steps, changes, strict=False) if bool(change <= ending.threshold))
    return min(next(due, half_steps) + ending.after, half_steps)


def changes(
    ending: Ending, scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, half_steps: int,
    rows_first: bool, damping: Sequence[float] | None = None, form: str = "plan",
) -> Iterator[Tensor]:  # fmt: skip
    """What a rule compares with its threshold after each half-step on rows; arguments as of row_duals."""
    masses = ending.masses(log_mu, log_nu, scores)
    f = row_duals(scores, *masses, half_steps, rows_first, damping, form)
    return (ending.change(*pair) for pair in itertools.pairwise(f))


def row_duals(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, half_steps: int, rows_first: bool,
    damping: Sequence[float] | None = None, form: str = "plan",
) -> Iterator[Tensor]:  # fmt: skip
    """f [B, H, N] of scores in units of epsilon: 0, and after every half-step on rows.  form: of
    ir.Written, in whose order and in the dtype of the scores they are computed, "plan" for none."""
    if form == "plan":
        all_f = (f for f, _ in duals(scores, log_mu, log_nu, half_steps, rows_first, damping))
    else:
        form = "logs" if form == "softmax" else form
        all_f = (f for _, f in written_steps(scores, log_mu, log_nu, rows_first, form, True, damping))
    steps = enumerate(itertools.islice(all_f, half_steps + 1))
    return (f for step, f in steps if step == 0 or (step % 2 == 1) == rows_first)


def duals(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, half_steps: int, rows_first: bool,
    damping: Sequence[float] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """(f [B, H, N], g [B, H, M]) of scores in units of epsilon: 0, and after every half-step."""
    masses, (f, g) = _log_masses(scores, log_mu, log_nu), initial_duals(scores, None)
    yield f, g
    for step in range(half_steps):
        side: Side = "row" if (step % 2 == 0) == rows_first else "column"
        f, g = alternate(scores, f, g, 1, side, *masses, damping)
        yield f, g


def _log_masses(scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None) -> tuple[Tensor, Tensor]:
    """Those that are given, and uniform ones where none are."""
    if log_mu is not None and log_nu is not None:  # a logarithm of a size fixes it in a graph
        return log_mu, log_nu
    uniform = log_marginals(scores.shape[-2], scores.shape[-1], None, scores)
    return uniform[0] if log_mu is None else log_mu, uniform[1] if log_nu is None else log_nu


DEFAULTS = {
    name: parameter.default for name, parameter in signature(plan).parameters.items()
    if parameter.default is not Parameter.empty
}  # fmt: skip
"""Of its last settings, which graphs leave out."""


def logs_of(kernel: Tensor) -> Tensor:
    """log K in the dtype of K >= 0, with a gradient of 0 where K is 0: what hides an entry multiplies by
    0 on the way back, and 0/0 is not 0."""
    zero = kernel == 0
    return kernel.masked_fill(zero, 1).log().masked_fill(zero, -math.inf)


def scaled(scores: Tensor, score_multiplier: float, by_head: Sequence[float] | None) -> Tensor:
    """S [B, H, N, M] in units of epsilon."""
    if by_head is None:
        return scores * score_multiplier
    return scores * (of_heads(by_head, scores) * score_multiplier)[:, None, None]


def of_heads(by_head: Sequence[float], like: Tensor) -> Tensor:
    """[H] on the device of `like`, made by fills: a copy from the host would be waited for."""
    return torch.stack([like.new_full((), value) for value in by_head])


def settings_of(convention: PlanConvention) -> dict[str, Any]:
    """The operator's settings by name."""
    stabiliser = convention.stabiliser
    return {
        **loop_settings(convention), "log": convention.log,
        "by_head": None if convention.by_head is None else list(convention.by_head),
        **({} if stabiliser is None else asdict(stabiliser)),
        **({} if convention.written is None else asdict(convention.written)),
        **({} if convention.damping is None else {"damping": list(convention.damping)}),
        **({} if convention.ending is None else asdict(convention.ending)),
    }  # fmt: skip
