"""Built-in architectures: a folder with config.json and model.safetensors names one of these."""

from __future__ import annotations

from torch import nn

from asapc.models.esp import ESPFormerViT
from asapc.models.lot import LOTFormerText
from asapc.models.text import SinkformerText
from asapc.models.vit import SinkformerViT

# config.json is {"architecture": a key below, **constructor arguments}
ARCHITECTURES: dict[str, type[nn.Module]] = {
    "sinkformer-vit": SinkformerViT,
    "sinkformer-text": SinkformerText,
    "espformer-vit": ESPFormerViT,
    "lotformer-text": LOTFormerText,
}

__all__ = ["ARCHITECTURES", "ESPFormerViT", "LOTFormerText", "SinkformerText", "SinkformerViT"]
