"""ESPFormer ViT: an image classifier whose attention is an expected sliced plan, softly sorted.

Written as research code writes it: every slice's N x N plan at once (Shahbazi et al. 2025,
Algorithm 1; distances instead of their squares, as in the released code).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from asapc.models.vit import ViT

Cost = Literal["euclidean", "squared"]


def soft_sort(x: Tensor, temperature: float) -> Tensor:
    """SoftSort, largest first: [..., N] -> [..., N, N], rows sum to 1.  Source: ESPFormer, Eq. 7."""
    ordered = x.sort(dim=-1, descending=True).values
    return torch.softmax(-((ordered.unsqueeze(-1) - x.unsqueeze(-2)) ** 2) / temperature, dim=-1)


class ESPAttention(nn.Module):
    """x: [B, N, dim] -> ([B, N, dim], attention [B, H, N, N])

    slices: number of learnt directions of each head's points, None for their coordinate axes.
    """

    def __init__(
        self, dim: int, heads: int, dim_head: int, dropout: float, softsort_temperature: float,
        inverse_temperature: float, cost: Cost, slices: int | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.softsort_temperature = softsort_temperature
        self.inverse_temperature = inverse_temperature
        self.cost = cost
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.slicer = None if slices is None else nn.Linear(dim_head, slices, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(dropout))

    def plans(self, q: Tensor, k: Tensor) -> Tensor:
        """One plan a slice, [B, H, L, N, N], of points [B, H, N, D]."""
        x, y = (q, k) if self.slicer is None else (self.slicer(q), self.slicer(k))
        first, second = (
            soft_sort(points.transpose(-1, -2), self.softsort_temperature) for points in (x, y)
        )
        return torch.matmul(first.transpose(-1, -2), second)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.to_qkv(x).unflatten(-1, (3, self.heads, -1))  # [B, N, 3, H, D]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D]
        plans = self.plans(q, k)
        distance = torch.cdist(q, k)
        cost = distance if self.cost == "euclidean" else distance**2
        totals = (cost.unsqueeze(2) * plans).sum((-1, -2))  # [B, H, L]
        weights = torch.softmax(-self.inverse_temperature * totals, dim=-1)
        attention = (weights[..., None, None] * plans).sum(2)
        out = torch.matmul(attention, v).transpose(1, 2).flatten(2)  # [B, N, H * D]
        return self.to_out(out), attention


class ESPFormerViT(ViT):
    """A ViT whose attention is an expected sliced plan.

    heads, dim_head: H and D.  softsort_temperature: t.  inverse_temperature: tau of the slice weights.
    cost: what a slice's plan is weighed by.  slices: L learnt ones, None for the D axes.  The other
    arguments are those of ViT.  Raises ValueError when a temperature is not positive.
    """

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        dim_head: int = 64,
        dropout: float = 0.0,
        softsort_temperature: float = 0.1,
        inverse_temperature: float = 0.1,
        cost: Cost = "euclidean",
        slices: int | None = None,
        **vit: Any,
    ) -> None:
        if softsort_temperature <= 0 or inverse_temperature <= 0:
            raise ValueError("temperatures must be positive")

        def attention() -> nn.Module:
            temperatures = softsort_temperature, inverse_temperature
            return ESPAttention(dim, heads, dim_head, dropout, *temperatures, cost, slices)

        super().__init__(attention, dim=dim, dropout=dropout, **vit)

    def forward(self, img: Tensor) -> Tensor:
        """img: [B, C, height, width].  Returns logits [B, classes]."""
        return self.classify(img)[0]
