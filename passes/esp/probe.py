"""Identification by experiment of sliced plans: which sorts, temperature and slice weights give this map?

    A = sum_l w_l P_l(t)           for the right t the plans of the slices span the map exactly
    log w_l = -tau D_l + const     the weights found there are linear in the right cost
    sum of A                       gives the output factor

Nothing here looks at code. Exact sorting is the limit t -> 0 and is tried as such. What it does with
ties shows on points that tie, and how ranks are coupled on unequal numbers of queries and keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import numpy as np
import scipy  # its packages load where they are used first, not with every command
import torch
from torch import Tensor

from asapc.ir import Coupling, EspConvention, Ties
from asapc.operators.esp import esp_hard_attention, esp_soft_attention, lifted_plan, soft_plan, soft_sort
from asapc.operators.matching import cost_matrix
from asapc.operators.ranks import clouds_of, rank_matrix
from asapc.passes.experiment import (
    EXACT,
    STABILISED,
    Experiment,
    Lengths,
    NoFit,
    normal,
    relative_error,
    snapped,
)

SPREADS = (1.0, 4.0, 0.25, 1e-2, 1e-4)  # of the coordinates: a temperature shows where t ~ spread^2
TEMPERATURES = np.logspace(-12, 4, 33)
NO_TEMPERATURE = "not a sliced plan: no temperature makes it a mixture of the slices' plans"
NO_ORDER = "tokens with equal projections neither share their mass nor have an order of their own"
CONDITION = 1e4  # of the slices' plans beyond which their weights cannot be told
DISTINCT = 1e-6  # residual below which the slices' plans explain the map


Points = Callable[[Sequence[int], torch.Generator], Tensor]
"""Random ones [B, H, N, D] of a shape."""


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
    weights: Tensor | None = None
    error: float = 0.0

    def measured(self, samples: Sequence[EspSample]) -> EspFit:
        """With its largest error over the samples, relative to each one's largest entry."""
        if self.convention.coupling is None and any(s.q.shape[2] != s.k.shape[2] for s in samples):
            return replace(self, error=math.inf)
        maps = ((self.attention(s.q, s.k, s.keep), s.attention) for s in samples)
        return replace(self, error=max((relative_error(*pair) for pair in maps), default=0.0))

    def attention(self, q: Tensor, k: Tensor, keep: Tensor | None) -> Tensor:
        """The convention's map in plain PyTorch; a key mask is the queries' too in self-attention."""
        c = self.convention
        tau = torch.tensor([c.inverse_temperature], dtype=q.dtype)
        query_keep = keep if q.shape[2] == k.shape[2] else None
        theta = None if self.slices is None else self.slices.to(q.dtype)
        tensors = (q, k, keep, query_keep, theta, tau)
        shared = (c.squared_cost, c.mean_cost, c.output_factor, c.coupling or "interpolated")
        rest = (self.weights, c.query_power, c.key_power)
        if c.softsort_temperature is None:
            return esp_hard_attention(*tensors, *shared, c.ties, *rest)
        return esp_soft_attention(*tensors, c.softsort_temperature, *shared, *rest)


def identify_esp(
    trial: Experiment, candidates: Sequence[Tensor | None], likely: Sequence[EspConvention]
) -> EspFit:
    """The sliced-plan convention that reproduces the code to 1e-6.  Raises NoFit.

    trial: q [B, H, N, D], k [B, H, M, D] -> A [B, H, N, M].
    candidates: directions [L, D] or [H, L, D] found among the parameters, and None.
    likely: conventions of other layers, tried before anything is searched for.
    """
    samples = [drawn(trial, normal, at, spread) for spread in SPREADS for at in trial.sizes]
    tied = [drawn(trial, tied_points, at) for at in trial.sizes]
    if not all(bool(s.attention.isfinite().all()) for s in (*samples, *tied)):
        raise NoFit("the region gives NaN or infinity on random queries and keys")
    factor, (a, b) = _factor([*samples, *tied])
    samples, tied = (
        [replace(s, attention=s.attention / (s.q.shape[2] ** a * s.k.shape[2] ** b)) for s in some]
        for some in (samples, tied)
    )
    fit = _with_ties(_of_one_factor(samples, factor, candidates, likely), tied)
    return replace(fit, convention=replace(fit.convention, query_power=a, key_power=b))


def _factor(samples: Sequence[EspSample]) -> tuple[float, tuple[int, int]]:
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
        raise NoFit("not a sliced plan: the mass of the map depends on the lengths in no known way")
    raise NoFit("not a sliced plan: the mass of the map depends on the queries and keys")


