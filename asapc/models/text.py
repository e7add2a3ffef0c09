"""Sinkformer text classifier: key padding, post-norm, max-pooling over tokens, softmax output.

State-dict names and the forward pass equal those of the released Sinkformers code (Sander et al.
2022, text classification), so that its checkpoints load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asapc.models.sinkhorn import PADDED_SCORE, sinkhorn_attention


def sinusoid_table(rows: int, dim: int) -> Tensor:
    """[rows, dim]: sin (even) and cos (odd columns i) of row / 10000^(2 floor(i/2) / dim)."""
    index = torch.arange(dim)
    frequency = torch.pow(10000.0, -2.0 * (index // 2).double() / dim)
    angle = torch.arange(rows).double().unsqueeze(1) * frequency
    return torch.where(index % 2 == 0, angle.sin(), angle.cos()).float()


class Heads(nn.Module):
    """Projections of tokens to heads, and of heads to tokens."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.scale = (d_model // n_heads) ** -0.5
        self.WV = nn.Linear(d_model, d_model)
        self.WQ = nn.Linear(d_model, d_model)
        self.WK = nn.Linear(d_model, d_model)
        self.linear = nn.Linear(d_model, d_model)

    def heads(self, x: Tensor) -> Tensor:
        """[B, N, H * D] -> [B, H, N, D]"""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class MultiHeadAttention(Heads):
    """x: [B, N, d_model], padded: [B, N] bool -> ([B, N, d_model], attention [B, H, N, N])"""

    def __init__(self, d_model: int, n_heads: int, max_iter: int, eps: float) -> None:
        super().__init__(d_model, n_heads)
        self.max_iter = max_iter
        self.loop = sinkhorn_attention  # training may put a faster twin here
        self.eps = eps

    def forward(self, x: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(self.WQ(x)), self.heads(self.WK(x)), self.heads(self.WV(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        scores = scores.masked_fill(padded[:, None, None, :], PADDED_SCORE)  # [B, H, N, N]
        attention = self.loop(scores, self.max_iter, self.eps)
        out = torch.matmul(attention, v).transpose(1, 2).flatten(2)
        return self.linear(out), attention


class PositionWiseFeedForward(nn.Module):
    """x: [B, N, d_model] -> [B, N, d_model]"""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff)
        self.linear2 = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(torch.relu(self.linear1(x)))


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by a norm of the residual sum."""

    def __init__(self, mha: nn.Module, d_model: int, d_ff: int, dropout: float) -> None:
        super().__init__()
        self.mha = mha
        self.dropout1 = nn.Dropout(dropout)
        self.layernorm1 = nn.LayerNorm(d_model, eps=1e-6)
        self.ffn = PositionWiseFeedForward(d_model, d_ff)
        self.dropout2 = nn.Dropout(dropout)
        self.layernorm2 = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, x: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        update, attention = self.mha(x, padded)
        return self.updated(x, update), attention

    def updated(self, x: Tensor, update: Tensor) -> Tensor:
        """x after attention, which gives `update`."""
        x = self.layernorm1(x + self.dropout1(update))
        return self.layernorm2(x + self.dropout2(self.ffn(x)))


class TokenClassifier(nn.Module):
    """What text classifiers over padded token ids share: the embedding, positions from 1, as row 0 of
    their table belongs to padding, layers, and a head.

    layer: makes one, of d_model, n_heads, d_ff and dropout.  seq_len: longest input.  pad_id: the
    padding token.  Raises ValueError when n_heads does not divide d_model.
    """

    def __init__(
        self,
        layer: Callable[[int, int, int, float], nn.Module],
        *,
        vocab_size: int,
        seq_len: int,
        d_model: int = 512,
        n_layers: int = 6,
        n_heads: int = 8,
        d_ff: int = 2048,
        pad_id: int = 0,
        num_classes: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"n_heads must divide d_model, got {n_heads} and {d_model}")
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.pad_id = pad_id
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.pos_embedding = nn.Embedding.from_pretrained(
            sinusoid_table(seq_len + 1, d_model), freeze=True
        )
        self.layers = nn.ModuleList(layer(d_model, n_heads, d_ff, dropout) for _ in range(n_layers))
        self.linear = nn.Linear(d_model, num_classes)

    def embedded(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, N, d_model] with their positions, and which are padded [B, N], of ids [B, N]."""
        padded = inputs.eq(self.pad_id)
        positions = torch.arange(1, inputs.shape[1] + 1, device=inputs.device)
        positions = positions.expand_as(inputs).masked_fill(padded, 0)
        return self.embedding(inputs) + self.pos_embedding(positions), padded

    def example_inputs(self, batch: int) -> dict[str, Tensor]:
        """Deterministic random token ids, every row but the first padded at its end."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (batch, self.seq_len), generator=generator)
        tokens = torch.where(tokens == self.pad_id, (tokens + 1) % self.vocab_size, tokens)
        lengths = self.seq_len - torch.arange(batch) * (self.seq_len // (2 * batch))
        padded = torch.arange(self.seq_len) >= lengths.unsqueeze(1)
        return {"inputs": tokens.masked_fill(padded, self.pad_id)}


class SinkformerText(TokenClassifier):
    """Text classifier over padded token ids; every token, padded or not, takes part in the pool.

    max_iter: half-steps T, rows first.  eps: epsilon.  The rest as in TokenClassifier.
    """

    def __init__(self, *, max_iter: int = 1, eps: float = 1.0, **text: Any) -> None:
        def layer(d_model: int, n_heads: int, d_ff: int, dropout: float) -> nn.Module:
            mha = MultiHeadAttention(d_model, n_heads, max_iter, eps)
            return EncoderLayer(mha, d_model, d_ff, dropout)

        super().__init__(layer, **text)

    def forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """inputs: [B, N] token ids.  Returns probabilities [B, classes] and the attention maps."""
        x, padded = self.embedded(inputs)
        maps = []
        for layer in self.layers:
            x, attention = layer(x, padded)
            maps.append(attention)
        pooled = x.amax(dim=1)
        return torch.softmax(self.linear(pooled), dim=-1), maps
