"""What a dual is predicted from: the two point clouds of a site, seen from the predicted side.

Every feature family is written once, for the dual of the points x against the points y. The source side
predicts the queries' dual (x: queries, y: keys), the target side the keys' (x: keys, y: queries).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asapc.ir import SiteTensors

PredictedSide = Literal["source", "target"]
Points = Literal["all", "active"]
WIDE = (torch.float32, torch.float64)  # dtypes that features are computed in


@dataclass(frozen=True)
class Clouds:
    """The points of a site, scaled so that the score of a pair is x . y (in units of epsilon).

    x: [B, H, N, D], whose dual is predicted; y: [B, H, M, D], the other side's points.
    x_keep: [B, N] bool, the points that carry mass, or None for all; y_keep: [B, M] likewise. On the
    source side every query carries mass, including padded ones, unless the loop hides them or only active
    points are requested.
    x_real: [B, N] bool, the points that are not padding, or None if that is unknown or there is none.
    bias: broadcastable to [B, H, N, M], added to x . y, or None.
    """

    x: Tensor
    y: Tensor
    x_keep: Tensor | None = None
    y_keep: Tensor | None = None
    x_real: Tensor | None = None
    bias: Tensor | None = None

    def cost_offset(self) -> Tensor:
        """|x|^2 / 2, cost minus score coordinates of the predicted dual: [B, H, N]."""
        return self.x.square().sum(-1) / 2

    def centre(self, values: Tensor) -> Tensor:
        """values [B, H, N] or [B, H, N, F] minus their mean over the points with mass, 0 elsewhere."""
        keep = self._keep_of(values)
        centred = values - self.mean(values)
        return centred if keep is None else centred.masked_fill(~keep, 0.0)

    def mean(self, values: Tensor) -> Tensor:
        """Over the points with mass, [B, H, 1] or [B, H, 1, F]; 0 where there are none."""
        keep = self._keep_of(values)
        if keep is None:
            return values.mean(2, keepdim=True)
        count = keep.sum(2, keepdim=True).clamp(min=1)
        return values.masked_fill(~keep, 0.0).sum(2, keepdim=True) / count

    def _keep_of(self, values: Tensor) -> Tensor | None:
        """x_keep with an axis for each that the values have."""
        keep = None if self.x_keep is None else self.x_keep[:, None, :]
        return keep if keep is None or values.dim() == 3 else keep[..., None]


def shown_queries(bias: Tensor | None) -> Tensor | None:
    """[B or 1, N or 1], the queries that keep a score under a bias [B or 1, H or 1, N or 1, M or 1]; None
    without a bias, or if it is the same in every example."""
    return None if bias is None or bias.dim() < 4 else (bias > -math.inf).any(3).any(1)


def clouds_of(
    tensors: SiteTensors, score_multiplier: float, side: PredictedSide, points: Points = "all"
) -> Clouds:
    """A site's clouds from `side`; half precision becomes float32.

    Queries hidden by a bias of one number per query carry no mass. Without such a bias, and with as many
    queries as keys, the key mask also shows which queries are padded (self-attention).
    points: "active" leaves those out, if they are known.
    """
    root = math.sqrt(abs(score_multiplier))
    q = _widened_times(tensors.q, root if score_multiplier >= 0 else -root)
    k = _widened_times(tensors.k, root)
    keep, bias = tensors.keep, tensors.bias
    shown = shown_queries(bias) if bias is not None and bias.shape[-3::2] == (1, 1) else None
    if keep is not None:  # a masked key may hold anything, even NaN
        k = k.masked_fill(~keep[:, None, :, None], 0.0)
    if shown is not None:
        shown = shown.expand(q.shape[0], q.shape[2])
        q = q.masked_fill(~shown[:, None, :, None], 0.0)
    bias = None if bias is None else widen(bias)
    if side == "target":
        bias = None if bias is None else bias.transpose(-1, -2)
        return Clouds(k, q, x_keep=keep, y_keep=shown, bias=bias)
    real = keep if shown is None and q.shape[2] == k.shape[2] else shown
    with_mass = real if points == "active" else shown
    return Clouds(q, k, with_mass, y_keep=keep, x_real=real, bias=bias)


@dataclass(frozen=True)
class Budget:
    """The teacher's half-steps up to the predicted dual: its number and the side of the first.

    The last of them updates x. `starts_on_x`: the first one does, too.
    """

    half_steps: int
    starts_on_x: bool


def clouds_from(
    q: Tensor, k: Tensor, keep: Tensor | None, bias: Tensor | None, score_multiplier: float, side: str
) -> Clouds:
    """Clouds of an operator call.  side: source, target, or active: the source's active points."""
    if side not in ("source", "active", "target"):
        raise ValueError(f"side must be source, active or target, got {side!r}")
    points: Points = "active" if side == "active" else "all"
    predicted: PredictedSide = "target" if side == "target" else "source"
    return clouds_of(SiteTensors(q, k, keep, bias), score_multiplier, predicted, points)


def active_share(clouds: Clouds) -> Tensor:
    """The balanced mass of each y in attention units, the share n / N of the points x with mass over that
    of the points y: [B, H, M]."""
    share = clouds.y.new_ones(clouds.y.shape[:3])
    if clouds.x_keep is not None:
        share = share * clouds.x_keep.to(share.dtype).mean(-1)[:, None, None]
    if clouds.y_keep is not None:
        part = clouds.y_keep.to(share.dtype).mean(-1)[:, None, None]
        share = share / torch.where(part > 0, part, 1.0)
    return share


def widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in WIDE else tensor.float()


def _widened_times(tensor: Tensor, factor: float) -> Tensor:
    """widen(tensor) * factor, in one pass."""
    if tensor.dtype in WIDE:
        return tensor * factor
    return tensor * tensor.new_full((1,), factor, dtype=torch.float32)
