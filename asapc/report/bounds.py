"""Bounds: what the papers prove of plans and loops, as functions of scores and duals in float64.

Scores S and duals are in units of epsilon, absolute: P = exp(S + f + g).  asapc.report.certificates
evaluates them on a site's activations, next to what they bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asapc.operators.c_transforms import close_columns, close_rows

POWER_STEPS = 4
NEAR, FAR = 1e-3, 4.0  # how far duals are moved to measure a contraction
DIAMETER_ENTRIES = 2**22  # of a block of differences between rows


def row_error_bound(g_plus: Tensor, g_0: Tensor) -> Tensor:
    """exp(max_j |g+_j - g0_j|) - 1 >= row_err of the plan closed on g+, per example and head: [B, H].

    g_0, g_plus: [B, H, M], the target duals before and after the row c-transform between them: after it
    every row has mass 1/N, and then the columns are rescaled.  Source: ASAP, Proposition B.7.
    """
    return torch.expm1((g_plus - g_0).abs().amax(-1))


def contraction_bound(scores: Tensor) -> Tensor:
    """tanh^2(range(S) / 2) >= Hilbert contraction of one iteration (two half-steps), [B, H].

    scores: [B, H, N, n] divided by epsilon, of active keys. Row and column offsets of S do not change the
    iteration, so the smaller of the ranges of S and of S centred over rows and columns is taken. By
    Birkhoff the contraction is tanh^2(Delta / 4) with Delta, the largest |S_ij + S_kl - S_il - S_kj|, at
    most 2 range(S); tanh^2(range / 4) would not be a bound.  1 where nothing is proven (range above
    about 38, or a bias that forbids a pair).  Source: Block-wise differentiable Sinkhorn attention,
    Proposition 4.
    """
    centred = scores - scores.mean(-1, keepdim=True)
    centred = centred - centred.mean(-2, keepdim=True)
    spread = torch.minimum(spread_of(scores.flatten(-2)), spread_of(centred.flatten(-2)))
    forbidden = scores.isneginf().flatten(-2).any(-1)
    return torch.tanh(spread / 2).square().masked_fill(forbidden, 1.0)


def exact_contraction(scores: Tensor) -> Tensor:
    """tanh^2(Delta / 4), the Hilbert contraction of an iteration of two half-steps: [B, H].

    scores: [B, H, N, M], finite; O(N^2 M) work.  Delta = max |S_ij + S_kl - S_il - S_kj|, the diameter of
    exp(S), is the largest osc_j(S_ij - S_kj) over pairs of rows.  1 where float64 cannot tell it from 1.
    Source: Block-wise differentiable Sinkhorn attention, Proposition 4 (Birkhoff and Hopf).
    """
    if scores.shape[-1] < scores.shape[-2]:
        scores = scores.transpose(-1, -2)
    diameter = scores.new_zeros(scores.shape[:2])
    rows, columns = scores.shape[-2:]
    step = max(1, DIAMETER_ENTRIES // max(1, diameter.numel() * rows * columns))
    for start in range(0, rows, step):
        part = scores[:, :, start : start + step, None] - scores[:, :, None, start:]
        diameter = torch.maximum(diameter, spread_of(part).flatten(2).amax(-1))
    return torch.tanh(diameter / 4).square()


def truncation_bound(contraction: Tensor, last_move: Tensor) -> Tensor:
    """rho / (1 - rho) osc(g_T - g_(T-1)) >= osc(g_t - g_T) for every later iteration t, [B, H].

    contraction: rho of one iteration; last_move: of the loop's last one. Every further iteration moves
    the dual by at most rho times the one before it; the sum over all of them is geometric.  Source:
    Block-wise differentiable Sinkhorn attention, Proposition 4, summed as in the proof of Theorem 1.
    """
    return torch.where(last_move > 0, contraction / (1 - contraction) * last_move, 0.0)


class Duals(NamedTuple):
    """f [B, H, N] and g [B, H, n]; before the first c-transform g is 0."""

    f: Tensor
    g: Tensor


@dataclass(frozen=True)
class Block:
    """Scores [B, H, N, n] without padding, and the mass of each point of a row and of a column."""

    scores: Tensor
    log_mu: float
    log_nu: float

    def flipped(self) -> Block:
        """Queries and keys exchanged."""
        return Block(self.scores.transpose(-1, -2), self.log_nu, self.log_mu)

    def closed(self, f: Tensor, c_transforms: int) -> list[Duals]:
        """The duals after 0, 1, ... c-transforms, the first one on columns, from a dual of the rows."""
        log_mu = self.scores.new_full(self.scores.shape[-2:-1], self.log_mu)
        log_nu = self.scores.new_full(self.scores.shape[-1:], self.log_nu)
        duals = [Duals(f, torch.zeros_like(self.scores.select(-2, 0)))]
        for step in range(c_transforms):
            f, g = duals[-1]
            if step % 2 == 0:
                duals.append(Duals(f, close_columns(self.scores, f, log_nu)))
            else:
                duals.append(Duals(close_rows(self.scores, g, log_mu), g))
        return duals

    def log_plan(self, duals: Duals) -> Tensor:
        return self.scores + duals.f[..., :, None] + duals.g[..., None, :]

    def positive(self) -> bool:
        """No pair is forbidden."""
        return bool(self.scores.isfinite().all())


def measured_contraction(block: Block, g: Tensor) -> Tensor:
    """The largest osc(Phi(g + d) - Phi(g)) / osc(d) found, Phi one iteration on the keys' dual: [B, H].

    A power iteration from a small random d finds the slowest mode around g; one large d looks further
    away. So this is at most the contraction that Proposition 4 bounds from above.
    """
    by_keys = block.flipped()
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(g.shape, generator=generator, dtype=torch.float64).to(g.device)
    image = by_keys.closed(g, 2)[-1].f
    worst = g.new_zeros(g.shape[:2])
    for size in (*[NEAR] * POWER_STEPS, FAR):
        spread = spread_of(change)
        scaled = change * torch.where(spread > 0, size / spread, 0.0)[..., None]
        change = by_keys.closed(g + scaled, 2)[-1].f - image
        worst = torch.maximum(worst, torch.where(spread > 0, spread_of(change) / size, 0.0))
    return worst


class Tilt:
    """Two plans closed from the duals f and f^ of one side: every column of one is the other, tilted.

    pi_j and pi^_j are the conditionals of a closed column j over the points i of the predicted side,
    and Delta = f^ - f.  Source: ASAP, Proposition B.10.
    """

    def __init__(self, scores: Tensor, f: Tensor, f_hat: Tensor, log_weight: float) -> None:
        """scores: [B, H, X, Y]; f, f_hat: [B, H, X]; log_weight: of each of the Y closed marginals."""
        self.log_pi = (scores + f[..., :, None]).log_softmax(-2)
        self.log_pi_hat = (scores + f_hat[..., :, None]).log_softmax(-2)
        change = f_hat - f
        self.delta = change - change.mean(-1, keepdim=True)  # the gauge does not matter
        self.weight = math.exp(log_weight)
        self.mass = self.weight * scores.shape[-1]

    def divergences(self) -> tuple[Tensor, Tensor]:
        """KL(P^ || P) and KL(P || P^), [B, H]."""
        ratio = self.log_pi_hat - self.log_pi
        reverse = (self.log_pi_hat.exp() * ratio).sum((-2, -1))
        return self.weight * reverse, -self.weight * (self.log_pi.exp() * ratio).sum((-2, -1))

    def variance_bound(self) -> Tensor:
        """sum_j nu_j sigma_j^2 / 2 with sigma_j = range(Delta) / 2, Popoviciu's for every t (B.53)."""
        return self.mass * spread_of(self.delta).square() / 8

    def density_bound(self) -> Tensor:
        """beta / 2 |Delta|^2 / X, times the mass (B.54)."""
        return self.sharpness() / 2 * self.residual()

    def sharpness(self) -> Tensor:
        """beta, with pi_j,t(i) <= beta / X for all j, i and t: [B, H].

        log pi_t = log pi + t Delta - A(t) with A convex: A lies above its tangents at 0 and at 1, which
        makes it at most linear in t, and so largest at one end.
        """
        delta = self.delta[..., :, None]
        mean, mean_hat = ((x.exp() * delta).sum(-2, keepdim=True) for x in (self.log_pi, self.log_pi_hat))
        from_0 = torch.maximum(self.log_pi, self.log_pi + delta - mean)
        from_1 = torch.maximum(self.log_pi_hat, self.log_pi_hat - delta + mean_hat)
        return torch.minimum(from_0, from_1).amax((-2, -1)).exp() * self.log_pi.shape[-2]

    def residual(self) -> Tensor:
        """|Delta|^2 / X, times the mass of the plans: [B, H]."""
        return self.mass * self.delta.square().mean(-1)

    def trivial(self) -> Tensor:
        """No divergence of other column conditionals from these exceeds it: -sum_j nu_j log min pi_j."""
        least = torch.minimum(self.log_pi.amin(-2), self.log_pi_hat.amin(-2))
        return -self.weight * least.sum(-1)


def spread_of(values: Tensor, active: Tensor | None = None) -> Tensor:
    """osc: largest minus smallest active entry along the last axis; 0 where none is active."""
    if active is None:
        return values.amax(-1) - values.amin(-1)
    high = values.masked_fill(~active, -math.inf).amax(-1)
    low = values.masked_fill(~active, math.inf).amin(-1)
    return torch.where(active.any(-1), high - low, 0.0)


def largest(values: Tensor) -> float:
    """0 for no values; a NaN is infinite."""
    found = float(values.max()) if values.numel() else 0.0
    return math.inf if math.isnan(found) else found
