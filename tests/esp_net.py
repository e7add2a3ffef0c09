"""A small classifier with ESP attention, compiled once for all tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from attention_zoo import SlicedSoft
from torch import Tensor, nn

SIZE, CLASSES = 8, 3
TEMPERATURE = 0.1


class Net(nn.Module):
    """Class scores [B, 3] of x [B, N, 8]; `unused` is a parameter that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
        self.layers = nn.ModuleList(SlicedSoft(SIZE) for _ in range(2))
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
