"""Train a LOTFormer text classifier on AG News, words as tokens: a teacher to compile to `lot`.

    python examples/lot/train.py --out lot-teacher
    python examples/lot/train.py --out lot-cls-teacher --cls polarised

--data is the folder of examples/text/train.py, whose reading and vocabulary this is. Writes config.json
and model.safetensors in half precision (a MODEL for asapc), vocabulary.txt, calibration.npz, whose texts
come from the training file, and test.npz, whose texts the teacher never saw. Fixed seeds; some five
minutes on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from asapc.models import LOTFormerText

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from text.train import encode, read
from training import accuracy, arguments, most_frequent, one_cycle, write_data, write_teacher

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


def train(model: nn.Module, tokens: Tensor, labels: Tensor, epochs: int) -> None:
    """Every batch is cut to its longest text."""
    lengths = tokens.ne(CONFIG["pad_id"]).sum(-1)
    for _, index, step in one_cycle(model, len(tokens), BATCH, epochs, rate=2e-3, decay=0.01):
        probabilities = model(tokens[index, : int(lengths[index].max().clamp(min=1))])
        step(nn.functional.nll_loss(probabilities.clamp_min(1e-9).log(), labels[index]))


def main() -> None:
    parser = arguments(__doc__, 3)
    parser.add_argument("--cls", choices=("none", "softmax", "polarised"), default="none")
    parser.add_argument("--kernel-size", type=int, default=3, help="of the value convolution")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = {**CONFIG, "cls": options.cls, "kernel_size": options.kernel_size}
    (texts, classes), (test_texts, test_classes) = read("ag-news", options.data)
    vocabulary = most_frequent(texts, CONFIG["vocab_size"])
    tokens = encode(texts, vocabulary, CONFIG["seq_len"])
    test_tokens = encode(test_texts, vocabulary, CONFIG["seq_len"])
    labels, test_labels = torch.from_numpy(classes), torch.from_numpy(test_classes)
    share = tokens.ne(CONFIG["pad_id"]).double().mean()
    print(f"{len(tokens)} training texts, {share:.0%} of tokens active")

    model = LOTFormerText(**config, dropout=0.1)
    train(model, tokens, labels, options.epochs)
    write_teacher(options.out, model.half(), "lotformer-text", config)
    (options.out / "vocabulary.txt").write_text("\n".join(["[PAD]", "[UNK]", *vocabulary]) + "\n")
    write_data(options.out, "inputs", tokens[:CALIBRATION], test_tokens, test_labels)
    model.float()  # as the file holds it, in half precision
    print(f"test accuracy {accuracy(model, test_tokens, test_labels):.4f}")


if __name__ == "__main__":
    main()
