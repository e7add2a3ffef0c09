"""Train a softmax text classifier on AG News, to be compiled with `from: softmax`.

    python examples/softmax/train.py --out softmax-teacher

--data is a folder as examples/text/train.py takes it; texts and tokens are that script's.  Writes
model.safetensors (weights for model.py:build), calibration.npz and test.npz, both with labels.  Fixed
seeds, three epochs, some ten minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from model import TextClassifier
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from text.train import PAD, encode, read
from training import accuracy, arguments, most_frequent, one_cycle

BATCH, LENGTH, CALIBRATION = 32, 128, 8192


def train(model: nn.Module, tokens: Tensor, labels: Tensor, epochs: int) -> None:
    """Batches are cut to their longest text."""
    for _, index, step in one_cycle(model, len(tokens), BATCH, epochs, rate=1e-3, decay=0.01):
        longest = int((tokens[index] != PAD).sum(1).max())
        step(nn.functional.cross_entropy(model(tokens[index][:, :longest]), labels[index]))


def main() -> None:
    options = arguments(__doc__, 3).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (texts, classes), (test_texts, test_classes) = read("ag-news", options.data)
    model = TextClassifier(length=LENGTH)
    vocabulary = most_frequent(texts, model.embed.num_embeddings)
    tokens = encode(texts, vocabulary, LENGTH)
    test_tokens = encode(test_texts, vocabulary, LENGTH)
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
