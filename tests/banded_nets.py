"""Sinkhorn layers with a window, each with another idiom for its mask, for tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

WINDOW, TOKENS = 4, 48


def log_loop(s: Tensor, half_steps: int, rows_first: bool = True) -> Tensor:
    """N P after half-steps from zero; a row or column without a score stays out."""
    f, g = torch.zeros_like(s[..., 0]), torch.zeros_like(s[..., 0, :])
    log_mu = torch.log(torch.full_like(f, 1.0 / s.shape[-2]))
    log_nu = torch.log(torch.full_like(g, 1.0 / s.shape[-1]))
    for step in range(half_steps):
        if (step % 2 == 0) == rows_first:
            total = torch.logsumexp(s + g[..., None, :], -1)
            f = torch.where(total == -math.inf, torch.zeros_like(total), log_mu - total)
        else:
            total = torch.logsumexp(s + f[..., None], -2)
            g = torch.where(total == -math.inf, torch.zeros_like(total), log_nu - total)
    return torch.exp(s + f[..., None] + g[..., None, :]) * s.shape[-2]


def offsets(s: Tensor) -> Tensor:
    i = torch.arange(s.shape[-1], device=s.device)
    return i[None, :] - i[:, None]


def lower_and_upper(s: Tensor) -> Tensor:
    """One mask after the other, one of them -inf and one the least number."""
    ones = torch.ones(s.shape[-1], s.shape[-1], dtype=torch.bool)
    s = s.masked_fill(ones.triu(WINDOW + 1), -math.inf)
    return s.masked_fill(ones.tril(-WINDOW - 1), torch.finfo(s.dtype).min)


def added(s: Tensor) -> Tensor:
    n = s.shape[-1]
    mask = torch.full((n, n), -math.inf).triu(1) + torch.full((n, n), -math.inf).tril(-WINDOW - 1)
    return s + torch.where(mask == 0, 0.0, -1e9)


IDIOMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "positions": (lambda s: s.masked_fill(offsets(s).abs() > WINDOW, -math.inf), (-4, 4)),
    "two masks": (lower_and_upper, (-4, 4)),
    "added, causal": (added, (-4, 0)),
    "the token alone": (lambda s: s.masked_fill(offsets(s) != 0, -1e9), (0, 0)),
}  # fmt: skip
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "by head": lambda s: s.masked_fill(offsets(s).abs() > torch.tensor([2, 4])[:, None, None], -math.inf),
    "grows": lambda s: s.masked_fill(offsets(s).abs() > s.shape[-1] // 4, -1e9),
    "global tokens": lambda s: s.masked_fill(
        (offsets(s).abs() > 3) & (torch.arange(s.shape[-1]) * torch.arange(s.shape[-1])[:, None] > 0),
        -1e9,
    ),
}  # fmt: skip


class Windowed(nn.Module):
    """x [B, N, 16] -> [B, N, 16]"""

    def __init__(self, hide: Callable[[Tensor], Tensor], half_steps: int = 3) -> None:
        super().__init__()
        self.hide, self.half_steps = hide, half_steps
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        with torch.no_grad():
            self.qkv.weight *= 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        s = self.hide(q @ k.transpose(-1, -2) / math.sqrt(8))
        return self.out((log_loop(s, self.half_steps) @ v).transpose(1, 2).flatten(2))


class Padded(Windowed):
    """With a window in a buffer of its own length, joined with a mask of padded keys."""

    band: Tensor

    def __init__(self, half_steps: int = 4) -> None:
        super().__init__(nn.Identity(), half_steps)
        shown = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril(2).triu(-WINDOW)
        self.register_buffer("band", shown, persistent=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        n = x.shape[1]
        shown = self.band[:, :, :n, :n] & ~padding[:, None, None, :]
        s = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(~shown, -math.inf)
        return self.out((log_loop(s, self.half_steps) @ v).transpose(1, 2).flatten(2))


class LocalAttention(nn.Module):
    """A windowed layer as Longformer's dense fallback writes it: heads merged into the batch, einsum, the
    window as what is left of a matrix of ones, the loop in the exp domain."""

    def __init__(self, embed_dim: int = 16, num_heads: int = 2, one_sided_window: int = 6) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.one_sided_attn_window_size = one_sided_window
        self.query, self.key, self.value = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        self.norm = nn.LayerNorm(embed_dim)

    def _heads(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        x = x.view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        return x.reshape(b * self.num_heads, n, self.head_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, n, _ = hidden_states.shape
        query = self._heads(self.query(hidden_states)) / math.sqrt(self.head_dim)
        key, value = self._heads(self.key(hidden_states)), self._heads(self.value(hidden_states))
        attn_scores = torch.einsum("bxd,byd->bxy", query, key)
        w = self.one_sided_attn_window_size
        outside = attn_scores.new_ones(n, n).triu(w + 1) + attn_scores.new_ones(n, n).tril(-w - 1)
        hidden = outside.bool().to(attn_scores.dtype) * torch.finfo(attn_scores.dtype).min
        attn_scores = attn_scores + hidden
        attn = torch.softmax(attn_scores, dim=-1)
        for _ in range(4):
            attn = attn / attn.sum(dim=-2, keepdim=True)
            attn = attn / attn.sum(dim=-1, keepdim=True)
        out = torch.einsum("bxy,byd->bxd", attn, value)
        out = out.view(b, self.num_heads, n, self.head_dim).transpose(1, 2).reshape(b, n, -1)
        return self.norm(hidden_states + out)
