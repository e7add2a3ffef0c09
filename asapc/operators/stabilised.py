"""Finite Sinkhorn loops in the exp domain with a stabilising constant in every division.

    D = K b                            the sums that the next half-step divides by, K = exp(S - offset)
    a = mass / (D (+) delta)           of "scaling": vectors a and b multiply K at the end
    a = a mass / (a D (+) delta)       of "plan": the matrix diag(a) K diag(b) itself is divided

x (+) delta is x + delta ("add") or max(x, delta) ("clamp"). At mild scores the constant is not seen and
the plan is that of operators.sinkhorn; where a row or a column sums to less than delta, it is another
plan, and that is what such a teacher computes.

Scaling vectors and K are float64: where a float32 teacher divides by 1e-30, vectors leave float32 while
the plan does not. One exponential an entry and a matrix-vector product a half-step, in plain PyTorch on
every device; differentiable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from asapc.ir import Stabiliser
from asapc.operators.pair import pair
from asapc.operators.sinkhorn import (
    clean_values,
    factor_value,
    open_empty,
    opened_keys,
    score_matrix,
    widen,
)


def stabilised_plans(
    scores: Tensor, rows_first: bool, stabiliser: Stabiliser, log_mu: Tensor | None = None,
    log_nu: Tensor | None = None, damping: Sequence[float] | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """(a, K, b) after each half-step, without end: the code's own plan is diag(a) K diag(b).

    scores: [B, H, N, M] in units of epsilon, float64, -inf on masked keys.  log_mu: broadcastable to
    [B, H, N]; log_nu: to [B, H, M]; None where all masses are alike.  damping: powers to which the
    scalings of rows and of columns are taken.
    a: [B, H, N, 1]; K: [B, H, N, M]; b: [B, H, M, 1].
    """
    queries, keys = scores.shape[-2:]
    plain = stabiliser.form == "scaling" and stabiliser.start == "plain" and scores.numel() > 0
    plain = plain and damping is None  # of powers no offset is without effect
    rows, columns = damping or (1.0, 1.0)
    # That of plain has no effect, and so no gradient: exp(1e4) beside a mask of -1e4 would make it NaN.
    sums_first = (-1 if rows_first else -2,)
    offset = _largest(scores.detach(), sums_first) if plain else _offset(scores, stabiliser)
    kernel = torch.exp(scores - offset)
    alike = (1.0 / max(queries, 1), 1.0 / max(keys, 1)) if stabiliser.shares else (1.0, 1.0)
    row_mass, column_mass = (
        mass if logs is None else logs.double().exp()[..., None]
        for mass, logs in zip(alike, (log_mu, log_nu), strict=True)
    )
    constants: list[float | Tensor] = [stabiliser.constant, stabiliser.constant]
    if plain:  # exp(S) may overflow where the plan does not, so its first side takes exp(offset) in
        share = torch.exp(-offset if rows_first else -offset.transpose(-1, -2))
        constants[not rows_first] = stabiliser.constant * share
    leads = kernel.shape[:-2]
    a, b = kernel.new_ones(*leads, queries, 1), kernel.new_ones(*leads, keys, 1)
    if stabiliser.form == "scaling" and stabiliser.start_share:
        a, b = a / queries, b / keys
    exact = stabiliser.start == "softmax"
    while True:
        if rows_first:
            a = _divided(a, kernel @ b, row_mass, stabiliser, constants[0], exact) ** rows
        else:
            sums = kernel.transpose(-1, -2) @ a
            b = _divided(b, sums, column_mass, stabiliser, constants[1], exact) ** columns
        exact = False
        yield a, kernel, b
        rows_first = not rows_first


def _divided(
    scaling: Tensor, sums: Tensor, mass: float | Tensor, stabiliser: Stabiliser,
    constant: float | Tensor, exact: bool,
) -> Tensor:  # fmt: skip
    plan = stabiliser.form == "plan"
    total = scaling * sums if plan else sums
    empty = total == 0  # nothing there: whatever divides it, or grows with every division, is never seen
    if exact:  # a softmax has no constant
        total = total.masked_fill(empty, 1.0)
    elif stabiliser.kind == "add":
        total = total + constant
    else:
        total = total.clamp(min=constant)
    return torch.where(empty, scaling, scaling * mass / total) if plan else mass / total


def _offset(scores: Tensor, stabiliser: Stabiliser) -> Tensor:
    """What is subtracted from the scores before exp; without effect but through the constant."""
    if stabiliser.start == "plain" or scores.numel() == 0:
        return scores.new_zeros(())
    # Else "row", and "softmax", whose exp is safe after any offset.
    axes = {"matrix": (-1, -2), "tensor": ()}.get(stabiliser.start, (-1,))
    return _largest(scores, axes)


def _largest(scores: Tensor, axes: tuple[int, ...]) -> Tensor:
    top = scores.amax(axes, keepdim=True)
    return top.masked_fill(top.isneginf(), 0.0)


def _stabilised_sinkhorn(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, bias: Tensor | None,
    score_multiplier: float, half_steps: int, rows_first: bool, form: str, kind: str, constant: float,
    start: str, shares: bool, start_share: bool, output_factor: Sequence[float],
) -> Tensor:  # fmt: skip
    """A v [B, H, N, E] in v's dtype, or the dense map A [B, H, N, M] in q's.  Arguments as
    sinkhorn_attention, and Stabiliser's.

    output_factor: as for sinkhorn_attention, of the plan whose last side would have mass 1/N or 1/M each
    without the constant.
    """
    stabiliser = Stabiliser.of(form, kind, constant, start, shares, start_share)
    values = None if v is None else clean_values(v, opened_keys(keep)).double()
    q, keep, bias = open_empty(q, keep, bias)
    # Scores are rounded where the teacher's are, and only then widened.
    scores = score_matrix(widen(q), widen(k), keep, widen(bias), score_multiplier).double()
    steps = stabilised_plans(scores, rows_first, stabiliser)
    for _ in range(half_steps):
        a, kernel, b = next(steps)
    queries, keys = scores.shape[-2:]
    factor = factor_value(output_factor, queries, keys, keep)
    factor = factor * unit_mass(stabiliser, half_steps, rows_first, queries, keys)
    if values is None:
        return a * factor * kernel * b.transpose(-1, -2)
    return a * factor * (kernel @ (b * values))


stabilised_sinkhorn, stabilised_sinkhorn_attention = pair("stabilised_sinkhorn", _stabilised_sinkhorn)


def unit_mass(
    stabiliser: Stabiliser, half_steps: int, rows_first: bool, queries: int, keys: int,
    given: bool = False,
) -> float:  # fmt: skip
    """Brings the code's own plan to mass 1/N a row or 1/M a column, without the constant; 1 where masses
    are given."""
    if stabiliser.shares or given:
        return 1.0
    ends_on_rows = rows_first == (half_steps % 2 == 1)
    return 1.0 / max(queries if ends_on_rows else keys, 1)