def _of_one_factor(
    samples: Sequence[EspSample], factor: float, candidates: Sequence[Tensor | None],
    likely: Sequence[EspConvention],
) -> EspFit:  # fmt: skip
    """identify_esp of maps whose rows have the mass `factor` at every length, where nothing ties."""
    square = all(s.q.shape[2] == s.k.shape[2] for s in samples)
    couplings: tuple[Coupling | None, ...] = (None,) if square else get_args(Coupling)
    plain = [replace(one, query_power=0, key_power=0) for one in likely if not one.slice_weights]
    tries = {replace(one, coupling=c): None for one in plain for c in couplings
             if c == one.coupling or None in (c, one.coupling)}  # fmt: skip
    for slices in candidates:
        for convention in tries:
            fit = EspFit(convention, slices).measured(samples)
            if fit.error <= EXACT:
                return fit
    mixtures = [
        _temperature(samples, _Mixture(slices, coupling, factor))
        for slices in candidates for coupling in couplings
    ]  # fmt: skip
    mixture, residual = min(mixtures, key=lambda pair: pair[1])
    if not residual <= DISTINCT:
        raise NoFit(NO_TEMPERATURE, residual)
    fits = [
        EspFit(convention, mixture.slices).measured(samples)
        for convention in _weighted(samples, mixture)
    ]
    if not any(fit.error <= STABILISED for fit in fits):
        fits += _with_weights(samples, mixture)
    if not fits:
        raise NoFit("not a sliced plan: its slice weights do not fall with the transport cost")
    least = min(one.error for one in fits)
    if not least <= STABILISED:
        raise NoFit("not a sliced plan weighted by softmax(-tau cost)", least)
    # At one length a mean is a sum with another tau: the first that is as good, not rounding, decides.
    return next(one for one in fits if one.error <= max(2 * least, EXACT))


