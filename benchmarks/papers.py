"""Tables of the papers on small models, with seeds; papers.yaml has sizes and the papers' figures.

    python benchmarks/papers.py mnist --work FOLDER        # or sorts, slicers, agnews, lot

--data is that of the examples' train.py. --work keeps every model's figures: a run that was stopped goes
on where it was. papers_TABLE.md in -o is written after each.  One thread; up to half an hour a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rivals import RIVALS, Rival, Softmax
from torch import Tensor, nn
from written import write_whole

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from mnist.train import images
from text.train import encode, read
from trainable_loop import set_loop, trainable_sinkhorn_attention
from training import descend, most_frequent, one_cycle, write_data, write_teacher

import asapc
from asapc import pipeline
from asapc.inputs.data import open_data, split_of
from asapc.inputs.load import load_teacher
from asapc.models import ESPFormerViT, LOTFormerText, SinkformerText, SinkformerViT
from asapc.models.vit import ViT
from asapc.report.evaluate import Measuring
from asapc.report.site_metrics import environment
from asapc.stages.analyse import forward_signature
from asapc.study import MeasuredOn, load_grid, study
from asapc.terminal.progress import SILENT
from asapc.training.settings import RefreshSettings

HERE = Path(__file__).parent
TABLES = yaml.safe_load((HERE / "papers.yaml").read_text(encoding="utf-8"))
SIZES = {name: table["sizes"] for name, table in TABLES.items()}
VIT = TABLES["mnist"]["vit"]
Cells = Mapping[str, Mapping[str, list[float]]]  # shares, by row and column


@cache
def mnist(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with np.load(folder / "mnist.npz") as data:
        labels = (torch.from_numpy(data[name].astype(np.int64)) for name in ("y_train", "y_test"))
        return images(data["x_train"]), next(labels), images(data["x_test"]), next(labels)


@cache
def agnews_tokens(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own, ((texts, labels), (test, test_labels)) = TABLES["agnews"]["text"], read("ag-news", folder)
    vocabulary = most_frequent(texts, own["vocab_size"])
    tokens = (encode(some, vocabulary, own["seq_len"]) for some in (texts, test))
    return next(tokens), torch.from_numpy(labels), next(tokens), torch.from_numpy(test_labels)


@cache
def grey_pixels(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CIFAR-10 in grey, 4 x 4 pixels averaged: 64 tokens from 1 to 255."""
    with np.load(folder / "cifar10_jpeg_subset.npz") as data:
        labels = (torch.from_numpy(data[name].astype(np.int64)) for name in ("y_train", "y_test"))
        grey = (torch.from_numpy(data[name]).float().mean(-1) for name in ("x_train", "x_test"))
        small = (nn.functional.avg_pool2d(img, 4).flatten(1).long().clamp(1, 255) for img in grey)
        return next(small), next(labels), next(small), next(labels)


def scores(model: nn.Module, inputs: Tensor) -> Tensor:
    """Logits, or logarithms of probabilities."""
    if isinstance(model, ViT):
        return model.classify(inputs)[0]
    output = model(inputs)
    return (output[0] if isinstance(output, tuple) else output).clamp_min(1e-9).log()


@torch.no_grad()
def predictions(model: nn.Module, inputs: Tensor) -> Tensor:
    return torch.cat([scores(model.eval(), batch).argmax(-1) for batch in inputs.split(100)])


def share(one: Tensor, other: Tensor) -> float:
    return (one == other).double().mean().item()


def train(
    model: nn.Module, inputs: Tensor, labels: Tensor, epochs: int, seed: int, rate: float,
    batch: int = 100,
) -> None:  # fmt: skip
    own = {"rate": rate, "decay": 0.01, "generator": torch.Generator().manual_seed(seed)}
    for _, index, step in one_cycle(model, len(inputs), batch, epochs, **own):
        step(nn.functional.cross_entropy(scores(model, inputs[index]), labels[index]))


def train_on(model: ViT, img: Tensor, labels: Tensor, epochs: int) -> None:
    """As a refresh trains: Adam at one rate."""
    optimiser = torch.optim.Adam(model.train().parameters(), lr=2e-4)
    for _ in range(epochs):
        for i in torch.randperm(len(img)).split(100):
            descend(model, optimiser, nn.functional.cross_entropy(scores(model, img[i]), labels[i]))


def measured(artifact: Path) -> list[float]:
    """Accuracy and agreement of a compiled model on the test set."""
    measuring, test = Measuring(examples=10**6, fast=True), str(artifact.with_name("test.npz"))
    model = pipeline.report(artifact, test, measuring=measuring, progress=SILENT).to_json()["model"]
    return [model["accuracy_compiled"], model["prediction_agreement"]]


