"""Train the teacher of `asapc demo`: which package of Python's standard library is this code from?

    python3.11 examples/code/train.py

Writes asapc/demo_data/code/: teacher/ in half precision, vocabulary.txt, and code.npz: windows, of up to
896 tokens, of files that the teacher never saw. Tokens are words, digits, signs and ends of lines. Reads
the sources that come with the running Python; the shipped files were made with CPython 3.11.7. One thread
and fixed seeds; most steps see short windows, to save time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asapc.models import SinkformerText

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainable_loop import set_loop, trainable_sinkhorn_attention
from training import accuracy, descend, most_frequent, write_teacher

OUT = Path(__file__).resolve().parents[2] / "asapc" / "demo_data" / "code"
PACKAGES = ("asyncio", "distutils", "email", "idlelib", "lib2to3", "multiprocessing", "tkinter", "xml")
LENGTH = 896  # tokens
PAD, UNKNOWN = 0, 1
CONFIG = {
    "vocab_size": 1024,
    "seq_len": LENGTH,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 2,
    "d_ff": 128,
    "pad_id": PAD,
    "num_classes": len(PACKAGES),
    "max_iter": 20,
}
SHIPPED = 32  # held-out windows of each package in code.npz, at most
PHASES = ((1000, 32, 160), (120, 8, LENGTH))  # steps, windows a step, tokens of a window at most

Lines = list[list[str]]  # of a file: the tokens of each


def source_of(path: Path) -> Lines:
    """Its tokens, without what gives the package away: the comment at the top, its name."""
    text = re.sub(r"\A(\s*#.*\n)+", "", path.read_text("utf-8", "replace"))
    for package in PACKAGES:
        text = re.sub(rf"(?<![a-z]){package}(?![a-z])", "package", text, flags=re.IGNORECASE)
    lines = text.splitlines(keepends=True)
    return [re.findall(r"[A-Za-z]+|[0-9]+|[^\w\s]|_|\n", line) for line in lines]


def files_of(package: str) -> tuple[list[Lines], list[Lines]]:
    """Training files and held-out files (every third) of a package, its tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root) for path in (root / package).rglob("*.py")]
    paths = [path for path in paths if not any("test" in part for part in path.parts)]
    paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    sources = [lines for lines in (source_of(root / path) for path in paths) if lines]
    return [lines for index, lines in enumerate(sources) if index % 3], sources[::3]


def window(lines: Lines, start: int, length: int) -> list[str]:
    """Whole lines from one on, at most `length` tokens of them, and at least a part of the first."""
    taken = lines[start][:length]
    for line in lines[start + 1 :]:
        if len(taken) + len(line) > length:
            break
        taken = taken + line
    return taken


def windows(files: list[Lines]) -> list[list[str]]:
    """Every file cut into windows, the last of a file shorter; crumbs are left out."""
    found = []
    for lines in files:
        start = 0
        while start < len(lines):
            taken = window(lines, start, LENGTH)
            start += max(1, taken.count("\n"))
            found.append(taken)
    return [taken for taken in found if len(taken) >= LENGTH // 4]


def encode(texts: list[list[str]], vocabulary: dict[str, int], length: int) -> Tensor:
    """Token ids [n, length], padded at the end."""
    tokens = torch.full((len(texts), length), PAD)
    for row, words in zip(tokens, texts, strict=True):
        row[: len(words)] = torch.tensor([vocabulary.get(word, UNKNOWN) for word in words])
    return tokens


class Draw:
    """Random windows of training files: packages alike, places in a package alike."""

    def __init__(self, files: list[list[Lines]], vocabulary: dict[str, int]) -> None:
        self._files = files
        self._vocabulary = vocabulary
        self._places = [
            [(file, line) for file, lines in enumerate(its) for line in range(len(lines))]
            for its in files
        ]
        self._random = np.random.default_rng(1)

    def __call__(self, count: int, length: int) -> tuple[Tensor, Tensor]:
        labels = self._random.integers(len(self._files), size=count)
        texts = []
        for label in labels:
            file, line = self._places[label][self._random.integers(len(self._places[label]))]
            texts.append(window(self._files[label][file], line, length))
        return encode(texts, self._vocabulary, length), torch.from_numpy(labels)


def train(model: SinkformerText, draw: Draw, phases: tuple[tuple[int, int, int], ...]) -> None:
    """AdamW on one cycle."""
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    total = sum(steps for steps, _, _ in phases)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=3e-3, total_steps=total, pct_start=0.15, anneal_strategy="linear"
    )
    model.train()
    for steps, count, length in phases:
        start, loss_sum, right = time.perf_counter(), 0.0, 0.0
        for step in range(1, steps + 1):
            tokens, labels = draw(count, length)
            probabilities, _ = model(tokens)
            loss = nn.functional.nll_loss(probabilities.clamp_min(1e-9).log(), labels)
            descend(model, optimiser, loss)
            schedule.step()
            loss_sum += loss.item()
            right += (probabilities.argmax(-1) == labels).double().mean().item()
            if step % 50 == 0:
                seconds = time.perf_counter() - start
                print(
                    f"{length} tokens  step {step}/{steps}  loss {loss_sum / 50:.3f}  "
                    f"accuracy {right / 50:.3f}  {seconds:.0f} s",
                    flush=True,
                )
                loss_sum = right = 0.0