def tied_points(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Points [B, H, N, D] that tie along every direction, and different ones along the axes.

    One coordinate is not 0: equal points have equal projections in whatever order they are summed.
    """
    points = torch.zeros(shape, dtype=torch.float64)
    axis = torch.randint(shape[3], (*shape[:3], 1), generator=generator)
    size = torch.randint(1, 3, axis.shape, generator=generator).double()
    return points.scatter_(-1, axis, size)


def drawn(
    trial: Experiment, points: Points, at: Lengths, spread: float = 1.0, masked: bool = False
) -> EspSample:
    """One observation of random points so far apart; masked: with a third of the tokens left out."""
    q, k = (spread * points(shape, trial.generator) for shape in trial.shapes(at))
    active = torch.arange(k.shape[2]) % 3 != 1
    attention = trial.observe([q, k], at, ~active if masked else None)
    return EspSample(q, k, attention, active.expand(len(q), -1) if masked else None)


def _with_ties(fit: EspFit, tied: Sequence[EspSample]) -> EspFit:
    """The fit with what the layer does where points tie, which other points do not show."""
    fitted = fit.convention
    kinds: tuple[Ties, ...] = get_args(Ties) if fitted.softsort_temperature is None else ("shared",)
    fits = [replace(fit, convention=replace(fitted, ties=ties)).measured(tied) for ties in kinds]
    best = min(fits, key=lambda one: one.error)
    if best.error <= STABILISED:
        return replace(best, error=max(best.error, fit.error))
    raise NoFit(NO_ORDER, best.error)


@dataclass(frozen=True)
class _Mixture:
    """Slices whose plans are mixed into maps of the mass `factor`; no temperature: by exact sorts."""

    slices: Tensor | None
    coupling: Coupling | None
    factor: float
    temperature: float | None = None

    def plans(self, s: EspSample, head: int = 0) -> Tensor:
        """P_l of one head of the first example: [L, N, M]."""
        slices = self.slices
        directions = slices[head] if slices is not None and slices.dim() == 3 else slices
        q, k = (x[0, head][None, None] for x in (s.q, s.k))
        clouds, coupling = clouds_of(q, k, None, None, directions), self.coupling or "interpolated"
        t = self.temperature
        if t is None:
            return lifted_plan(clouds.x[0], clouds.y[0], None, None, coupling, "shared")[0]
        ranks, sort = rank_matrix(clouds, coupling), partial(soft_sort, temperature=t)
        return soft_plan(clouds.x[0], clouds.y[0], None, None, ranks, sort)[0]

    def target(self, s: EspSample, head: int = 0) -> Tensor:
        """What the plans are mixed into, [N M, 1]."""
        return s.attention[0, head].flatten()[:, None] / self.factor

    def weights(self, s: EspSample, squared: bool, head: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The plans as columns, what each weighs, w_l, and its transport cost D_l."""
        plans = self.plans(s, head)
        table = plans.flatten(1).T
        solved = torch.linalg.lstsq(table, self.target(s, head), driver="gelsd").solution[:, 0]
        cost = cost_matrix(s.q[0, head], s.k[0, head], squared)
        return table, solved, (plans * cost).sum((-1, -2))

    def convention(self, tau: float, squared: bool, mean: bool, weighted: bool) -> EspConvention:
        count = None if self.slices is None else self.slices.shape[-2]
        return EspConvention(
            self.temperature, tau, squared, mean, count, self.factor, coupling=self.coupling,
            slice_weights=weighted,
        )  # fmt: skip


def _temperature(samples: Sequence[EspSample], mixture: _Mixture) -> tuple[_Mixture, float]:
    """With the t for which the slices' plans span the maps, and the relative residual that is left."""

    # One sample a spread is enough: the fit that comes of it is checked on all of them.
    shape = max((s.q.shape[2] != s.k.shape[2], -i, s.q.shape) for i, s in enumerate(samples))[2]
    first = [s for s in samples if s.q.shape == shape]

    def residual(temperature: float | None) -> float:
        total, at = 0.0, replace(mixture, temperature=temperature)
        for s in first:
            plans, target = at.plans(s).flatten(1).T, at.target(s)  # [N M, L]
            weights = torch.linalg.lstsq(plans, target, driver="gelsy").solution
            total += float((plans @ weights - target).square().sum() / target.square().sum())
        return total

    exact = residual(None)
    if exact <= DISTINCT**2:
        return mixture, math.sqrt(exact)
    scanned = [residual(float(t)) for t in TEMPERATURES]
    best = int(np.argmin(scanned))
    low, high = TEMPERATURES[max(best - 1, 0)], TEMPERATURES[min(best + 1, len(TEMPERATURES) - 1)]
    minimum = scipy.optimize.minimize_scalar(
        lambda power: residual(10.0**power), bounds=(math.log10(low), math.log10(high)),
        method="bounded", options={"xatol": 1e-11, "maxiter": 80},
    )  # fmt: skip
    temperature = 10.0 ** float(minimum.x)
    round_number = snapped(temperature)
    if residual(round_number) <= max(residual(temperature), DISTINCT**4):
        temperature = round_number
    return replace(mixture, temperature=temperature), math.sqrt(residual(temperature))


def _weighted(samples: Sequence[EspSample], mixture: _Mixture) -> list[EspConvention]:
    """Conventions whose cost explains the weights: log w_l is linear in the right D_l."""
    conventions = []
    for squared in (False, True):
        # The largest spread of the costs comes second in SPREADS; the first is as clean, and safer.
        slopes = (
            (tau, s.q.shape[2]) for s in samples
            if (tau := _slope(*mixture.weights(s, squared)[1:])) is not None
        )  # fmt: skip
        for tau, length in itertools.islice(slopes, 1):
            for mean in (False, True):
                inverse = snapped(tau * length if mean else tau)
                conventions.append(mixture.convention(inverse, squared, mean, False))
    return conventions


def _slope(weights: Tensor, costs: Tensor) -> float | None:
    """tau, None where costs are too much alike, or weights too small, to tell it."""
    if len(weights) == 1:
        return 0.0
    shown = weights > 1e-6
    if int(shown.sum()) < 2:
        return None
    spread = costs[shown] - costs[shown].mean()
    if float(spread.abs().max()) <= 1e-9 * float(costs.abs().max()):
        return None
    logs = weights[shown].log()
    return -float((spread * (logs - logs.mean())).sum() / spread.square().sum())


def _with_weights(samples: Sequence[EspSample], mixture: _Mixture) -> list[EspFit]:
    """Conventions whose slices have weights of their own: log w_l = beta_l - tau D_l + const.

    Over several samples, tau is what is left once the means of every sample and slice are taken off.
    """
    fits = []
    for squared in (False, True):
        for mean in (False, True):
            slopes, tables = [], []
            for head in range(samples[0].q.shape[1]):
                logs, costs = [], []
                for s in samples:
                    plans, weights, cost = mixture.weights(s, squared, head)
                    if float(torch.linalg.cond(plans)) > CONDITION or not bool((weights > 1e-6).all()):
                        continue
                    logs.append(weights.log() - weights.log().mean())
                    cost = cost / s.q.shape[2] if mean else cost
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
            omega = torch.stack(tables)
            omega = omega / omega.mean(-1, keepdim=True)
            convention = mixture.convention(tau, squared, mean, True)
            fits.append(EspFit(convention, mixture.slices, omega).measured(samples))
            if tau == 0.0:
                return fits
    return fits
