"""Train a padded text teacher: a Sinkformer classifier, words as tokens.

    python examples/text/train.py ag-news --out ag-news-teacher     T = 10, 128 tokens
    python examples/text/train.py imdb    --out imdb-teacher        T = 20, 256 tokens

--data is a folder with ag_news_train.csv.gz and ag_news_desc_train.csv.gz (columns label, text) and
ag_news_test.csv.gz (label, title, description), or imdb_train.jsonl.gz and imdb_test.jsonl.gz (label,
text).  Writes config.json and model.safetensors in half precision (a MODEL for asapc),
vocabulary.txt, calibration.npz, whose texts come from the training file (only the tokens are used to
fit), and test.npz, whose texts the teacher never saw.  Fixed seeds; the first two thirds of the epochs
run 4 half-steps to save time.  Some twenty minutes on one core.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from asapc.models import SinkformerText
from asapc.models.text import MultiHeadAttention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainable_loop import set_loop, trainable_sinkhorn_attention
from training import accuracy, arguments, most_frequent, one_cycle, write_data, write_teacher

PAD, UNKNOWN = 0, 1
COMMON = {
    "vocab_size": 8000,
    "d_model": 96,
    "n_layers": 3,
    "n_heads": 3,
    "d_ff": 192,
    "pad_id": PAD,
}
TEACHERS = {
    "ag-news": {**COMMON, "seq_len": 128, "num_classes": 4, "max_iter": 10},
    "imdb": {**COMMON, "seq_len": 256, "num_classes": 2, "max_iter": 20},
}
WARM_UP_HALF_STEPS = 4
CALIBRATION = 8192  # training texts in calibration.npz
BATCH = 32

Texts = tuple[list[list[str]], np.ndarray]


def words_of(text: str) -> list[str]:
    """Lower-case words and punctuation."""
    return re.findall(r"\w+|[^\w\s]", text.replace("<br />", " ").lower())


def read_ag_news(path: Path) -> Texts:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [
        row["text"] if "text" in row else f"{row['title']} {row['description']}" for row in rows
    ]
    return [words_of(text) for text in texts], np.array([int(row["label"]) - 1 for row in rows])


def read_imdb(path: Path) -> Texts:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [words_of(row["text"]) for row in rows], np.array([row["label"] for row in rows])


def read(dataset: str, folder: Path) -> tuple[Texts, Texts]:
    """Training and test texts with their classes."""
    if dataset == "ag-news":
        # Titles with descriptions, and descriptions alone: two subsets of the official split.
        both = [read_ag_news(folder / f"ag_news_{name}train.csv.gz") for name in ("", "desc_")]
        texts = [words for words, _ in both]
        classes = np.concatenate([classes for _, classes in both])
        return (texts[0] + texts[1], classes), read_ag_news(folder / "ag_news_test.csv.gz")
    names = ("imdb_train.jsonl.gz", "imdb_test.jsonl.gz")
    return read_imdb(folder / names[0]), read_imdb(folder / names[1])


def encode(texts: list[list[str]], vocabulary: dict[str, int], length: int) -> Tensor:
    """Token ids [n, length], cut or padded at the end."""
    tokens = torch.full((len(texts), length), PAD)
    for row, words in zip(tokens, texts, strict=True):
        ids = [vocabulary.get(word, UNKNOWN) for word in words[:length]]
        row[: len(ids)] = torch.tensor(ids, dtype=torch.long)
    return tokens


def set_half_steps(model: nn.Module, half_steps: int) -> None:
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.max_iter = half_steps


def train(model: nn.Module, tokens: Tensor, labels: Tensor, epochs: int, half_steps: int) -> None:
    for epoch, index, step in one_cycle(model, len(tokens), BATCH, epochs, rate=1e-3, decay=0.01):
        set_half_steps(model, WARM_UP_HALF_STEPS if epoch < 2 * epochs // 3 else half_steps)
        probabilities, _ = model(tokens[index])
        step(nn.functional.nll_loss(probabilities.clamp_min(1e-9).log(), labels[index]))


def main() -> None:
    parser = arguments(__doc__, 3)
    parser.add_argument("dataset", choices=sorted(TEACHERS))
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = TEACHERS[options.dataset]
    (texts, classes), (test_texts, test_classes) = read(options.dataset, options.data)
    vocabulary = most_frequent(texts, config["vocab_size"])
    tokens = encode(texts, vocabulary, config["seq_len"])
    test_tokens = encode(test_texts, vocabulary, config["seq_len"])
    labels, test_labels = torch.from_numpy(classes), torch.from_numpy(test_classes)
    print(f"{len(tokens)} training texts, {tokens.ne(PAD).double().mean():.0%} of tokens active")

    model = SinkformerText(**config, dropout=0.1)
    set_loop(model, trainable_sinkhorn_attention)
    train(model, tokens, labels, options.epochs, config["max_iter"])
    write_teacher(options.out, model.half(), "sinkformer-text", config)
    (options.out / "vocabulary.txt").write_text("\n".join(["[PAD]", "[UNK]", *vocabulary]) + "\n")
    write_data(options.out, "inputs", tokens[:CALIBRATION], test_tokens, test_labels)
    model.float()  # as the file holds it, in half precision; the loop is the same map
    print(f"test accuracy {accuracy(model, test_tokens, test_labels):.4f}")


if __name__ == "__main__":
    main()
