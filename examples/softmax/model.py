"""A BERT-like text classifier with softmax attention: MODEL is `model.py:build`, with --weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PAD = 0


class Block(nn.Module):
    """x: [B, N, d]; keep: [B, N] bool -> [B, N, d]."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        parts = self.qkv(self.norm_attention(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class TextClassifier(nn.Module):
    """inputs: [B, N] token ids, PAD at the end -> logits [B, classes], from the mean of the tokens."""

    def __init__(
        self, vocab_size: int = 8000, dim: int = 128, heads: int = 4, hidden: int = 256, layers: int = 4,
        length: int = 128, classes: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.place = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        keep = inputs != PAD
        x = self.embed(inputs) + self.place[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x, keep)
        x = self.norm(x) * keep[..., None]
        logits: Tensor = self.head(x.sum(1) / keep.sum(1, keepdim=True).clamp(min=1))
        return logits


def build() -> TextClassifier:
    return TextClassifier()