def studied(table: str, folder: Path, grid: Path) -> dict[str, list[float]]:
    """The table's rows of a study of the teacher in the folder, on the test set."""
    teacher, on = load_teacher(str(folder)), MeasuredOn(str(folder / "test.npz"), 10**6, 100)
    known, out = str(folder / "calibration.npz"), folder / "study"
    found = study(teacher, known, load_grid(grid), out, SILENT, measured=on)["rows"]
    wanted = TABLES[table]["studied"].items()
    rows = {name: next(row for row in found if own.items() <= row.items()) for name, own in wanted}
    return {name: [row["accuracy_compiled"], row["prediction_agreement"]] for name, row in rows.items()}


def patches(patch: int, seed: int, folder: Path, data: Path) -> Cells:
    sizes, (img, labels, test_img, test_labels) = SIZES["mnist"], mnist(data)
    config = {**VIT, "dim_head": 32, "max_iter": 5, "patch_size": patch}
    model = SinkformerViT(**config)
    set_loop(model, trainable_sinkhorn_attention)
    train(model, img, labels, sizes["epochs"], seed, 3e-3)
    write_teacher(folder, model, "sinkformer-vit", config)
    img, labels = img[: sizes["known"]], labels[: sizes["known"]]
    write_data(folder, "img", img, test_img, test_labels)
    before = predictions(model, test_img)
    rows = {"Sinkhorn teacher, T = 5": [share(before, test_labels), 1.0]}

    rows |= studied("mnist", folder, HERE / "grids" / "mnist_paper.yaml")

    known, recipe = str(folder / "labelled.npz"), TABLES["mnist"]["recipe"]
    np.savez(known, img=img.numpy(), labels=labels.numpy())
    asapc.compile(str(folder), known, recipe=recipe, out=folder / "asap", examples=100, quiet=True)
    settings = RefreshSettings(labels=True, epochs=sizes["refresh"], batch_size=100, seed=seed)
    pipeline.refresh(folder / "asap", known, settings, folder / "refreshed", progress=SILENT)
    rows["ASAP, refreshed"] = measured(folder / "refreshed")

    batches = open_data(known, forward_signature(load_teacher(str(folder)))).batches(1000)
    splits = [split_of(hash) == "calibration" for batch in batches for hash in batch.hashes]
    train_on(model, img[splits], labels[splits], sizes["refresh"])  # what the refresh saw
    after = predictions(model, test_img)
    rows["teacher, trained on"] = [share(after, test_labels), share(after, before)]
    return {row: {f"patch {patch}": cell} for row, cell in rows.items()}


def sorts(temperature: float, seed: int, folder: Path, data: Path) -> Cells:
    """Soft sorts, a switch to exact ones, and the same after annealing."""
    sizes, (img, labels, test_img, test_labels) = SIZES["sorts"], mnist(data)
    order = torch.randperm(len(img), generator=torch.Generator().manual_seed(seed))
    img, labels = img[order], labels[order]
    config = {**VIT, **TABLES["slicers"]["vit"], "softsort_temperature": temperature}
    model = ESPFormerViT(**config)
    train(model, img, labels, sizes["epochs"], seed, 4e-3)
    write_teacher(folder, model, "espformer-vit", config)
    write_data(folder, "img", img[:1], test_img, test_labels)
    known, few = str(folder / "labelled.npz"), slice(sizes["known"])
    np.savez(known, img=img[few].numpy(), labels=labels[few].numpy())
    rows = {"soft": [share(predictions(model, test_img), test_labels), 1.0]}
    for operator in ("lossless", "esp_hard"):
        recipe, out = {"operator": operator}, folder / operator
        asapc.compile(str(folder), known, recipe=recipe, out=out, examples=100, quiet=True)
    rows["suddenly exact"] = measured(folder / "esp_hard")
    settings = RefreshSettings(labels=True, anneal=True, batch_size=100, seed=seed, **sizes["anneal"])
    pipeline.refresh(folder / "lossless", known, settings, folder / "annealed", progress=SILENT)
    rows["annealed, then exact"] = measured(folder / "annealed")
    return {row: {f"t = {temperature:g}": cell} for row, cell in rows.items()}


def slicers(kind: str, slices: int, tau: float, seed: int, _folder: Path, data: Path) -> Cells:
    sizes, (img, labels, test_img, test_labels) = SIZES["slicers"], mnist(data)
    own = {"slices": None if kind == "axes" else slices, "inverse_temperature": tau}
    model = ESPFormerViT(**{**VIT, **TABLES["slicers"]["vit"], **own})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(kind != "frozen" or "slicer" not in name)
    train(model, img[: sizes["images"]], labels[: sizes["images"]], sizes["epochs"], seed, 4e-3)
    cell = [share(predictions(model, test_img), test_labels)]
    taus = (0.1, 1.0, 10.0) if slices == 1 else (tau,)  # one slice has the weight 1
    return {f"{kind}, tau = {tau:g}": {f"L = {slices}": cell} for tau in taus}


