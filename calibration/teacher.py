"""The duals that a fit aims at: the teacher's own, a few half-steps before its end."""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.features.clouds import Clouds, Points, PredictedSide, clouds_of
from asapc.ir import Convention, SiteTensors
from asapc.operators.sinkhorn import initial_duals, run_half_steps, score_matrix

# float64 overflows at exp(709): scores and duals within these leave room for every product of two.
_LINEAR_SCORE_LIMIT = 100.0
_LINEAR_DUAL_LIMIT = 500.0


class TeacherDuals:
    """The teacher's float64 duals on one batch, after any number of half-steps up to T.

    scores S: [B, H, N, M], -inf on masked keys.  Units of epsilon, absolute: P = exp(S + f + g).
    """

    def __init__(self, tensors: SiteTensors, convention: Convention) -> None:
        self.tensors = tensors
        self.convention = convention
        bias = None if tensors.bias is None else tensors.bias.double()
        self.scores = score_matrix(
            tensors.q.double(), tensors.k.double(), tensors.keep, bias, convention.score_multiplier
        )
        history = _linear_history(self.scores, convention, tensors.keep)
        self._history = history or _log_history(self.scores, convention, tensors.keep)

    def after(self, half_steps: int) -> tuple[Tensor, Tensor]:
        """f [B, H, N] and g [B, H, M] after `half_steps` half-steps; g is -inf on masked keys."""
        return self._history[half_steps]

    def attention(self) -> Tensor:
        """The teacher's map [B, H, N, M], rows of about 1, float32; 0 where there is no active key."""
        f, g = self.after(self.convention.half_steps)
        plan = torch.exp(self.scores + f[..., :, None] + g[..., None, :])
        return (plan * self.scores.shape[-2]).float()

    def target(self, half_steps: int, side: PredictedSide, points: Points = "all") -> Tensor:
        """The dual of `side` in cost coordinates, centred over its points with mass, 0 elsewhere."""
        dual = self.after(half_steps)[0 if side == "source" else 1]
        clouds = self._clouds(side, points)
        return clouds.centre(dual + clouds.cost_offset())

    def intercept(self, half_steps: int) -> Tensor:
        """mean f + mean g over points with mass in cost coordinates, which centring drops: [B, H]."""
        f, g = self.after(half_steps)
        x, y = self._clouds("source"), self._clouds("target")
        return (x.mean(f + x.cost_offset()) + y.mean(g + y.cost_offset()))[..., 0]

    def mass(self, half_steps: int, side: PredictedSide) -> Tensor:
        """Mass of each point of `side` once the other side is closed next: [B, H, N or M]."""
        f, g = self.after(half_steps)
        keep = self.tensors.keep
        closed = "column" if side == "source" else "row"
        f, g = run_half_steps(self.scores, f, g, 1, closed, keep)  # type: ignore[arg-type]
        plan = torch.exp(self.scores + f[..., :, None] + g[..., None, :])
        return plan.sum(-1 if side == "source" else -2)

    def _clouds(self, side: PredictedSide, points: Points = "all") -> Clouds:
        t = self.tensors
        wide = SiteTensors(t.q.double(), t.k.double(), t.keep, t.bias)
        return clouds_of(wide, self.convention.score_multiplier, side, points)


def _log_history(
    scores: Tensor, convention: Convention, keep: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    duals = [initial_duals(scores, keep)]
    side = convention.first_side
    for _ in range(convention.half_steps):
        duals.append(run_half_steps(scores, *duals[-1], 1, side, keep))
        side = "column" if side == "row" else "row"
    return duals


def _linear_history(
    scores: Tensor, convention: Convention, keep: Tensor | None
) -> list[tuple[Tensor, Tensor]] | None:
    """The loop as matrix-vector products of exp(S); None where float64 might over- or underflow.

    A sum of positive normal numbers is exact to rounding, so within the limits this is as accurate
    as the log domain.
    """
    finite = scores.masked_fill(scores.isneginf(), 0.0)
    if scores.numel() == 0 or not bool(finite.abs().amax() <= _LINEAR_SCORE_LIMIT):
        return None
    kernel = torch.exp(scores)  # 0 on masked keys
    num_queries, num_keys = scores.shape[-2:]
    transposed = kernel.transpose(-1, -2)
    f, g = initial_duals(scores, keep)
    # As rows [..., 1, N]: vector times matrix takes a fifth of the time of matrix times vector.
    scaling_f, scaling_g = f.exp()[..., None, :], g.exp()[..., None, :]
    duals = [(f, g)]
    rows_turn = convention.first_side == "row"
    for _ in range(convention.half_steps):
        if rows_turn:
            total = scaling_g @ transposed
            # A row without an active key keeps f = 0, as in c-transforms.close_rows.
            scaling_f = torch.where(total > 0, 1 / (num_queries * total), 1.0)
            f = scaling_f[..., 0, :].log()
        else:
            total = scaling_f @ kernel
            scaling_g = torch.where(total > 0, 1 / (num_keys * total), 0.0)
            g = scaling_g[..., 0, :].log()
        rows_turn = not rows_turn
        duals.append((f, g))
    all_f, all_g = torch.stack([f for f, _ in duals]), torch.stack([g for _, g in duals])
    if keep is not None:
        all_g.masked_fill_(~keep[:, None, :], 0.0)
    # NaN is not below the limit either, so this also catches whatever went wrong on the way.
    within = all((x.abs() < _LINEAR_DUAL_LIMIT).all() for x in (all_f, all_g))
    return duals if within else None
