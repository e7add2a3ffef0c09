"""Train a softmax text classifier on AG News, to be compiled with `from: softmax`.

    python examples/softmax/train.py --out softmax-teacher

--data is a folder as examples/text/train.py takes it; texts and tokens are that script's.  Writes
model.safetensors (weights for model.py:build), calibration.npz and test.npz, both with labels.  Fixed
seeds, three epochs, some ten minutes on one core.
"""

from __future__ import annotations

import argparse
import runpy
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from model import TextClassifier
from safetensors.torch import save_file
from torch import Tensor, nn

text = runpy.run_path(str(Path(__file__).parents[1] / "text" / "train.py"))
BATCH, LENGTH, CALIBRATION = 32, 128, 8192


def train(model: nn.Module, tokens: Tensor, labels: Tensor, epochs: int) -> None:
    """AdamW on one cycle; batches are cut to their longest text."""
    generator = torch.Generator().manual_seed(1)
    steps = len(tokens) // BATCH
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-3, total_steps=epochs * steps)
    model.train()
    for epoch in range(epochs):
        start, total = time.perf_counter(), 0.0
        for index in torch.randperm(len(tokens), generator=generator)[: steps * BATCH].view(steps, BATCH):
            longest = int((tokens[index] != text["PAD"]).sum(1).max())
            loss = nn.functional.cross_entropy(model(tokens[index][:, :longest]), labels[index])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}/{epochs}  loss {total / steps:.4f}  {seconds:.0f} s", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    model.eval()
    predictions = torch.cat([model(batch).argmax(-1) for batch in tokens.split(100)])
    return (predictions == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"--data is a folder with the data files, got {options.data}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (texts, classes), (test_texts, test_classes) = text["read"]("ag-news", options.data)
    model = TextClassifier(length=LENGTH)
    common = Counter(word for words in texts for word in words)
    kept = common.most_common(model.embed.num_embeddings - 2)
    vocabulary = {word: index + 2 for index, (word, _) in enumerate(kept)}
    tokens = text["encode"](texts, vocabulary, LENGTH)
    test_tokens = text["encode"](test_texts, vocabulary, LENGTH)
    labels = torch.from_numpy(classes)
    train(model, tokens, labels, options.epochs)
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), options.out / "model.safetensors")
    known = {"inputs": tokens[:CALIBRATION].numpy(), "labels": classes[:CALIBRATION]}
    np.savez_compressed(options.out / "calibration.npz", **known)
    np.savez_compressed(options.out / "test.npz", inputs=test_tokens.numpy(), labels=test_classes)
    print(f"test accuracy {accuracy(model, test_tokens, torch.from_numpy(test_classes)):.4f}")


if __name__ == "__main__":
    main()
