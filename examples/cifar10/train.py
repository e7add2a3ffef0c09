"""Train a small CIFAR-10 teacher: a Sinkformer of 4 layers with 4 heads, T = 10, 65 tokens.

    python examples/cifar10/train.py --out cifar10-teacher

--data is a folder with cifar10_jpeg_subset.npz (x_train, y_train, x_test, y_test), 6000 images to train
on: the teacher gets about half of the test images right, far from what the whole data set allows, but
its attention is sharp in every layer, which is what makes it a hard case.  Writes config.json and
model.safetensors in half precision (a MODEL for asapc), calibration.npz with the training images, and
test.npz with the test images and their labels.  Fixed seeds, some twenty minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asapc.models import SinkformerViT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainable_loop import set_loop, trainable_sinkhorn_attention
from training import accuracy, arguments, one_cycle, write_data, write_teacher

CONFIG = {
    "image_size": 32,
    "patch_size": 4,
    "channels": 3,
    "num_classes": 10,
    "dim": 128,
    "depth": 4,
    "heads": 4,
    "dim_head": 32,
    "mlp_dim": 256,
    "max_iter": 10,
}
DATA = "cifar10_jpeg_subset.npz"
BATCH = 64
SHIFT = 4  # pixels, at most, that an image is moved


def images(pixels: np.ndarray) -> Tensor:
    """[n, 32, 32, 3] uint8 -> [n, 3, 32, 32], about mean 0 and standard deviation 1."""
    return (torch.from_numpy(pixels).float().permute(0, 3, 1, 2) / 255 - 0.47) / 0.25


def varied(img: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the images mirrored, all of them moved by a few pixels."""
    mirrored = torch.rand(len(img), generator=generator) < 0.5
    img = torch.where(mirrored[:, None, None, None], img.flip(-1), img)
    padded = nn.functional.pad(img, (SHIFT,) * 4)
    size = img.shape[-1]
    corners = torch.randint(0, 2 * SHIFT + 1, (len(img), 2), generator=generator).tolist()
    return torch.stack([
        one[:, row : row + size, column : column + size]
        for one, (row, column) in zip(padded, corners, strict=True)
    ])  # fmt: skip


def train(model: nn.Module, img: Tensor, labels: Tensor, epochs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    cycle = one_cycle(model, len(img), BATCH, epochs, rate=1e-3, decay=0.05, generator=generator)
    for _, index, step in cycle:
        logits = model(varied(img[index], generator))[0]
        step(nn.functional.cross_entropy(logits, labels[index]))


def main() -> None:
    options = arguments(__doc__, 30, DATA).parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(options.data / DATA) as data:
        img, test_img = images(data["x_train"]), images(data["x_test"])
        labels, test_labels = (
            torch.from_numpy(data[key].astype(np.int64)) for key in ("y_train", "y_test")
        )
    model = SinkformerViT(**CONFIG)
    set_loop(model, trainable_sinkhorn_attention)
    train(model, img, labels, options.epochs)
    write_teacher(options.out, model.half(), "sinkformer-vit", CONFIG)
    write_data(options.out, "img", img, test_img, test_labels)
    model.float()  # as the file holds it, in half precision; the loop is the same map
    print(f"test accuracy {accuracy(model, test_img, test_labels):.4f}")


if __name__ == "__main__":
    main()
