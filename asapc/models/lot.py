"""LOTFormer text classifier: attention through learnt pivots, linear in the number of tokens.

The blocks of models/text.py with the attention of LOTFormer, as its research code would write it: two
finite loops in the log domain, both plans formed, then the values. Padded tokens have marginal zero.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asapc.models.text import EncoderLayer, Heads, TokenClassifier
from asapc.operators.tokens import summary_rows

Cls = Literal["none", "softmax", "polarised"]


def finite_plan(scores: Tensor, log_a: Tensor, log_b: Tensor, w: Tensor, n_iters: int) -> Tensor:
    """Plan [..., N, M] after n_iters half-steps, rows first.

    scores: [B, H, N, M]; log_a: [..., N] and log_b: [..., M] broadcast to it, logarithms of the
    marginals; w: [..., M], the dual to start from: 0, and -inf where the marginal is zero, which rows
    shall not see.
    """
    u = torch.zeros_like(log_a)
    for step in range(n_iters):
        if step % 2 == 0:
            u = log_a - torch.logsumexp(scores + w.unsqueeze(-2), dim=-1)
        else:
            w = log_b - torch.logsumexp(scores + u.unsqueeze(-1), dim=-2)
    return torch.exp(scores + u.unsqueeze(-1) + w.unsqueeze(-2))


class LOTAttention(Heads):
    """x: [B, N, d_model], padded: [B, N] bool -> [B, N, d_model]

    n_iters: half-steps of each loop; the first of Gamma1 closes queries, the first of Gamma2 pivots.
    kernel_size: of a depthwise convolution of the values over tokens, 0 for none.  cls: how the first
    token gathers from all others, which ignore it.  Source: LOTFormer, Eqs. 1-4, 4.2, 4.3.
    """

    def __init__(
        self, d_model: int, n_heads: int, n_pivots: int, n_iters: int, eps: float, kernel_size: int,
        cls: Cls, cls_power: float,
    ) -> None:  # fmt: skip
        super().__init__(d_model, n_heads)
        self.n_iters = n_iters
        self.eps = eps
        self.cls = cls
        self.cls_powers = (cls_power, cls_power) if cls == "polarised" else None
        self.pivots = nn.Parameter(torch.randn(n_heads, n_pivots, d_model // n_heads))
        self.mass_logits = nn.Parameter(torch.zeros(n_heads, n_pivots))
        self.convolution: nn.Conv1d | None = None
        if kernel_size:
            self.convolution = nn.Conv1d(d_model, d_model, kernel_size, padding="same", groups=d_model)

    def convolved(self, x: Tensor) -> Tensor:
        """[B, N, d_model], every channel by itself; [CLS] as it is."""
        if self.convolution is None:
            return x
        first, rest = (x[:, :0], x) if self.cls == "none" else (x[:, :1], x[:, 1:])
        return torch.cat([first, self.convolution(rest.transpose(1, 2)).transpose(1, 2)], dim=1)

    def glued(self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor) -> Tensor:
        """n Gamma1 diag(1 / sigma) (Gamma2 v), n active tokens: [B, H, N, D]."""
        count = (~padded).sum(-1).to(q.dtype)[:, None, None]  # [B, 1, 1]
        hidden = torch.zeros_like(q[..., 0]).masked_fill(padded[:, None, :], -math.inf)  # [B, H, N]
        log_mu = hidden - count.log()
        sigma = torch.softmax(self.mass_logits, dim=-1)
        log_sigma = sigma.log()  # [H, R]
        factor = self.scale / self.eps
        first_scores = q @ self.pivots.transpose(-1, -2) * factor  # [B, H, N, R]
        second_scores = self.pivots @ k.transpose(-1, -2) * factor  # [B, H, R, N]
        start = torch.zeros_like(log_sigma)
        first = finite_plan(first_scores, log_mu, log_sigma, start, self.n_iters)
        second = finite_plan(second_scores, log_sigma, log_mu, hidden, self.n_iters)
        values = (second @ v) / sigma.unsqueeze(-1)
        return (first @ values) * count.unsqueeze(-1)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        values = self.convolved(self.WV(x).masked_fill(padded.unsqueeze(-1), 0.0))
        q, k, v = self.heads(self.WQ(x)), self.heads(self.WK(x)), self.heads(values)
        if self.cls == "none":
            out = self.glued(q, k, v, padded)
        else:
            row = summary_rows(q[:, :, :1], k, v, ~padded, None, self.scale, self.cls_powers)
            others = self.glued(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], padded[:, 1:])
            out = torch.cat([row, others], dim=2)
        out = self.linear(out.transpose(1, 2).flatten(2))
        return out


class LOTEncoderLayer(EncoderLayer):
    """A layer that returns no map, since there is none."""

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:  # type: ignore[override]
        return self.updated(x, self.mha(x, padded))


class LOTFormerText(TokenClassifier):
    """Text classifier over padded token ids.  A text of nothing but padding counts as it is.

    n_pivots: R.  n_iters: half-steps of each loop.  eps: epsilon.  The rest as in TokenClassifier.
    kernel_size: of the convolution of values, odd, 0 for none.  cls: "none" pools the
    maximum over tokens; "softmax" and "polarised" classify a learnt first token that gathers from all
    by softmax, of logits raised to cls_power where polarised.
    Raises ValueError when cls is unknown, too.
    """

    def __init__(
        self,
        *,
        n_pivots: int = 32,
        n_iters: int = 5,
        eps: float = 1.0,
        kernel_size: int = 0,
        cls: Cls = "none",
        cls_power: float = 2.0,
        **text: Any,
    ) -> None:
        if cls not in ("none", "softmax", "polarised"):
            raise ValueError(f'cls must be "none", "softmax" or "polarised", got {cls!r}')

        def layer(d_model: int, n_heads: int, d_ff: int, dropout: float) -> nn.Module:
            mha = LOTAttention(d_model, n_heads, n_pivots, n_iters, eps, kernel_size, cls, cls_power)
            return LOTEncoderLayer(mha, d_model, d_ff, dropout)

        super().__init__(layer, **text)
        width = self.embedding.embedding_dim
        self.cls_token = nn.Parameter(torch.randn(width)) if cls != "none" else None

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: [B, N] token ids.  Returns probabilities [B, classes]."""
        x, padded = self.embedded(inputs)
        padded = padded & ~padded.all(dim=-1, keepdim=True)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), 1, -1), x], dim=1)
            padded = nn.functional.pad(padded, (1, 0), value=False)
        for layer in self.layers:
            x = layer(x, padded)
        if self.cls_token is not None:
            pooled = x[:, 0]
        else:
            pooled = x.masked_fill(padded.unsqueeze(-1), -math.inf).amax(dim=1)
        return torch.softmax(self.linear(pooled), dim=-1)
