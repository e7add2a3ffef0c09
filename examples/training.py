"""What the scripts here train alike: AdamW on one cycle, the files of a teacher, and its accuracy."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def arguments(doc: str, epochs: int, *files: str) -> argparse.ArgumentParser:
    """--data, a folder that must hold these files, --out and --epochs."""

    def folder(text: str) -> Path:
        if not Path(text).is_dir() or not all((Path(text) / name).is_file() for name in files):
            raise argparse.ArgumentTypeError(f"must be a folder with the data files, got {text}")
        return Path(text)

    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--data", type=folder, default="../shared/data")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=epochs)
    return parser


def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits in random order: images [n, 1, 8, 8] in [0, 1], and classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    return (data.images[order] / 16).astype(np.float32)[:, None], data.target[order].astype(np.int64)


def most_frequent(texts: list[list[str]], size: int) -> dict[str, int]:
    """Ids of the most frequent words, from 2 on; 0 is padding, 1 any other word."""
    common = Counter(word for words in texts for word in words).most_common(size - 2)
    return {word: index + 2 for index, (word, _) in enumerate(common)}


def one_cycle(
    model: nn.Module, examples: int, batch_size: int, epochs: int, *,
    rate: float, decay: float, generator: torch.Generator | None = None,
) -> Iterator[tuple[int, Tensor, Callable[[Tensor], None]]]:  # fmt: skip
    """(epoch, indices of a batch, what takes a step down its loss), every example once an epoch.

    AdamW on one cycle; the mean loss is printed meanwhile.  generator: of the order of the examples.
    """
    generator = generator or torch.Generator().manual_seed(1)
    steps = -(-examples // batch_size)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=rate, total_steps=epochs * steps)
    losses: list[float] = []

    def step(loss: Tensor) -> None:
        descend(model, optimiser, loss)
        schedule.step()
        losses.append(loss.item())

    model.train()
    for epoch in range(epochs):
        start = time.perf_counter()
        losses.clear()
        order = torch.randperm(examples, generator=generator).split(batch_size)
        for number, index in enumerate(order, 1):
            yield epoch, index, step
            if number % 100 == 0 or number == steps:
                seconds = time.perf_counter() - start
                told = f"epoch {epoch + 1}/{epochs}  step {number}/{steps}  loss {np.mean(losses):.3f}"
                print(f"{told}  {seconds:.0f} s", flush=True)


def descend(model: nn.Module, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step down the gradient, which is clipped."""
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor, batch_size: int = 64) -> float:
    """The share of right classes; of several outputs the first has the scores."""
    model.eval()
    outputs = (model(batch) for batch in inputs.split(batch_size))
    scores = torch.cat([out[0] if isinstance(out, tuple) else out for out in outputs])
    return (scores.argmax(-1) == labels).double().mean().item()


def write_teacher(folder: Path, model: nn.Module, architecture: str, config: dict[str, object]) -> None:
    """config.json and model.safetensors: a MODEL for asapc."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"architecture": architecture, **config}
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    save_file(model.state_dict(), folder / "model.safetensors")


def write_data(folder: Path, name: str, known: Tensor, test: Tensor, labels: Tensor) -> None:
    """calibration.npz, and test.npz with its labels; name: of forward's argument."""
    np.savez_compressed(folder / "calibration.npz", **{name: known.numpy()})
    np.savez_compressed(folder / "test.npz", **{name: test.numpy()}, labels=labels.numpy())
