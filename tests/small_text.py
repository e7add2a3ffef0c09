"""A padded text teacher, small enough that every command takes a second or two, and its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from asapc.models import ARCHITECTURES

KEYWORDS: dict[str, Any] = {
    "vocab_size": 40, "seq_len": 12, "d_model": 16, "n_layers": 3, "n_heads": 2, "d_ff": 16,
    "num_classes": 3, "max_iter": 6,
}  # fmt: skip


def write_teacher(folder: Path, seq_len: int = 12, sharpness: float = 4.0, **changed: int) -> Path:
    """Random, with attention that is not flat and an output that depends on it."""
    torch.manual_seed(0)
    keywords = {**KEYWORDS, "seq_len": seq_len, **changed}
    model = ARCHITECTURES["sinkformer-text"](**keywords)
    folder.mkdir(parents=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "WQ" in name or "WK" in name:
                parameter.mul_(sharpness)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architecture": "sinkformer-text", **keywords}))
    return folder


def write_data(
    path: Path, examples: int = 400, seed: int = 0, labels: bool = True, tokens: int = 12
) -> str:
    random = np.random.default_rng(seed)
    inputs = random.integers(1, 40, (examples, tokens))
    for row, length in enumerate(random.integers(4, tokens + 1, examples)):
        inputs[row, length:] = 0
    arrays = {"inputs": inputs, **({"labels": random.integers(0, 3, examples)} if labels else {})}
    np.savez(path, **arrays)
    return str(path)
