"""Identification by experiment of sliced plans: which sorts, temperature and slice weights give this map?

    A = sum_l w_l P_l(t)           for the right t the plans of the slices span the map exactly
    log w_l = -tau D_l + const     the weights found there are linear in the right cost
    sum of A                       gives the output factor

Nothing here looks at code. Exact sorting is the limit t -> 0 and is tried as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from asapc.ir import EspConvention
from asapc.operators.esp import (
    clouds_of,
    cost_matrix,
    esp_hard_attention,
    esp_soft_attention,
    interpolation,
    soft_plan,
    soft_sort,
)
from asapc.passes.probe import EXACT, STABILISED, NoFit, snapped

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
    samples = []
    for spread in SPREADS:
        for q_shape, k_shape in shapes:
            q, k = (spread * torch.randn(s, generator=generator, dtype=torch.float64)
                    for s in (q_shape, k_shape))  # fmt: skip
            attention = observe(q, k)
            if attention is None:
                return NoFit("the region gives NaN or infinity on random queries and keys")
            samples.append(EspSample(q, k, attention))
    factors = [float(s.attention.sum((-1, -2)).mean()) / s.q.shape[2] for s in samples]
    factor = snapped(factors[0])
    if not all(abs(f - factors[0]) <= 1e-6 * abs(factors[0]) for f in factors) or factor <= 0:
        return NoFit("not a sliced plan: the mass of the map depends on the scores")
    for slices in candidates:
        for convention in likely:
            error = error_of(convention, slices, samples)
            if error <= EXACT:
                return EspFit(convention, slices, error)
    best: tuple[float, float | None, Tensor | None] | None = None
    for slices in candidates:
        temperature, residual = _temperature(samples, slices, factor)
        if best is None or residual < best[0]:
            best = (residual, temperature, slices)
    if best is None or not best[0] <= DISTINCT:
        return NoFit(
            NO_TEMPERATURE,
            None if best is None else best[0],
        )
    fits = [
        EspFit(convention, best[2], error_of(convention, best[2], samples))
        for convention in _weighted(samples, best[1], best[2], factor)
    ]
    if not fits:
        return NoFit("not a sliced plan: its slice weights do not fall with the transport cost")
    fit = min(fits, key=lambda own: own.error)
    if not fit.error <= STABILISED:
        return NoFit("not a sliced plan weighted by softmax(-tau cost)", fit.error)
    return fit


def error_of(
    convention: EspConvention, slices: Tensor | None, samples: Sequence[EspSample]
) -> float:
    """Largest error of the convention over the samples, relative to each one's largest entry."""
    worst = 0.0
    for s in samples:
        own = reference(convention, slices, s.q, s.k, s.keep)
        scale = s.attention.abs().amax().clamp(min=1e-300)
        error = float((own - s.attention).abs().amax() / scale)
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
    shared = (c.squared_cost, c.mean_cost, c.output_factor)
    if c.softsort_temperature is None:
        return esp_hard_attention(q, k, keep, query_keep, theta, tau, *shared)
    return esp_soft_attention(q, k, keep, query_keep, theta, tau, c.softsort_temperature, *shared)


def slice_plans(
    q: Tensor, k: Tensor, slices: Tensor | None, temperature: float | None
) -> Tensor:
    """P_l of one head: [L, N, M].  q: [N, D]; k: [M, D]; slices: [L, D]; no temperature: exact sorts."""
    clouds = clouds_of(q[None, None], k[None, None], None, None, slices)
    between = None if clouds.one_to_one() else interpolation(clouds)

    def sort(x: Tensor, keep: Tensor | None) -> Tensor:
        if temperature is not None:
            return soft_sort(x, keep, temperature)
        order = x.argsort(dim=-1, descending=True, stable=True)
        return torch.nn.functional.one_hot(order, x.shape[-1]).to(x.dtype)

    return soft_plan(clouds.x[0], clouds.y[0], None, None, between, sort)[0]


def _first_head(sample: EspSample, slices: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    own = slices[0] if slices is not None and slices.dim() == 3 else slices
    return sample.q[0, 0], sample.k[0, 0], sample.attention[0, 0], own


def _temperature(
    samples: Sequence[EspSample], slices: Tensor | None, factor: float
) -> tuple[float | None, float]:
    """The t for which the slices' plans span the maps, and the relative residual that is left."""

    # One sample a spread is enough: the fit that comes of it is checked on all of them.
    first = [s for s in samples if s.q.shape == samples[0].q.shape]

    def residual(temperature: float | None) -> float:
        total = 0.0
        for s in first:
            q, k, attention, own = _first_head(s, slices)
            plans = slice_plans(q, k, own, temperature).flatten(1).T  # [N M, L]
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
    samples: Sequence[EspSample], temperature: float | None, slices: Tensor | None, factor: float
) -> list[EspConvention]:
    """Conventions whose cost explains the weights: log w_l is linear in the right D_l."""
    count = None if slices is None else slices.shape[-2]
    found = []
    for squared in (False, True):
        slopes: list[tuple[int, float]] = []
        for s in samples:
            q, k, attention, own = _first_head(s, slices)
            plans = slice_plans(q, k, own, temperature)
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
            own_tau = snapped(tau * length if mean else tau)
            found.append(
                EspConvention(temperature, own_tau, squared, mean, count, factor)
            )
    return found
