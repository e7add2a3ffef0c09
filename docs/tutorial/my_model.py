"""A small text classifier with Sinkhorn attention, written without any thought of asapc."""

import torch
from torch import nn


class SinkhornAttention(nn.Module):
    def __init__(self, dim, heads, iterations):
        super().__init__()
        self.heads, self.iterations = heads, iterations
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, padding):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        log_plan = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        padding = padding[:, None, None, :]
        log_plan = log_plan.masked_fill(padding, -1e9)
        for _ in range(self.iterations):
            log_plan = log_plan - log_plan.logsumexp(-1, keepdim=True)  # rows
            columns = log_plan.logsumexp(-2, keepdim=True)
            log_plan = log_plan - columns.masked_fill(padding, 0.0)  # columns of words
        return self.out((log_plan.exp() @ v).transpose(1, 2).flatten(2))


class Classifier(nn.Module):
    def __init__(self, words=200, classes=4, dim=64, heads=4, depth=2, iterations=10):
        super().__init__()
        self.embedding = nn.Embedding(words, dim, padding_idx=0)
        self.layers = nn.ModuleList(SinkhornAttention(dim, heads, iterations) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.embedding(tokens)
        for attention, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + attention(x, padding))
        x = x.masked_fill(padding[..., None], 0.0).sum(1)
        return self.head(x / (~padding).sum(1, keepdim=True))


def build(depth=2, iterations=10):
    torch.manual_seed(0)
    return Classifier(depth=depth, iterations=iterations)
