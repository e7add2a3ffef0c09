"""Identification by experiment of plans against pivots: which finite loop, pivots and masses are these?

    log G = m x z' + u 1' + 1 w'    double centring leaves the multiplier m of the right pivots z
    G = Gamma or Gamma diag(1/sigma), up to a number, for the right masses, first side and half-steps

Nothing here looks at code; pivots and masses are looked for among the layer's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asapc.ir import HalfPlan
from asapc.operators.closures import close_columns, close_rows, log_marginals
from asapc.passes.probe import EXACT, MAX_HALF_STEPS, STABILISED, NoFit, Sample, score_multiplier, snapped

SPREADS = (1.0, 3.0, 6.0)  # standard deviations of the scores, in units of epsilon


@dataclass(frozen=True)
class HalfFit:
    """One plan between tokens and pivots, and its largest relative error.

    pivots: [H, R, D]; mass: [H, R], rows sum to 1.
    """

    half: HalfPlan
    pivots: Tensor
    mass: Tensor
    error: float


def identify_half(
    observe: Callable[[Tensor], Tensor | None],
    shapes: Sequence[tuple[int, ...]],
    pivots: Sequence[Tensor],
    masses: Sequence[Tensor],
) -> HalfFit | NoFit:
    """The finite loop between tokens and pivots that reproduces `observe` to 1e-6, or why none does.

    observe: tokens [B, H, N, D] -> [B, H, N, R] positive, None where it is not finite.
    shapes: legal shapes of the tokens.  pivots: candidates [H, R, D].  masses: candidates [H, R].
    """
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    trial = observe(first)
    if trial is None:
        return NoFit("the region gives NaN or infinity on random tokens")
    best: HalfFit | None = None
    for z in pivots:
        if trial.shape[1:] != (first.shape[1], trial.shape[2], z.shape[1]):
            continue
        rough = score_multiplier([Sample(first @ z.transpose(-1, -2), trial)])
        if isinstance(rough, NoFit):
            continue
        samples = []
        for spread in SPREADS:
            for shape in shapes:
                x = torch.randn(shape, generator=generator, dtype=torch.float64)
                x = x * spread / (abs(rough) * z.square().sum(-1).mean().sqrt())
                plan = observe(x)
                if plan is not None:
                    samples.append(Sample(x @ z.transpose(-1, -2), plan))
        multiplier = score_multiplier(samples)
        if isinstance(multiplier, NoFit):
            continue
        for sigma in (own for own in masses if own.shape[1] == z.shape[1]):
            fit = _best_loop(samples, multiplier, z, sigma)
            if fit is not None and (best is None or fit.error < best.error):
                best = fit
    if best is None:
        return NoFit("no parameter of the layer gives its scores as inner products")
    if not best.error <= STABILISED:
        return NoFit("not a finite loop between tokens and pivots", best.error)
    return best


def _best_loop(
    samples: Sequence[Sample], multiplier: float, z: Tensor, sigma: Tensor
) -> HalfFit | None:
    """The shortest loop that is as good as the best, with these masses."""
    errors: dict[tuple[bool, int], float] = {}
    for sample in samples:
        scores = multiplier * sample.scores
        log_mu, _ = log_marginals(scores.shape[-2], scores.shape[-1], None, scores)
        scale = sample.attention.abs().amax((-1, -2), keepdim=True)
        for tokens_first in (True, False):
            f, g = scores.new_zeros(scores.shape[:-1]), scores.new_zeros(*scores.shape[:2], len(z[0]))
            tokens_turn = tokens_first
            for half_steps in range(1, MAX_HALF_STEPS + 1):
                if tokens_turn:
                    f = close_rows(scores, g, log_mu)
                else:
                    g = close_columns(scores, f, sigma.log())
                plan = torch.exp(scores + f[..., None] + g[..., None, :])
                error = min(
                    _up_to_scale(own, sample.attention, scale) for own in (plan, plan / sigma[:, None, :])
                )
                key = (tokens_first, half_steps)
                errors[key] = max(errors.get(key, 0.0), math.inf if error != error else error)
                tokens_turn = not tokens_turn
    least = min(errors.values())
    if not least < math.inf:
        return None
    enough = max(EXACT, 4 * least) if least <= EXACT else 1.5 * least
    first, half_steps = min(
        (key for key, error in errors.items() if error <= enough), key=lambda key: (key[1], not key[0])
    )
    half = HalfPlan(half_steps, first, snapped(multiplier))
    return HalfFit(half, z, sigma, errors[(first, half_steps)])


def _up_to_scale(own: Tensor, observed: Tensor, scale: Tensor) -> float:
    ratio = observed.sum((-1, -2), keepdim=True) / own.sum((-1, -2), keepdim=True).clamp(min=1e-300)
    return float(((own * ratio - observed).abs() / scale).max())
