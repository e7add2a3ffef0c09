"""Train a small ESPFormer ViT on handwritten digits.

    pip install scikit-learn && python examples/esp/train.py --out esp-teacher

8 x 8 images in 2 x 2 patches: 17 tokens, 2 layers, 4 heads of 16 axis-aligned slices. `--anneal` cools
the sorts down while training, by the same factor each epoch, as the paper's annealing does. One thread
and fixed seeds; a few minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from asapc.models import ESPFormerViT
from asapc.models.esp import ESPAttention

CONFIG = {
    "image_size": 8, "patch_size": 2, "channels": 1, "num_classes": 10, "dim": 64, "depth": 2,
    "heads": 4, "dim_head": 16, "mlp_dim": 128, "inverse_temperature": 0.1,
}  # fmt: skip
TRAINING_IMAGES = 900
TEST_IMAGES = 300


@torch.no_grad()
def accuracy(model: nn.Module, img: Tensor, labels: Tensor) -> float:
    model.eval()
    predictions = torch.cat([model(batch).argmax(-1) for batch in img.split(100)])
    return (predictions == labels).double().mean().item()


def train(
    model: ESPFormerViT, img: Tensor, labels: Tensor, epochs: int, temperatures: list[float]
) -> None:
    """AdamW on one cycle; temperatures: of SoftSort, one for each epoch."""
    generator = torch.Generator().manual_seed(1)
    batch_size = 60
    steps = len(img) // batch_size
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=3e-3, total_steps=epochs * steps
    )
    model.train()
    for epoch in range(epochs):
        for module in model.modules():
            if isinstance(module, ESPAttention):
                module.softsort_temperature = temperatures[epoch]
        start, total = time.perf_counter(), 0.0
        for index in torch.randperm(len(img), generator=generator).split(batch_size)[:steps]:
            loss = nn.functional.cross_entropy(model(img[index]), labels[index], label_smoothing=0.02)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}/{epochs}  loss {total / steps:.3f}  {seconds:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--temperature", type=float, default=0.1, help="of SoftSort")
    parser.add_argument("--anneal", type=float, help="the temperature of the last epoch")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    pixels = (digits.images[order] / 16).astype(np.float32)[:, None]  # [n, 1, 8, 8] in [0, 1]
    classes = digits.target[order].astype(np.int64)
    img, labels = torch.from_numpy(pixels), torch.from_numpy(classes)
    training, held_out = slice(None, TRAINING_IMAGES), slice(TRAINING_IMAGES, None)

    last = options.temperature if options.anneal is None else options.anneal
    temperatures = np.geomspace(options.temperature, last, options.epochs).tolist()
    config = {**CONFIG, "softsort_temperature": temperatures[-1]}
    model = ESPFormerViT(**config)
    train(model, img[training], labels[training], options.epochs, temperatures)
    print(f"training images  accuracy {accuracy(model, img[training], labels[training]):.4f}")
    print(f"held-out images  accuracy {accuracy(model, img[held_out], labels[held_out]):.4f}")

    options.out.mkdir(parents=True, exist_ok=True)
    document = {"architecture": "espformer-vit", **config}
    (options.out / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    save_file(model.state_dict(), options.out / "model.safetensors")
    # Images the teacher never saw: most to choose operators on, the last to test.
    for name, part in (
        ("calibration", slice(TRAINING_IMAGES, -TEST_IMAGES)), ("test", slice(-TEST_IMAGES, None)),
    ):  # fmt: skip
        np.savez_compressed(options.out / f"{name}.npz", img=pixels[part], labels=classes[part])


if __name__ == "__main__":
    main()
