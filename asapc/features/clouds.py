"""What a dual is predicted from: the two point clouds of a site, seen from the predicted side.

Every feature family is written once, for the dual of the points x against the points y. The source
side predicts the queries' dual (x: queries, y: keys), the key side the keys' (x: keys, y: queries).
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
    source side every query carries mass, padded ones too, unless active points alone are asked for.
    x_real: [B, N] bool, the points that are no padding, or None if that is unknown or all are.
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

    def unbiased(self, some: slice) -> Clouds:
        """Some examples of the batch, without the bias."""
        keeps = (self.x_keep, self.y_keep, self.x_real)
        return Clouds(self.x[some], self.y[some], *(None if x is None else x[some] for x in keeps))

    def centre(self, values: Tensor) -> Tensor:
        """values [B, H, N] or [B, H, N, F] minus their mean over the points with mass, 0 elsewhere."""
        axis = 2
        if self.x_keep is None:
            return values - values.mean(axis, keepdim=True)
        keep = self.x_keep[:, None, :]
        if values.dim() == 4:
            keep = keep[..., None]
        count = keep.sum(axis, keepdim=True).clamp(min=1)
        values = values.masked_fill(~keep, 0.0)
        return (values - values.sum(axis, keepdim=True) / count).masked_fill(~keep, 0.0)


def clouds_of(
    tensors: SiteTensors, score_multiplier: float, side: PredictedSide, points: Points = "all"
) -> Clouds:
    """A site's clouds from `side`; half precision becomes float32.

    With as many queries as keys the key mask also tells the padded queries (self-attention).
    points: "active" leaves those out, where it tells them.
    """
    root = math.sqrt(abs(score_multiplier))
    q = _widened_times(tensors.q, root if score_multiplier >= 0 else -root)
    k = _widened_times(tensors.k, root)
    keep, bias = tensors.keep, tensors.bias
    if keep is not None:  # a masked key may hold anything, even nan
        k = k.masked_fill(~keep[:, None, :, None], 0.0)
    if side == "target":
        bias = None if bias is None else widen(bias).transpose(-1, -2)
        return Clouds(k, q, x_keep=keep, bias=bias)
    square = keep is not None and q.shape[2] == k.shape[2]
    bias = None if bias is None else widen(bias)
    real = keep if square else None
    return Clouds(q, k, real if points == "active" else None, y_keep=keep, x_real=real, bias=bias)


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
    return clouds_of(SiteTensors(q, k, keep, bias), score_multiplier, *_side_and_points(side))


def active_share(clouds: Clouds) -> Tensor:
    """n / N of the points x for every y: [B, H, M]."""
    share = clouds.y.new_ones(clouds.y.shape[:3])
    if clouds.x_keep is None:
        return share
    return share * clouds.x_keep.to(share.dtype).mean(-1)[:, None, None]


def widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in WIDE else tensor.float()


def _widened_times(tensor: Tensor, factor: float) -> Tensor:
    """widen(tensor) * factor, in one pass."""
    if tensor.dtype in WIDE:
        return tensor * factor
    return tensor * tensor.new_full((1,), factor, dtype=torch.float32)


def _side_and_points(side: str) -> tuple[PredictedSide, Points]:
    if side not in ("source", "active", "target"):
        raise ValueError(f"side must be source, active or target, got {side!r}")
    return "target" if side == "target" else "source", "active" if side == "active" else "all"
