"""Train the digits teacher that ships with asapc: a Sinkformer ViT, T = 20, on 8 x 8 images.

    pip install scikit-learn && python examples/digits/train.py

Writes asapc/demo_data/digits/: teacher/config.json, teacher/model.safetensors and digits.npz, which
holds the images the teacher never saw.  One thread and fixed seeds: the same versions of torch and
scikit-learn on the same kind of processor write the same files.  About ten minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asapc.models import SinkformerViT
from asapc.models.vit import SinkhornAttention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training import accuracy, digits, one_cycle, write_teacher

OUT = Path(__file__).resolve().parents[2] / "asapc" / "demo_data" / "digits"
CONFIG = {
    "image_size": 8,
    "patch_size": 1,
    "channels": 1,
    "num_classes": 10,
    "dim": 64,
    "depth": 3,
    "heads": 4,
    "dim_head": 16,
    "mlp_dim": 128,
    "max_iter": 20,
}
TRAINING_IMAGES = 900
WARM_UP_HALF_STEPS = 4


def shifted(img: Tensor, generator: torch.Generator) -> Tensor:
    """Every image moved by -1, 0 or 1 pixels each way, zeros moving in.  img: [B, 1, 8, 8]"""
    padded = nn.functional.pad(img, (1, 1, 1, 1))
    rows, columns = torch.randint(3, (2, len(img), 1), generator=generator) + torch.arange(8)
    batch = torch.arange(len(img))[:, None, None]
    return padded[batch, 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def set_half_steps(model: SinkformerViT, half_steps: int) -> None:
    for module in model.modules():
        if isinstance(module, SinkhornAttention):
            module.max_iter = half_steps


def train(model: SinkformerViT, img: Tensor, labels: Tensor, epochs: int, batch_size: int) -> None:
    """Two thirds of the epochs run a shorter loop, to save time."""
    generator = torch.Generator().manual_seed(1)
    cycle = one_cycle(
        model, len(img), batch_size, epochs, rate=3e-3, decay=0.05, generator=generator
    )
    for epoch, index, step in cycle:
        set_half_steps(model, WARM_UP_HALF_STEPS if epoch < 2 * epochs // 3 else CONFIG["max_iter"])
        logits, _ = model(shifted(img[index], generator))
        step(nn.functional.cross_entropy(logits, labels[index], label_smoothing=0.02))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--epochs", type=int, default=90)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, classes = digits()
    img, labels = torch.from_numpy(pixels), torch.from_numpy(classes)
    training, held_out = slice(None, TRAINING_IMAGES), slice(TRAINING_IMAGES, None)

    model = SinkformerViT(**CONFIG)
    train(model, img[training], labels[training], options.epochs, batch_size=60)
    print(f"training images  accuracy {accuracy(model, img[training], labels[training]):.4f}")
    print(f"held-out images  accuracy {accuracy(model, img[held_out], labels[held_out]):.4f}")

    teacher = options.out / "teacher"
    write_teacher(teacher, model, "sinkformer-vit", CONFIG)
    np.savez_compressed(options.out / "digits.npz", img=pixels[held_out], labels=classes[held_out])
    for path in (teacher / "model.safetensors", options.out / "digits.npz"):
        print(f"{path}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
