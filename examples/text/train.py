"""Train a padded text teacher: a Sinkformer classifier, T = 10, on AG News, words as tokens.

    python examples/text/train.py --data ../shared/data --out text-teacher

--data is a folder with ag_news_train.csv.gz (columns label, text) and ag_news_test.csv.gz (label,
title, description).  Writes config.json and model.safetensors (a MODEL for asapc), vocabulary.txt
and data.npz, whose examples the teacher never saw.  One thread, fixed seeds, some ten minutes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asapc.models import SinkformerText

PAD, UNKNOWN = 0, 1
CONFIG = {
    "vocab_size": 8000,
    "seq_len": 64,
    "d_model": 96,
    "n_layers": 3,
    "n_heads": 3,
    "d_ff": 192,
    "pad_id": PAD,
    "num_classes": 4,
    "max_iter": 10,
}
HELD_OUT = 1500  # examples of the test file that go into data.npz


def read(path: Path) -> tuple[list[list[str]], np.ndarray]:
    """Lower-case words and punctuation of every row, and its class 0..3."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [
        row["text"] if "text" in row else f"{row['title']} {row['description']}" for row in rows
    ]
    words = [re.findall(r"\w+|[^\w\s]", text.lower()) for text in texts]
    return words, np.array([int(row["label"]) - 1 for row in rows])


def encode(texts: list[list[str]], vocabulary: dict[str, int]) -> Tensor:
    """Token ids [n, seq_len], cut or padded at the end."""
    tokens = torch.full((len(texts), CONFIG["seq_len"]), PAD)
    for row, words in zip(tokens, texts, strict=True):
        ids = [vocabulary.get(word, UNKNOWN) for word in words[: len(row)]]
        row[: len(ids)] = torch.tensor(ids, dtype=torch.long)
    return tokens


@torch.no_grad()
def accuracy(model: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    model.eval()
    predictions = torch.cat([model(batch)[0].argmax(-1) for batch in tokens.split(64)])
    return (predictions == labels).double().mean().item()


def train(model: nn.Module, tokens: Tensor, labels: Tensor, epochs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    steps = len(tokens) // 64
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=2e-3, total_steps=epochs * steps
    )
    model.train()
    for epoch in range(epochs):
        start, total = time.perf_counter(), 0.0
        order = torch.randperm(len(tokens), generator=generator).split(64)[:steps]
        for index in order:
            probabilities, _ = model(tokens[index])
            loss = nn.functional.nll_loss(probabilities.clamp_min(1e-9).log(), labels[index])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}/{epochs}  loss {total / steps:.3f}  {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with ag_news_*.csv.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts, classes = read(options.data / "ag_news_train.csv.gz")
    test_texts, test_classes = read(options.data / "ag_news_test.csv.gz")
    chosen = np.random.default_rng(0).permutation(len(test_texts))[:HELD_OUT]
    common = Counter(word for words in texts for word in words).most_common(
        CONFIG["vocab_size"] - 2
    )
    vocabulary = {word: index + 2 for index, (word, _) in enumerate(common)}
    tokens, labels = encode(texts, vocabulary), torch.from_numpy(classes)
    test_tokens = encode([test_texts[i] for i in chosen], vocabulary)
    test_labels = torch.from_numpy(test_classes[chosen])
    print(f"{len(tokens)} training texts, {tokens.ne(PAD).double().mean():.0%} of tokens active")

    model = SinkformerText(**CONFIG, dropout=0.1)
    train(model, tokens, labels, options.epochs)
    print(f"held-out accuracy {accuracy(model, test_tokens, test_labels):.4f}")

    options.out.mkdir(parents=True, exist_ok=True)
    config = {"architecture": "sinkformer-text", **CONFIG}
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (options.out / "vocabulary.txt").write_text("\n".join(["[PAD]", "[UNK]", *vocabulary]) + "\n")
    save_file(model.state_dict(), options.out / "model.safetensors")
    np.savez_compressed(
        options.out / "data.npz", inputs=test_tokens.numpy(), labels=test_labels.numpy()
    )


if __name__ == "__main__":
    main()
