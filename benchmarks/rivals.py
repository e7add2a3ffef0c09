"""Text classifiers that papers.py trains beside Sinkformers: the same blocks, another attention each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asapc.models.esp import soft_sort
from asapc.models.text import EncoderLayer, Heads, TokenClassifier

Attention = Callable[[int, int], nn.Module]
TEMPERATURE, INVERSE_TEMPERATURE = 0.1, 0.1  # t and tau of ESPFormer
FAR = -1e4


class Softmax(Heads):
    """x: [B, N, d_model], padded: [B, N] bool -> ([B, N, d_model], None)"""

    def forward(self, x: Tensor, padded: Tensor) -> tuple[Tensor, None]:
        q, k, v = self.heads(self.WQ(x)), self.heads(self.WK(x)), self.heads(self.WV(x))
        return self.linear(self.mixed(q, k, v, ~padded).transpose(1, 2).flatten(2)), None

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        """A v [B, H, N, D]."""
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])


class Differential(Softmax):
    """(softmax(q1 k1') - lambda softmax(q2 k2')) v, then a norm of every head.

    lambda = exp(a1.b1) - exp(a2.b2) + lambda_0, learnt.  Source: Differential Transformer
    (arXiv 2410.05258), Eqs. 1-3, with the lambda_0 of its first layer in all.
    """

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        width = d_model // n_heads
        self.vectors = nn.Parameter(0.1 * torch.randn(2, 2, width // 2))
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.start = 0.8 - 0.6  # of lambda

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        first, second = (
            super(Differential, self).mixed(*halves, v, keep)
            for halves in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        products = self.vectors.prod(0).sum(-1).exp()
        out = first - (products[0] - products[1] + self.start) * second
        return self.norm(out) * (1 - self.start)


class ESP(Softmax):
    """ESPFormer's expected sliced plan of the active tokens, soft sorts, learnt slices (Algorithm 1)."""

    def __init__(self, d_model: int, n_heads: int, slices: int = 4) -> None:
        super().__init__(d_model, n_heads)
        self.slicer = nn.Linear(d_model // n_heads, slices, bias=False)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        """Padded tokens are sorted last, far from all others, so that they only meet each other."""
        hidden = ~keep[:, None, None]  # [B, 1, 1, N]
        lines = (self.slicer(x).transpose(-1, -2).masked_fill(hidden, FAR) for x in (q, k))
        first, second = (soft_sort(line, TEMPERATURE) for line in lines)  # [B, H, L, N, N]
        plans = (first.transpose(-1, -2) @ second).flatten(-2)
        cost = torch.cdist(q, k).masked_fill(hidden, 0.0).flatten(-2).unsqueeze(-1)
        weights = torch.softmax(-INVERSE_TEMPERATURE * (plans @ cost), dim=-2)  # [B, H, L, 1]
        mean = (weights.transpose(-1, -2) @ plans).unflatten(-1, (q.shape[2], -1)).squeeze(2)
        return (mean @ v).masked_fill(hidden.transpose(-1, -2), 0.0)


RIVALS: dict[str, Attention] = {"Transformer": Softmax, "DiffTransformer": Differential, "ESPFormer": ESP}


class Rival(TokenClassifier):
    """The Sinkformers' classifier with another attention; `attention` makes a layer's."""

    def __init__(self, attention: Attention, **text: Any) -> None:
        def layer(d_model: int, n_heads: int, d_ff: int, dropout: float) -> nn.Module:
            return EncoderLayer(attention(d_model, n_heads), d_model, d_ff, dropout)

        super().__init__(layer, **text)

    def forward(self, inputs: Tensor) -> Tensor:
        x, padded = self.embedded(inputs)
        for layer in self.layers:
            x, _ = layer(x, padded)
        return torch.softmax(self.linear(x.amax(dim=1)), dim=-1)
