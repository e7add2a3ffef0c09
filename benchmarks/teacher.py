"""Teachers for benchmarks that train none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asapc.models import ARCHITECTURES


def write_teacher(folder: Path, architecture: str, config: Mapping[str, Any]) -> None:
    """A built-in model with random weights, the same at every call."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    save_file(ARCHITECTURES[architecture](**config).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architecture": architecture, **config}))
