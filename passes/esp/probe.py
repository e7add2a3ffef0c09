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
from typing import Any, get_args

import numpy as np
import scipy  # its packages load where they are used first, not with every command
import torch
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
from asapc.passes.experiment import EXACT, STABILISED, NoFit, relative_error, snapped

SPREADS = (1.0, 4.0, 0.25, 1e-2, 1e-4)  # of the coordinates: a temperature shows where t ~ spread^2
TEMPERATURES = np.logspace(-12, 4, 33)
NO_TEMPERATURE = "not a sliced plan: no temperature makes it a mixture of the slices' plans"
NO_ORDER = "tokens with equal projections neither share their mass nor have an order of their own"
CONDITION = 1e4  # of the slices' plans beyond which their weights cannot be told
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
    """A convention, the directions it sorts along (None: the axes) and its largest relative error.

    weights: omega [H, L] of the slices, their mean 1; None where they have none of their own.
    """

    convention: EspConvention
    slices: Tensor | None
    error: float
    weights: Tensor | None = None


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
    seen: dict[str, list[EspSample]] = {"apart": [], "tied": []}
    kinds = [*(("apart", spread) for spread in SPREADS), ("tied", 1.0)]
    for kind, spread in kinds:
        for pair in shapes:
            q, k = (spread * _POINTS[kind](shape, generator) for shape in pair)
            attention = observe(q, k)
            if attention is None:
                return NoFit("the region gives NaN or infinity on random queries and keys")
            seen[kind].append(EspSample(q, k, attention))
    found = _factor([s for group in seen.values() for s in group])
    if isinstance(found, NoFit):
        return found
    factor, powers = found
    lengths: dict[str, Any] = {"query_power": powers[0], "key_power": powers[1]}
    seen = {kind: [_without(s, powers) for s in group] for kind, group in seen.items()}
    fit = _of_one_factor(seen, factor, shapes, candidates, likely)
    return fit if isinstance(fit, NoFit) else replace(fit, convention=replace(fit.convention, **lengths))


def _factor(samples: Sequence[EspSample]) -> tuple[float, tuple[int, int]] | NoFit:
    """The mass of a query, and the powers of N and M that it goes with."""
    masses = [(float(s.attention.sum((-1, -2)).mean()) / s.q.shape[2], s.q.shape[2], s.k.shape[2])
              for s in samples]  # fmt: skip
    for a, b in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, -1), (-1, 1), (1, 1), (0, 2)):
        factors = [mass / (n**a * m**b) for mass, n, m in masses]
        if all(abs(f - factors[0]) <= 1e-6 * abs(factors[0]) for f in factors) and factors[0] > 0:
            return snapped(factors[0]), (a, b)
    lengths: dict[tuple[int, int], list[float]] = {}
    for mass, n, m in masses:
        lengths.setdefault((n, m), []).append(mass)
    if all(max(of) - min(of) <= 1e-6 * max(abs(x) for x in of) for of in lengths.values()):
        return NoFit("not a sliced plan: the mass of the map depends on the lengths in no known way")
    return NoFit("not a sliced plan: the mass of the map depends on the queries and keys")


def _without(s: EspSample, powers: tuple[int, int]) -> EspSample:
    return replace(s, attention=s.attention / (s.q.shape[2] ** powers[0] * s.k.shape[2] ** powers[1]))


def _of_one_factor(
    seen: Mapping[str, Sequence[EspSample]],
    factor: float,
    shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    candidates: Sequence[Tensor | None],
    likely: Sequence[EspConvention],
) -> EspFit | NoFit:
    """identify_esp of maps whose rows have the mass `factor` at every length."""
    samples = seen["apart"]
    square = all(q[2] == k[2] for q, k in shapes)
    couplings: tuple[Coupling | None, ...] = (None,) if square else get_args(Coupling)
    plain: dict[str, Any] = {"query_power": 0, "key_power": 0}
    tries = {replace(other, coupling=c, **plain): None for other in likely for c in couplings
             if not other.slice_weights
             and (c == other.coupling or None in (c, other.coupling))}  # fmt: skip
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
    if not any(fit.error <= STABILISED for fit in fits):
        fits += _with_weights(samples, temperature, slices, factor, coupling)
    if not fits:
        return NoFit("not a sliced plan: its slice weights do not fall with the transport cost")
    least = min(one.error for one in fits)
    if not least <= STABILISED:
        return NoFit("not a sliced plan weighted by softmax(-tau cost)", least)
    # At one length a mean is a sum with another tau: the first that is as good, not rounding, decides.
    return _with_ties(next(one for one in fits if one.error <= max(2 * least, EXACT)), seen)


