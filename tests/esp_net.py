"""A small classifier with ESP attention as published code writes it, compiled once for all tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

SIZE, CLASSES = 8, 3
TEMPERATURE = 0.1


class Attention(nn.Module):
    def __init__(self, heads: int = 2, inverse_temperature: float = 0.5) -> None:
        super().__init__()
        self.heads, self.inverse_temperature = heads, inverse_temperature
        self.qkv, self.out = (nn.Linear(SIZE, n, bias=False) for n in (3 * SIZE, SIZE))

    def soft_sort(self, x: Tensor) -> Tensor:
        ordered = x.sort(dim=-1, descending=True).values
        scores = -((ordered.unsqueeze(-1) - x.unsqueeze(-2)) ** 2) / TEMPERATURE
        return scores.softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p, s = self.soft_sort(q.transpose(-1, -2)), self.soft_sort(k.transpose(-1, -2))
        plans = p.transpose(-1, -2) @ s
        cost = (torch.cdist(q, k).unsqueeze(2) * plans).sum(dim=(-1, -2))
        weights = torch.softmax(-self.inverse_temperature * cost, dim=-1)
        attention = (weights[..., None, None] * plans).sum(dim=2)
        return self.out((attention @ v).transpose(1, 2).reshape(b, n, -1))


class Net(nn.Module):
    """Class scores [B, 3] of x [B, N, 8]; `unused` is a parameter that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head, self.unused = nn.Linear(SIZE, CLASSES, bias=False), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + 4 * layer(norm(x))
        return self.head(x.amax(1) + x.amin(1)) + self.unused.detach()


_FOLDERS: list[Path] = []


def compiled(factory: pytest.TempPathFactory) -> Path:
    """A folder with data.npz and `out`, whose sorts are soft: exact ones exceed the default budget."""
    if not _FOLDERS:
        _FOLDERS.append(_compiled(factory.mktemp("esp")))
    return _FOLDERS[0]


def _compiled(folder: Path) -> Path:
    from asapc import pipeline
    from asapc.calibration.stored import Calibration, save_calibration
    from asapc.inputs.load import load_teacher
    from asapc.inputs.recipe import Recipe
    from asapc.terminal.progress import Progress

    x = np.random.default_rng(0).standard_normal((160, 10, SIZE)).astype(np.float32)
    largest = x.max(1)
    np.savez(folder / "data.npz", x=x, labels=largest[:, :CLASSES].argmax(1))
    data, recipe = str(folder / "data.npz"), Recipe(batch_size=16)
    teacher = load_teacher(f"{__file__}:Net")
    calibration = Calibration(teacher.fingerprint, recipe.to_dict(), "whole", {}, data, "parallel", ())
    save_calibration(folder / "calibration", calibration)
    pipeline.compile(teacher, folder / "calibration", folder / "out", recipe, data, Progress())
    return folder
