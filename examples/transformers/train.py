"""Train a small BERT with Sinkhorn attention on AG News and save it as transformers does.

    python examples/transformers/train.py --data ../shared/data --out ag-news-bert

OUT then holds the model and its tokenizer (save_pretrained), and the examples to compile it on:
calibration.npz and test.npz. Words are tokens. About a minute on two cores.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from sinkhorn_attention import sinkhorn
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

CLASSES = ("World", "Sports", "Business", "Sci/Tech")
WORDS, LENGTH = 8000, 48
BATCH, EPOCHS, LEARNING_RATE = 64, 2, 2e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with ag_news_*.csv.gz")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not (options.data / "ag_news_train.csv.gz").is_file():
        sys.exit(f"{options.data} has no ag_news_train.csv.gz")
    texts, labels = read(options.data / "ag_news_train.csv.gz")
    tokenizer = words_of(texts)
    train = encoded(tokenizer, texts, labels)
    test = encoded(tokenizer, *read(options.data / "ag_news_test.csv.gz"))

    torch.manual_seed(0)
    AttentionInterface.register("sinkhorn", sinkhorn)
    AttentionMaskInterface.register("sinkhorn", eager_mask)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=len(tokenizer), hidden_size=96, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=192, max_position_embeddings=LENGTH, id2label=dict(enumerate(CLASSES)),
        label2id={name: number for number, name in enumerate(CLASSES)}, pad_token_id=0,
        attn_implementation="sinkhorn",
    ))  # fmt: skip
    fit(model, train)
    print(f"test accuracy {accuracy(model, test):.4f}")

    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    calibration = {key: value[:1000] for key, value in train.items()}
    for name, part in (("calibration", calibration), ("test", test)):
        np.savez_compressed(options.out / f"{name}.npz", **{k: v.numpy() for k, v in part.items()})


def read(path: Path) -> tuple[list[str], list[int]]:
    """Texts and their classes, 0 to 3."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [row.get("text") or f"{row['title']} {row['description']}" for row in rows]
    return texts, [int(row["label"]) - 1 for row in rows]


def words_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of the most frequent words."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    counts = Counter(word for text in texts for word, _ in split.pre_tokenize_str(text.lower()))
    words = ["[PAD]", "[UNK]", *(word for word, _ in counts.most_common(WORDS))]
    plain = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    plain.normalizer, plain.pre_tokenizer = normalizers.Lowercase(), split
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", model_max_length=LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def encoded(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], labels: list[int]
) -> dict[str, Tensor]:
    found = tokenizer(
        texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    return {
        "input_ids": found["input_ids"], "attention_mask": found["attention_mask"],
        "labels": torch.tensor(labels),
    }  # fmt: skip


def fit(model: BertForSequenceClassification, data: dict[str, Tensor]) -> None:
    steps = EPOCHS * (len(data["labels"]) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps)
    model.train()
    for step in range(steps):
        if step % (steps // EPOCHS) == 0:
            order = torch.randperm(len(data["labels"]))
        rows, order = order[:BATCH], order[BATCH:]
        optimizer.zero_grad()
        loss = model(**{key: value[rows] for key, value in data.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}")
    model.eval()


@torch.no_grad()
def accuracy(model: BertForSequenceClassification, data: dict[str, Tensor]) -> float:
    right = 0
    for start in range(0, len(data["labels"]), 256):
        part = {key: value[start : start + 256] for key, value in data.items()}
        right += int((model(**part).logits.argmax(-1) == part["labels"]).sum())
    return right / len(data["labels"])


if __name__ == "__main__":
    main()
