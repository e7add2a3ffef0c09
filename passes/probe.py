"""Identification by experiment: which finite Sinkhorn loop turns these scores into this attention?

A region between q k^T and A v is treated as a function of its scores. Nothing here looks at code.

    log A = m S + u 1' + 1 v'      double centring removes u and v, what is left is the multiplier m
    constant sums of A             give the last side and the output factor
    smallest T that reproduces A   gives the half-steps (visible at large score spreads)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asapc.ir import Convention, Mask, OutputFactor, Side
from asapc.operators.closures import close_columns, close_rows, log_marginals
from asapc.operators.sinkhorn import initial_duals

MAX_HALF_STEPS = 64
EXACT = 1e-9  # relative error in float64 of a loop that is the convention, to rounding
STABILISED = 1e-6  # the same with a small constant in a denominator ("+ 1e-8"), still told apart


@dataclass(frozen=True)
class Sample:
    """One observation: scores [B, H, N, M] (raw products), attention [B, H, N, M], keep [B, M]."""

    scores: Tensor
    attention: Tensor
    keep: Tensor | None = None


@dataclass(frozen=True)
class Fit:
    """A convention and the largest relative error with which it reproduces the samples."""

    convention: Convention
    error: float


@dataclass(frozen=True)
class NoFit:
    """Why no convention reproduces the samples; error is that of the best one tried, if any."""

    reason: str
    error: float | None = None


def identify(samples: Sequence[Sample], tolerance: float = STABILISED) -> Fit | NoFit:
    """The convention that reproduces every sample to `tolerance` (relative to max A), or why none does.

    Samples without a mask decide the multiplier; all must agree. Use several score spreads: at a small
    spread the loop converges at once and its length cannot be seen.
    """
    plain = [sample for sample in samples if sample.keep is None] or samples
    multiplier = score_multiplier(plain)
    if isinstance(multiplier, NoFit):
        return multiplier
    mass_tolerance = tolerance
    sides = _constant_sides(samples, mass_tolerance)
    if not sides:
        return NoFit("not Sinkhorn: neither rows nor columns of the attention have constant mass")
    best: tuple[float, int, Side] | None = None
    errors = _errors_by_half_steps(samples, multiplier, sides)
    for (first, half_steps), error in errors.items():
        if best is None or error < best[0]:
            best = (error, half_steps, first)
    assert best is not None
    if not best[0] <= tolerance:
        return NoFit(
            f"not a finite Sinkhorn loop of at most {MAX_HALF_STEPS} half-steps (best: "
            f"{best[1]} half-steps, {best[2]}s first)",
            best[0],
        )
    # The smallest budget that is as good as the best, up to the rounding both share.
    enough = max(EXACT, 4 * best[0]) if best[0] <= EXACT else 1.5 * best[0]
    fits = {key: error for key, error in errors.items() if error <= min(enough, tolerance)}
    first, half_steps = min(fits, key=lambda key: (key[1], key[0] == "column"))
    last: Side = first if half_steps % 2 else ("column" if first == "row" else "row")
    factor = _output_factor(samples, last)
    if isinstance(factor, NoFit):
        return factor
    mask: Mask = "none" if all(sample.keep is None for sample in samples) else "key"
    convention = Convention(half_steps, first, multiplier, factor, mask)
    return Fit(convention, errors[(first, half_steps)])


def double_centre(matrix: Tensor) -> Tensor:
    """Remove row and column means: kills every term u_i + v_j."""
    rows = matrix.mean(-1, keepdim=True)
    columns = matrix.mean(-2, keepdim=True)
    return matrix - rows - columns + rows.mean(-2, keepdim=True)


def score_multiplier(samples: Sequence[Sample]) -> float | NoFit:
    top = bottom = 0.0
    pairs: list[tuple[Tensor, Tensor]] = []
    for sample in samples:
        for row in range(len(sample.scores)):
            scores, attention = sample.scores[row], sample.attention[row]
            if sample.keep is not None:
                scores, attention = (x[..., sample.keep[row]] for x in (scores, attention))
            if attention.numel() == 0 or not bool(((attention > 0) & attention.isfinite()).all()):
                continue
            log_a, s = double_centre(attention.log()), double_centre(scores)
            pairs.append((log_a, s))
            top += float((log_a * s).sum())
            bottom += float((s * s).sum())
    if not pairs or bottom == 0.0:
        return NoFit("not Sinkhorn: the attention is not strictly positive on finite scores")
    multiplier = top / bottom
    residual = math.sqrt(sum(float((a - multiplier * s).square().sum()) for a, s in pairs))
    scale = math.sqrt(sum(float(a.square().sum()) for a, _ in pairs))
    if scale == 0.0 or residual > 1e-4 * scale:
        return NoFit("not a row and column scaling of exp(scores)", residual / max(scale, 1e-300))
    return multiplier


def _constant_sides(samples: Sequence[Sample], tolerance: float) -> list[Side]:
    sides: list[Side] = []
    for side in ("row", "column"):
        if all(_mass_spread(sample, side) <= tolerance for sample in samples):
            sides.append(side)
    return sides


def _masses(sample: Sample, side: Side) -> Tensor:
    """Sums over one side [B, *], restricted to active keys; heads are merged."""
    if side == "row":
        sums = sample.attention.sum(-1)
        if sample.keep is None:
            return sums.flatten(1)
        return sums[sample.keep.any(-1)].flatten(1)
    sums = sample.attention.sum(-2)
    if sample.keep is None:
        return sums.flatten(1)
    keep = sample.keep[:, None, :].expand_as(sums)
    return torch.where(keep, sums, sums.amax(-1, keepdim=True)).flatten(1)


def _mass_spread(sample: Sample, side: Side) -> float:
    sums = _masses(sample, side)
    if sums.numel() == 0:
        return 0.0
    return float(((sums.amax(-1) - sums.amin(-1)) / sums.amax(-1).abs().clamp(min=1e-300)).max())


def _errors_by_half_steps(
    samples: Sequence[Sample], multiplier: float, sides: Sequence[Side]
) -> dict[tuple[Side, int], float]:
    """Largest relative error over the samples for every (first side, half-steps) ending on `sides`."""
    errors: dict[tuple[Side, int], float] = {}
    for sample in samples:
        scores = multiplier * sample.scores
        if sample.keep is not None:
            scores = scores.masked_fill(~sample.keep[:, None, None, :], -math.inf)
        log_mu, log_nu = log_marginals(scores.shape[-2], scores.shape[-1], sample.keep, scores)
        scale = sample.attention.abs().amax().clamp(min=1e-300)
        for first in ("row", "column"):
            f, g = initial_duals(scores, sample.keep)
            rows_turn = first == "row"
            for half_steps in range(1, MAX_HALF_STEPS + 1):
                if rows_turn:
                    f = close_rows(scores, g, log_mu)
                else:
                    g = close_columns(scores, f, log_nu)
                if ("row" if rows_turn else "column") in sides:
                    plan = torch.exp(scores + f[..., None] + g[..., None, :])
                    mass = sample.attention.sum((-1, -2), keepdim=True)
                    plan = plan * (mass / plan.sum((-1, -2), keepdim=True).clamp(min=1e-300))
                    error = float((plan - sample.attention).abs().amax() / scale)
                    key: tuple[Side, int] = (first, half_steps)
                    errors[key] = max(errors.get(key, 0.0), math.inf if error != error else error)
                rows_turn = not rows_turn
    return errors


def _output_factor(samples: Sequence[Sample], last: Side) -> OutputFactor | NoFit:
    """factor = N * (row mass) or M * (column mass) as a monomial in N, M and the active keys n."""
    observed: list[tuple[int, int, float, float]] = []
    for sample in samples:
        queries, keys = sample.scores.shape[-2:]
        masses = _masses(sample, last)
        if masses.numel() == 0:
            continue
        rows = range(len(masses))
        active = (
            [float(keys)] * len(masses)
            if sample.keep is None
            else [float(n) for n in sample.keep.sum(-1) if last == "column" or n > 0]
        )
        for row in rows:
            if active[row] > 0:
                value = float(masses[row].mean()) * (queries if last == "row" else keys)
                observed.append((queries, keys, active[row], value))
    # Simplest first; where N = M = n always, "N" stands for all of them.
    powers = ((1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1), (1, 1, -1), (0, 2, -1), (2, -1, 0),
              (-1, 2, 0), (1, 1, 0), (2, 0, 0), (0, 2, 0), (-1, 1, 0), (1, -1, 0))  # fmt: skip
    for unit in (True, False):
        for a, b, d in powers:
            ratios = [value / (N**a * M**b * n**d) for N, M, n, value in observed]
            target = 1.0 if unit else ratios[0]
            if all(abs(ratio - target) <= 1e-5 * abs(target) for ratio in ratios):
                return OutputFactor(1.0 if unit else target, a, b, d)
    return NoFit("the mass of the attention depends on the batch in no known way")


def snapped(value: float) -> float:
    """A number that somebody wrote down, if it is within 1e-7 of one of six digits."""
    if value == 0.0 or not math.isfinite(value):
        return value
    rounded = float(f"{value:.6g}")
    return rounded if abs(rounded - value) <= 1e-7 * abs(value) else value