def agnews(kind: str, seed: int, folder: Path, data: Path) -> Cells:
    table, (tokens, labels, test, test_labels) = TABLES["agnews"], agnews_tokens(data)
    sizes, text = table["sizes"], table["text"]
    config = {**text, "max_iter": sizes["half_steps"]}
    model = SinkformerText(**config) if kind == "Sinkhorn" else Rival(RIVALS[kind], **text)
    set_loop(model, trainable_sinkhorn_attention)
    train(model, tokens, labels, sizes["epochs"], seed, sizes["rate"], sizes["batch"])
    before = share(predictions(model, test), test_labels)
    if kind != "Sinkhorn":
        return {kind: {"AG News": [before]}}
    write_teacher(folder, model, "sinkformer-text", config)
    write_data(folder, "inputs", tokens[: sizes["known"]], test, test_labels)
    rows = studied("agnews", folder, HERE / "grids" / "agnews_seeds.yaml")
    return {row: {"AG News": cell} for row, cell in {f"{kind} teacher": [before, 1.0], **rows}.items()}


def lot(name: str, changes: Mapping[str, Any] | None, seed: int, _folder: Path, data: Path) -> Cells:
    """changes: of LOTFormer's settings; None for softmax attention."""
    table, (pixels, labels, test, test_labels) = TABLES["lot"], grey_pixels(data)
    sizes, text = table["sizes"], table["text"]
    rival = changes is None
    model = Rival(Softmax, **text) if rival else LOTFormerText(**text, **{**table["lot"], **changes})
    train(model, pixels, labels, sizes["epochs"], seed, sizes["rate"], sizes["batch"])
    return {name: {"accuracy": [share(predictions(model, test), test_labels)]}}


def shown(values: list[list[float]], seeds: int) -> str:
    """Mean ± standard deviation over seeds of each figure, in percent; how many there are if not all."""
    columns = [[100 * value for value in column] for column in zip(*values, strict=True)]
    means = (f"{np.mean(x):.2f}" + f" ± {np.std(x, ddof=len(x) > 1):.2f}" * (len(x) > 1) for x in columns)
    return " / ".join(means) + (f" (n = {len(values)})" if 0 < len(values) < seeds else "")


def markdown(name: str, results: list[Cells], seeds: int) -> str:
    table, host = TABLES[name], environment(torch.device("cpu"))
    columns = list(dict.fromkeys(c for cells in results for row in cells.values() for c in row))
    heads = " | ".join(f"{column}, {whose}" for column in columns for whose in ("ours", "paper"))
    lines = [f"| | {heads} |", "|---|" + "---:|" * 2 * len(columns)]
    for row in dict.fromkeys(row for cells in results for row in cells):
        ours = (shown([x[row][c] for x in results if c in x.get(row, {})], seeds) for c in columns)
        paper = (table["paper"].get(row, {}).get(column, "") for column in columns)
        pairs = zip(ours, paper, strict=True)
        lines.append(f"| {row} | " + " | ".join(f"{mine} | {theirs}" for mine, theirs in pairs) + " |")
    command = f"`python benchmarks/papers.py {name} --work FOLDER`; torch {host['torch']}, one thread of "
    command += f"{host['processor']}. Mean ± standard deviation over {seeds} seeds. {table['setting']}"
    return "\n\n".join([f"# {table['title']}", command, "\n".join(lines), table["remark"]]) + "\n"


def main() -> None:
    functions: dict[str, Callable[..., Cells]] = {
        "mnist": patches, "sorts": sorts, "slicers": slicers, "agnews": agnews, "lot": lot,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("table", choices=functions)
    parser.add_argument("--work", type=Path, required=True, help="folder, outside the repository")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, results = options.work / options.table, list[Cells]()
    folder.mkdir(parents=True, exist_ok=True)
    for trial, seed in product(TABLES[options.table]["trials"], range(options.seeds)):
        path = folder / f"{'-'.join(map(str, [*trial, seed]))}.json"
        if not path.is_file() or json.loads(path.read_text())["sizes"] != SIZES[options.table]:
            torch.manual_seed(seed)
            with tempfile.TemporaryDirectory(dir=folder) as own:
                cells = functions[options.table](*trial, seed, Path(own), options.data)
            write_whole(path, json.dumps({"sizes": SIZES[options.table], "cells": cells}))
        results.append(json.loads(path.read_text())["cells"])
        text = markdown(options.table, results, options.seeds)
        write_whole(options.out / f"papers_{options.table}.md", text)
    print(text)


if __name__ == "__main__":
    main()
