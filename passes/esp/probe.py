"""Identification by experiment of sliced plans: which sorts, temperature and slice weights give this map?

    A = sum_l w_l P_l(t)           for the right t the plans of the slices span the map exactly
    log w_l = -tau D_l + const     the weights found there are linear in the right cost
    sum of A                       gives the output factor

Nothing here looks at code. Exact sorting is the limit t -> 0 and is tried as such. What it does with
ties shows on points that tie, and how ranks are coupled on unequal numbers of queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from asapc.ir import Coupling, EspConvention, Ties
from asapc.operators.esp import (
    esp_hard_attention,
    esp_soft_attention,
    lifted_plan,
    soft_plan,
    soft_sort,
)
from asapc.operators.matching import cost_matrix
from asapc.operators.ranks import clouds_of, rank_matrix
from asapc.passes.experiment import EXACT, STABILISED, NoFit, snapped

SPREADS = (1.0, 4.0, 0.25, 1e-2, 1e-4)  # of the coordinates: a temperature shows where t ~ spread^2
TEMPERATURES = np.logspace(-12, 4, 33)
NO_TEMPERATURE = "not a sliced plan: no temperature makes it a mixture of the slices' plans"
DISTINCT = 1e-6  # residual below which the slices' plans explain the map


@dataclass(frozen=True)
class EspSample:
    """One observation: q [B, H, N, D], k [B, H, M, D], attention [B, H, N, M], keep [B, M] or None."""

    q: Tensor
    k: Tensor
    attention: Tensor
    keep: Tensor | None = None


@dataclass(frozen=True)
class EspFit:
    """A convention, the directions it sorts along (None: the axes) and its largest relative error."""

    convention: EspConvention
    slices: Tensor | None
    error: float


def identify_esp(
    observe: Callable[[Tensor, Tensor], Tensor | None],
    shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    candidates: Sequence[Tensor | None],
    likely: Sequence[EspConvention] = (),
) -> EspFit | NoFit:
    """The sliced-plan convention that reproduces `observe` to 1e-6, or why none does.

    observe: (q, k) -> map, None where it is not finite.  shapes: of q and k, one pair for each legal
    size.  candidates: directions [L, D] or [H, L, D] found among the parameters, and None.
    likely: conventions of other layers, tried before anything is searched for.
    """
    generator = torch.Generator().manual_seed(0)
    seen: dict[str, list[EspSample]] = {"apart": [], "tied": [], "repeated": []}
    kinds = [*(("apart", spread) for spread in SPREADS), ("tied", 1.0), ("repeated", 1.0)]
    for kind, spread in kinds:
        for pair in shapes:
            q, k = (spread * _POINTS[kind](shape, generator) for shape in pair)
            attention = observe(q, k)
            if attention is None:
                return NoFit("the region gives NaN or infinity on random queries and keys")
            seen[kind].append(EspSample(q, k, attention))
    samples = seen["apart"]
    factors = [
        float(s.attention.sum((-1, -2)).mean()) / s.q.shape[2] for group in seen.values() for s in group
    ]
    factor = snapped(factors[0])
    if not all(abs(f - factors[0]) <= 1e-6 * abs(factors[0]) for f in factors) or factor <= 0:
        return NoFit("not a sliced plan: the mass of the map depends on the scores")
    square = all(q[2] == k[2] for q, k in shapes)
    couplings: tuple[Coupling | None, ...] = (None,) if square else get_args(Coupling)
    tries = {replace(other, coupling=c): None for other in likely for c in couplings
             if c == other.coupling or None in (c, other.coupling)}  # fmt: skip
    for slices in candidates:
        for convention in tries:
            error = error_of(convention, slices, samples)
            if error <= EXACT:
                return _with_ties(EspFit(convention, slices, error), seen)
    best: tuple[float, float | None, Tensor | None, Coupling | None] | None = None
    for slices in candidates:
        for coupling in couplings:
            temperature, residual = _temperature(samples, slices, factor, coupling)
            if best is None or residual < best[0]:
                best = (residual, temperature, slices, coupling)
    if best is None or not best[0] <= DISTINCT:
        return NoFit(
            NO_TEMPERATURE,
            None if best is None else best[0],
        )
    _, temperature, slices, coupling = best
    fits = [
        EspFit(convention, slices, error_of(convention, slices, samples))
        for convention in _weighted(samples, temperature, slices, factor, coupling)
    ]
    if not fits:
        return NoFit("not a sliced plan: its slice weights do not fall with the transport cost")
    fit = min(fits, key=lambda one: one.error)
    if not fit.error <= STABILISED:
        return NoFit("not a sliced plan weighted by softmax(-tau cost)", fit.error)
    return _with_ties(fit, seen)


def apart(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal points [B, H, N, D]."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def repeated_points(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Few points, each several times, [B, H, N, D]."""
    few = torch.randint(1 + shape[2] // 4, (shape[2],), generator=generator)
    return apart(shape, generator)[:, :, few]


def tied_points(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Points [B, H, N, D] that tie along every direction, and different ones along the axes.

    One coordinate is not 0: equal points have equal projections in whatever order they are summed.
    """
    points = torch.zeros(shape, dtype=torch.float64)
    axis = torch.randint(shape[3], (*shape[:3], 1), generator=generator)
    size = torch.randint(1, 3, axis.shape, generator=generator).double()
    return points.scatter_(-1, axis, size)


_POINTS = {"apart": apart, "tied": tied_points, "repeated": repeated_points}


def _with_ties(fit: EspFit, seen: Mapping[str, Sequence[EspSample]]) -> EspFit | NoFit:
    """The fit with what the layer does where points tie, which other points do not show."""
    fitted = fit.convention
    kinds: tuple[Ties, ...] = get_args(Ties) if fitted.softsort_temperature is None else ("shared",)
    fits = []
    for ties in kinds:
        convention = replace(fitted, ties=ties)
        fits.append(EspFit(convention, fit.slices, error_of(convention, fit.slices, seen["tied"])))
    best = min(fits, key=lambda one: one.error)
    if best.error <= STABILISED:
        return replace(best, error=max(best.error, fit.error))
    some_order = replace(fitted, ties="open")
    if fitted.softsort_temperature is None and all(
        _leaves_open(some_order, fit.slices, s) for s in seen["repeated"]
    ):
        return replace(fit, convention=some_order)
    return NoFit(
        "tokens with equal projections neither share their mass nor have an order of their own",
        best.error,
    )


def _leaves_open(convention: EspConvention, slices: Tensor | None, s: EspSample) -> bool:
    """Whether equal points, taken together, have what they should, and every token the right mass.

    Then the layer puts equal tokens in some order, whichever that is.
    """
    exact = reference(convention, slices, s.q, s.k, s.keep)
    one, other = ((p[..., :, None, :] == p[..., None, :, :]).all(-1).double() for p in (s.q, s.k))
    scale = exact.abs().amax() * s.q.shape[2]
    apart = one @ (s.attention - exact) @ other
    masses = [(s.attention.sum(d) - exact.sum(d)).abs().amax() for d in (-1, -2)]
    return float(torch.stack([apart.abs().amax(), *masses]).amax() / scale) <= STABILISED


def error_of(
    convention: EspConvention, slices: Tensor | None, samples: Sequence[EspSample]
) -> float:
    """Largest error of the convention over the samples, relative to each one's largest entry."""
    worst = 0.0
    for s in samples:
        if convention.coupling is None and s.q.shape[2] != s.k.shape[2]:
            return math.inf
        computed = reference(convention, slices, s.q, s.k, s.keep)
        scale = s.attention.abs().amax().clamp(min=1e-300)
        error = float((computed - s.attention).abs().amax() / scale)
        worst = max(worst, math.inf if error != error else error)
    return worst


def reference(
    convention: EspConvention, slices: Tensor | None, q: Tensor, k: Tensor, keep: Tensor | None
) -> Tensor:
    """The convention's map in plain PyTorch; a key mask is the queries' too in self-attention."""
    c = convention
    tau = torch.tensor([c.inverse_temperature], dtype=q.dtype)
    query_keep = keep if q.shape[2] == k.shape[2] else None
    theta = None if slices is None else slices.to(q.dtype)
    shared = (c.squared_cost, c.mean_cost, c.output_factor, c.coupling or "interpolated")
    if c.softsort_temperature is None:
        return esp_hard_attention(q, k, keep, query_keep, theta, tau, *shared, c.order)
    return esp_soft_attention(q, k, keep, query_keep, theta, tau, c.softsort_temperature, *shared)


def slice_plans(
    q: Tensor,
    k: Tensor,
    slices: Tensor | None,
    temperature: float | None,
    coupling: Coupling | None = None,
) -> Tensor:
    """P_l of one head: [L, N, M].  q: [N, D]; k: [M, D]; slices: [L, D]; no temperature: exact sorts."""
    clouds = clouds_of(q[None, None], k[None, None], None, None, slices)
    coupling = coupling or "interpolated"
    if temperature is None:
        return lifted_plan(clouds.x[0], clouds.y[0], None, None, coupling, "shared")[0]

    def sort(x: Tensor, keep: Tensor | None) -> Tensor:
        return soft_sort(x, keep, temperature)

    return soft_plan(clouds.x[0], clouds.y[0], None, None, rank_matrix(clouds, coupling), sort)[0]


def _first_head(sample: EspSample, slices: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    directions = slices[0] if slices is not None and slices.dim() == 3 else slices
    return sample.q[0, 0], sample.k[0, 0], sample.attention[0, 0], directions


def _temperature(
    samples: Sequence[EspSample], slices: Tensor | None, factor: float, coupling: Coupling | None
) -> tuple[float | None, float]:
    """The t for which the slices' plans span the maps, and the relative residual that is left."""

    # One sample a spread is enough: the fit that comes of it is checked on all of them.
    shape = max((s.q.shape[2] != s.k.shape[2], -i, s.q.shape) for i, s in enumerate(samples))[2]
    first = [s for s in samples if s.q.shape == shape]

    def residual(temperature: float | None) -> float:
        total = 0.0
        for s in first:
            q, k, attention, directions = _first_head(s, slices)
            plans = slice_plans(q, k, directions, temperature, coupling).flatten(1).T  # [N M, L]
            target = attention.flatten()[:, None] / factor
            weights = torch.linalg.lstsq(plans, target, driver="gelsy").solution
            total += float((plans @ weights - target).square().sum() / target.square().sum())
        return total

    exact = residual(None)
    if exact <= DISTINCT**2:
        return None, math.sqrt(exact)
    scanned = [residual(float(t)) for t in TEMPERATURES]
    best = int(np.argmin(scanned))
    low, high = TEMPERATURES[max(best - 1, 0)], TEMPERATURES[min(best + 1, len(TEMPERATURES) - 1)]
    found = minimize_scalar(
        lambda power: residual(10.0**power), bounds=(math.log10(low), math.log10(high)),
        method="bounded", options={"xatol": 1e-11, "maxiter": 80},
    )  # fmt: skip
    temperature = 10.0 ** float(found.x)
    round_number = snapped(temperature)
    if residual(round_number) <= max(residual(temperature), DISTINCT**4):
        temperature = round_number
    return temperature, math.sqrt(residual(temperature))


def _weighted(
    samples: Sequence[EspSample],
    temperature: float | None,
    slices: Tensor | None,
    factor: float,
    coupling: Coupling | None,
) -> list[EspConvention]:
    """Conventions whose cost explains the weights: log w_l is linear in the right D_l."""
    count = None if slices is None else slices.shape[-2]
    found = []
    for squared in (False, True):
        slopes: list[tuple[int, float]] = []
        for s in samples:
            q, k, attention, directions = _first_head(s, slices)
            plans = slice_plans(q, k, directions, temperature, coupling)
            if len(plans) == 1:
                slopes.append((q.shape[0], 0.0))
                continue
            target = attention.flatten()[:, None] / factor
            weights = torch.linalg.lstsq(plans.flatten(1).T, target, driver="gelsd").solution[:, 0]
            totals = (plans * cost_matrix(q, k, squared)).sum((-1, -2))
            seen = weights > 1e-6
            spread = totals[seen] - totals[seen].mean() if bool(seen.any()) else totals[:0]
            if int(seen.sum()) < 2 or float(spread.abs().max()) <= 1e-9 * float(totals.abs().max()):
                continue
            logs = weights[seen].log()
            slope = -float((spread * (logs - logs.mean())).sum() / spread.square().sum())
            slopes.append((q.shape[0], slope))
        if not slopes:
            continue
        # The largest spread of the costs comes second in SPREADS; the first is as clean, and safer.
        length, tau = slopes[0]
        for mean in (False, True):
            inverse = snapped(tau * length if mean else tau)
            found.append(
                EspConvention(temperature, inverse, squared, mean, count, factor, coupling=coupling)
            )
    return found
