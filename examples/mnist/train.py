"""Train a shallow MNIST teacher: one Sinkhorn layer, one head, no feed-forward block, T = 5.

    python examples/mnist/train.py --patch 7 --out mnist7-teacher

--data is a folder with mnist.npz (x_train, y_train, x_test, y_test).  The protocol is that of the
shallow experiments of Sinkformers, ESPFormer and ASAP (its appendix E.4): Adam, batches of 100, a
rate divided by 10 twice near the end; but 1e-3 instead of 2e-3, at which patch 7 did not train here,
gradients clipped at 1, and fewer epochs than their 45.  Writes config.json and
model.safetensors in half precision (a MODEL for asapc), calibration.npz with 8192 training images,
and test.npz with the 10000 test images and their labels.  Fixed seeds, some ten minutes on one core.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asapc.models import SinkformerViT

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainable_loop import set_loop, trainable_sinkhorn_attention
from training import accuracy, arguments, descend, write_data, write_teacher

CONFIG = {
    "image_size": 28,
    "channels": 1,
    "num_classes": 10,
    "dim": 128,
    "depth": 1,
    "heads": 1,
    "dim_head": 64,
    "mlp_dim": 0,
    "max_iter": 5,
}
CALIBRATION = 8192
BATCH = 100


def images(pixels: np.ndarray) -> Tensor:
    """[n, 28, 28] uint8 -> [n, 1, 28, 28], mean 0 and standard deviation 1 over the data set."""
    return (torch.from_numpy(pixels).float().unsqueeze(1) / 255 - 0.1307) / 0.3081


def train(model: nn.Module, img: Tensor, labels: Tensor, epochs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    drops = [round(epochs * 35 / 45), round(epochs * 41 / 45)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, drops)
    model.train()
    for epoch in range(epochs):
        start, total = time.perf_counter(), 0.0
        order = torch.randperm(len(img), generator=generator).split(BATCH)
        for index in order:
            loss = nn.functional.cross_entropy(model(img[index])[0], labels[index])
            descend(model, optimiser, loss)
            total += loss.item()
        schedule.step()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}/{epochs}  loss {total / len(order):.4f}  {seconds:.0f} s", flush=True)


def main() -> None:
    parser = arguments(__doc__, 20, "mnist.npz")
    parser.add_argument("--patch", type=int, choices=(2, 4, 7, 14), default=7)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(options.data / "mnist.npz") as data:
        img, test_img = images(data["x_train"]), images(data["x_test"])
        labels, test_labels = (
            torch.from_numpy(data[name].astype(np.int64)) for name in ("y_train", "y_test")
        )
    config = {**CONFIG, "patch_size": options.patch}
    model = SinkformerViT(**config)
    set_loop(model, trainable_sinkhorn_attention)
    train(model, img, labels, options.epochs)
    write_teacher(options.out, model.half(), "sinkformer-vit", config)
    write_data(options.out, "img", img[:CALIBRATION], test_img, test_labels)
    model.float()  # as the file holds it, in half precision; the loop is the same map
    print(f"test accuracy {accuracy(model, test_img, test_labels):.4f}")


if __name__ == "__main__":
    main()
