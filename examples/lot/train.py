"""Train a LOTFormer text classifier on AG News, words as tokens: a teacher to compile to `lot`.

    python examples/lot/train.py --out lot-teacher
    python examples/lot/train.py --out lot-cls-teacher --cls polarised

--data is the folder of examples/text/train.py, whose reading and vocabulary this is. Writes config.json
and model.safetensors in half precision (a MODEL for asapc), vocabulary.txt, calibration.npz, whose texts
come from the training file, and test.npz, whose texts the teacher never saw. Fixed seeds; some five
minutes on one core.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asapc.models import LOTFormerText

CONFIG = {
    "vocab_size": 8000,
    "seq_len": 128,
    "d_model": 96,
    "n_layers": 2,
    "n_heads": 3,
    "d_ff": 192,
    "pad_id": 0,
    "num_classes": 4,
    "n_pivots": 16,
    "n_iters": 5,
    "eps": 1.0,
}
CALIBRATION = 4096  # training texts in calibration.npz
BATCH = 32


def text_example() -> object:
    """examples/text/train.py as a module."""
    path = Path(__file__).resolve().parents[1] / "text" / "train.py"
    spec = importlib.util.spec_from_file_location("text_train", path)
    if spec is None or spec.loader is None:
        sys.exit(f"train.py: {path} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def accuracy(model: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    model.eval()
    predictions = torch.cat([model(batch).argmax(-1) for batch in tokens.split(64)])
    return (predictions == labels).double().mean().item()


def train(model: nn.Module, tokens: Tensor, labels: Tensor, epochs: int) -> None:
    """AdamW on one cycle; every batch is cut to its longest text."""
    generator = torch.Generator().manual_seed(1)
    lengths = tokens.ne(CONFIG["pad_id"]).sum(-1)
    steps = len(tokens) // BATCH
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=2e-3, total_steps=epochs * steps
    )
    model.train()
    for epoch in range(epochs):
        start, total = time.perf_counter(), 0.0
        order = torch.randperm(len(tokens), generator=generator).split(BATCH)[:steps]
        for step, index in enumerate(order, 1):
            batch = tokens[index, : int(lengths[index].max().clamp(min=1))]
            probabilities = model(batch)
            loss = nn.functional.nll_loss(probabilities.clamp_min(1e-9).log(), labels[index])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item()
            if step % 100 == 0 or step == steps:
                seconds = time.perf_counter() - start
                print(
                    f"epoch {epoch + 1}/{epochs}  step {step}/{steps}  loss {total / step:.3f}  "
                    f"{seconds:.0f} s",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--cls", choices=("none", "softmax", "polarised"), default="none")
    parser.add_argument("--kernel-size", type=int, default=3, help="of the value convolution")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"--data is a folder with the data files, got {options.data}")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = text_example()
    config = {**CONFIG, "cls": options.cls, "kernel_size": options.kernel_size}
    (texts, classes), (test_texts, test_classes) = text.read("ag-news", options.data)
    common = Counter(word for words in texts for word in words).most_common(CONFIG["vocab_size"] - 2)
    vocabulary = {word: index + 2 for index, (word, _) in enumerate(common)}
    tokens = text.encode(texts, vocabulary, CONFIG["seq_len"])
    test_tokens = text.encode(test_texts, vocabulary, CONFIG["seq_len"])
    labels, test_labels = torch.from_numpy(classes), torch.from_numpy(test_classes)
    share = tokens.ne(CONFIG["pad_id"]).double().mean()
    print(f"{len(tokens)} training texts, {share:.0%} of tokens active")

    model = LOTFormerText(**config, dropout=0.1)
    train(model, tokens, labels, options.epochs)
    options.out.mkdir(parents=True, exist_ok=True)
    written = {"architecture": "lotformer-text", **config}
    (options.out / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    (options.out / "vocabulary.txt").write_text("\n".join(["[PAD]", "[UNK]", *vocabulary]) + "\n")
    save_file(model.half().state_dict(), options.out / "model.safetensors")
    np.savez_compressed(options.out / "calibration.npz", inputs=tokens[:CALIBRATION].numpy())
    np.savez_compressed(
        options.out / "test.npz", inputs=test_tokens.numpy(), labels=test_labels.numpy()
    )
    model.float()  # as the file holds it, in half precision
    print(f"test accuracy {accuracy(model, test_tokens, test_labels):.4f}")


if __name__ == "__main__":
    main()