def logistic_regression(
    texts: list[list[str]], labels: Tensor, held_out: list[list[str]], its_labels: Tensor
) -> float:
    """Accuracy on held-out windows of how often each byte occurs in them, for comparison."""

    def counts(windows: list[list[str]]) -> Tensor:
        found = torch.zeros(len(windows), 256)
        for row, words in zip(found, windows, strict=True):
            text = torch.tensor(list("".join(words).encode()))
            row += torch.bincount(text, minlength=256)
        return found.log1p()

    x, y = counts(texts), counts(held_out)
    mean, deviation = x.mean(0), x.std(0) + 0.1
    x, y = (x - mean) / deviation, (y - mean) / deviation
    linear = nn.Linear(x.shape[1], len(PACKAGES))
    optimiser = torch.optim.LBFGS(linear.parameters(), max_iter=100)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = nn.functional.cross_entropy(linear(x), labels) + 1e-2 * linear.weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return (linear(y).argmax(-1) == its_labels).double().mean().item()


def labelled(texts: list[list[list[str]]]) -> tuple[list[list[str]], Tensor]:
    """Windows of all packages, and the package of each."""
    labels = [label for label, its in enumerate(texts) for _ in its]
    return [text for its in texts for text in its], torch.tensor(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = [files_of(package) for package in PACKAGES]
    lines = [line for training, _ in files for its in training for line in its]
    vocabulary = most_frequent(lines, CONFIG["vocab_size"])
    texts, labels = labelled([windows(training) for training, _ in files])
    random = np.random.default_rng(0)
    cut = [windows(its) for _, its in files]
    kept = [[its[i] for i in random.permutation(len(its))[:SHIPPED]] for its in cut]
    held_out, its_labels = labelled(kept)
    order = torch.from_numpy(random.permutation(len(held_out)))
    tokens, shuffled = encode(held_out, vocabulary, LENGTH)[order], its_labels[order]
    bag = logistic_regression(texts, labels, held_out, its_labels)
    print(f"held-out windows {dict(zip(PACKAGES, map(len, cut), strict=True))}, {len(tokens)} are kept")
    print(f"{tokens.ne(PAD).double().mean():.0%} of tokens active, {tokens.eq(UNKNOWN).sum()} unknown")
    print(f"logistic regression on the bytes of {len(texts)} training windows: {bag:.4f}", flush=True)

    model = SinkformerText(**CONFIG, dropout=0.1)
    set_loop(model, trainable_sinkhorn_attention)
    train(model, Draw([training for training, _ in files], vocabulary), PHASES)
    write_teacher(options.out / "teacher", model.half(), "sinkformer-text", CONFIG)
    np.savez_compressed(options.out / "code.npz", inputs=tokens.numpy(), labels=shuffled.numpy())
    listed = ["[PAD]", "[UNK]", *(json.dumps(word)[1:-1] for word in vocabulary)]
    (options.out / "vocabulary.txt").write_text("\n".join(listed) + "\n")
    for path in sorted(options.out.rglob("*.*")):
        print(f"{path}  {path.stat().st_size} bytes")
    model.float()  # as the file holds it, in half precision; the loop is the same map
    print(f"held-out windows  accuracy {accuracy(model, tokens, shuffled, 8):.4f}")


if __name__ == "__main__":
    main()