def apart(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal points [B, H, N, D]."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tied_points(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Points [B, H, N, D] that tie along every direction, and different ones along the axes.

    One coordinate is not 0: equal points have equal projections in whatever order they are summed.
    """
    points = torch.zeros(shape, dtype=torch.float64)
    axis = torch.randint(shape[3], (*shape[:3], 1), generator=generator)
    size = torch.randint(1, 3, axis.shape, generator=generator).double()
    return points.scatter_(-1, axis, size)


_POINTS = {"apart": apart, "tied": tied_points}


def _with_ties(fit: EspFit, seen: Mapping[str, Sequence[EspSample]]) -> EspFit | NoFit:
    """The fit with what the layer does where points tie, which other points do not show."""
    fitted = fit.convention
    kinds: tuple[Ties, ...] = get_args(Ties) if fitted.softsort_temperature is None else ("shared",)
    fits = []
    for ties in kinds:
        convention = replace(fitted, ties=ties)
        error = error_of(convention, fit.slices, seen["tied"], fit.weights)
        fits.append(replace(fit, convention=convention, error=error))
    best = min(fits, key=lambda one: one.error)
    if best.error <= STABILISED:
        return replace(best, error=max(best.error, fit.error))
    return NoFit(NO_ORDER, best.error)


def error_of(
    convention: EspConvention,
    slices: Tensor | None,
    samples: Sequence[EspSample],
    weights: Tensor | None = None,
) -> float:
    """Largest error of the convention over the samples, relative to each one's largest entry."""
    worst = 0.0
    for s in samples:
        if convention.coupling is None and s.q.shape[2] != s.k.shape[2]:
            return math.inf
        computed = reference(convention, slices, s.q, s.k, s.keep, weights)
        worst = max(worst, relative_error(computed, s.attention))
    return worst


def reference(
    convention: EspConvention,
    slices: Tensor | None,
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    weights: Tensor | None = None,
) -> Tensor:
    """The convention's map in plain PyTorch; a key mask is the queries' too in self-attention."""
    c = convention
    tau = torch.tensor([c.inverse_temperature], dtype=q.dtype)
    query_keep = keep if q.shape[2] == k.shape[2] else None
    theta = None if slices is None else slices.to(q.dtype)
    shared = (c.squared_cost, c.mean_cost, c.output_factor, c.coupling or "interpolated")
    rest = (weights, c.query_power, c.key_power)
    if c.softsort_temperature is None:
        return esp_hard_attention(q, k, keep, query_keep, theta, tau, *shared, c.ties, *rest)
    return esp_soft_attention(q, k, keep, query_keep, theta, tau, c.softsort_temperature, *shared, *rest)


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


def _head(
    sample: EspSample, slices: Tensor | None, head: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    directions = slices[head] if slices is not None and slices.dim() == 3 else slices
    return sample.q[0, head], sample.k[0, head], sample.attention[0, head], directions


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
            q, k, attention, directions = _head(s, slices)
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
    found = scipy.optimize.minimize_scalar(
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
            q, k, attention, directions = _head(s, slices)
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


def _with_weights(
    samples: Sequence[EspSample],
    temperature: float | None,
    slices: Tensor | None,
    factor: float,
    coupling: Coupling | None,
) -> list[EspFit]:
    """Conventions whose slices have weights of their own: log w_l = beta_l - tau D_l + const.

    Over several samples, tau is what is left once the means of every sample and slice are taken off.
    """
    found = []
    for squared in (False, True):
        for mean in (False, True):
            slopes, tables = [], []
            for head in range(samples[0].q.shape[1]):
                logs, costs = [], []
                for s in samples:
                    seen = _weights_and_costs(s, slices, temperature, coupling, factor, squared, head)
                    if seen is not None:
                        logs.append(seen[0].log() - seen[0].log().mean())
                        cost = seen[1] / s.q.shape[2] if mean else seen[1]
                        costs.append(cost - cost.mean())
                if len(logs) < 2:
                    return []
                y, x = torch.stack(logs), torch.stack(costs)
                around = x - x.mean(0)
                slopes.append(-float((around * y).sum() / around.square().sum().clamp(min=1e-300)))
                tables.append((y + slopes[-1] * x).mean(0).exp())
            tau = snapped(slopes[0])
            if abs(tau) < 1e-9:
                tau = 0.0
            weights = torch.stack(tables)
            weights = weights / weights.mean(-1, keepdim=True)
            count = None if slices is None else slices.shape[-2]
            convention = EspConvention(
                temperature, tau, squared, mean, count, factor, coupling=coupling, slice_weights=True
            )
            error = error_of(convention, slices, samples, weights)
            found.append(EspFit(convention, slices, error, weights))
            if tau == 0.0:
                return found
    return found


def _weights_and_costs(
    s: EspSample, slices: Tensor | None, temperature: float | None, coupling: Coupling | None,
    factor: float, squared: bool, head: int,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """w_l and D_l of one head; None where the plans are too alike, or weights too small, to tell them."""
    q, k, attention, directions = _head(s, slices, head)
    plans = slice_plans(q, k, directions, temperature, coupling)
    table = plans.flatten(1).T
    if float(torch.linalg.cond(table)) > CONDITION:
        return None
    target = attention.flatten()[:, None] / factor
    weights = torch.linalg.lstsq(table, target, driver="gelsd").solution[:, 0]
    if not bool((weights > 1e-6).all()):
        return None
    return weights, (plans * cost_matrix(q, k, squared)).sum((-1, -2))
