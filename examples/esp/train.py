"""Train a small ESPFormer ViT on handwritten digits.

    pip install scikit-learn && python examples/esp/train.py --out esp-teacher

8 x 8 images in 2 x 2 patches: 17 tokens, 2 layers, 4 heads of 16 axis-aligned slices. `--anneal` cools
the sorts down while training, by the same factor each epoch, as the paper's annealing does. One thread
and fixed seeds; a few minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asapc.models import ESPFormerViT
from asapc.models.esp import ESPAttention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training import accuracy, digits, one_cycle, write_teacher

CONFIG = {
    "image_size": 8, "patch_size": 2, "channels": 1, "num_classes": 10, "dim": 64, "depth": 2,
    "heads": 4, "dim_head": 16, "mlp_dim": 128, "inverse_temperature": 0.1,
}  # fmt: skip
TRAINING_IMAGES = 900
TEST_IMAGES = 300


def train(
    model: ESPFormerViT, img: Tensor, labels: Tensor, epochs: int, temperatures: list[float]
) -> None:
    """temperatures: of SoftSort, one for each epoch."""
    for epoch, index, step in one_cycle(model, len(img), 60, epochs, rate=3e-3, decay=0.05):
        for module in model.modules():
            if isinstance(module, ESPAttention):
                module.softsort_temperature = temperatures[epoch]
        step(nn.functional.cross_entropy(model(img[index]), labels[index], label_smoothing=0.02))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.1, help="of SoftSort")
    parser.add_argument("--anneal", type=float, help="the temperature of the last epoch")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, classes = digits()
    img, labels = torch.from_numpy(pixels), torch.from_numpy(classes)
    training, held_out = slice(None, TRAINING_IMAGES), slice(TRAINING_IMAGES, None)

    last = options.temperature if options.anneal is None else options.anneal
    temperatures = np.geomspace(options.temperature, last, options.epochs).tolist()
    config = {**CONFIG, "softsort_temperature": temperatures[-1]}
    model = ESPFormerViT(**config)
    train(model, img[training], labels[training], options.epochs, temperatures)
    print(f"training images  accuracy {accuracy(model, img[training], labels[training]):.4f}")
    print(f"held-out images  accuracy {accuracy(model, img[held_out], labels[held_out]):.4f}")

    write_teacher(options.out, model, "espformer-vit", config)
    # Images the teacher never saw: most to choose operators on, the last to test.
    for name, part in (
        ("calibration", slice(TRAINING_IMAGES, -TEST_IMAGES)), ("test", slice(-TEST_IMAGES, None)),
    ):  # fmt: skip
        np.savez_compressed(options.out / f"{name}.npz", img=pixels[part], labels=classes[part])


if __name__ == "__main__":
    main()
