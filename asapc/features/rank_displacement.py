"""Rank displacement: how far one-dimensional transport moves a point, one column per direction.

With a = theta . x and b = theta . y over the points with mass, the column is

    a_i - T(a_i),   T(a_i) = the b of rank (2 r_i - 1) n_y / (2 n_x) + 1/2, linear between ranks,

where the mid-rank r_i = (#{a < a_i} + #{a <= a_i} + 1) / 2 is shared by equal a. For n_x = n_y and no
ties T maps the r-th smallest a to the r-th smallest b. Without any y with mass T is 0, and so is the
column of an x without mass.

Columns [B, H, N, L]. Cost O((N + M) L (D + log N + log M)) a head.
Source: ASAP, Table F.3 (a control, given there by name; ranks for n_x != n_y are ours).
"""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.features.clouds import Budget, Clouds
from asapc.features.quantiles import drop_massless, project, quantiles, stable_sort_values


def columns(clouds: Clouds, parameter: Tensor | None, budget: Budget) -> Tensor:
    """a_i - T(a_i): [B, H, N, L].  parameter: theta [L, D]."""
    assert parameter is not None
    lines = project(clouds, parameter)
    a = lines.a.detach().contiguous()
    ordered = stable_sort_values(a)
    smaller = torch.searchsorted(ordered, a)
    up_to = torch.searchsorted(ordered, a, right=True)
    ordered_y = drop_massless(stable_sort_values(lines.b), clouds.y_keep, lines.n_y)
    numerator = (smaller + up_to) * lines.n_y + lines.n_x
    target = quantiles(ordered_y, lines.n_y, numerator, 2 * lines.n_x.clamp(min=1))
    moved = lines.a - target
    if clouds.x_keep is not None:
        moved = moved.masked_fill(~clouds.x_keep[:, None, None, :], 0.0)
    return moved.transpose(-1, -2)
