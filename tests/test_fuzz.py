"""Hostile files and places: the known attacks one by one, and some of those of benchmarks/fuzz.py."""

from __future__ import annotations

import io
import json
import os
import runpy
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from asapc.calibration.stored import load_calibration
from asapc.errors import InputError
from asapc.formats.json_text import parse_json
from asapc.inputs.data import open_data
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import load_recipe
from asapc.inputs.weights import read_state_dict
from asapc.memory import peak
from asapc.models import SinkformerText, SinkformerViT
from asapc.report.gates import load_gates
from asapc.study import load_grid

FUZZ = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"


def refused(action: Callable[[], Any], *parts: str) -> str:
    """The InputError's message; the memory it took is far below what the input asked for."""
    before = peak()
    with pytest.raises(InputError) as caught:
        action()
    assert peak() - before < 600 << 20
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert len(message) < 2500
    return message


def test_some_cases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(FUZZ), "--count", "6", "--seed", "11"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of other tests too
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FUZZ), run_name="__main__")
    told = capsys.readouterr()
    assert ended.value.code == 0 and "6 cases, 0 failures" in told.out, told.err[-3000:]


# --- recipes, gates and grids ---------------------------------------------------------------------

YAML = {
    "aliases": ("a: &a [1, 1]\n" + "".join(f"x{i}: &x{i} [{'*' + ('a' if i == 0 else f'x{i - 1}')}, "
                f"{'*' + ('a' if i == 0 else f'x{i - 1}')}]\n" for i in range(60)), "aliases counted"),
    "cycle": ("seed: &a [*a]", "not valid YAML"),
    "code": ("!!python/object/apply:os.system ['exit 1']", "not valid YAML"),
    "deep": ("seed: " + "[" * 3000, "not valid YAML"),
    "wrong tag": ("seed: !!int x", "not valid YAML"),
    "many digits": ("seed: " + "9" * 5000, "not valid YAML"),
    "sexagesimal": ("seed: " + "1:" * 50000 + "1", "64 bits"),
    "long": ("# " + "x" * 2**18, "bytes are read"),
    "latin": ("seed: é".encode("latin-1"), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "part"), YAML.values(), ids=YAML.keys())
def test_yaml(tmp_path: Path, text: str | bytes, part: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(lambda: load_recipe(path), part)
    if len(text) < 2000:  # others take seconds
        refused(lambda: load_gates(path), part)
        refused(lambda: load_grid(path), part)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.yaml")
    (tmp_path / "calibration").mkdir()
    os.mkfifo(tmp_path / "calibration" / "calibration.json")
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "config.json")
    refused(lambda: load_recipe(tmp_path / "x.yaml"), "not a file")
    refused(lambda: load_calibration(tmp_path / "calibration"), "not a file")
    refused(lambda: load_teacher(str(tmp_path / "model")), "config.json")
    os.mkfifo(tmp_path / "x.npz")
    refused(lambda: open_data(str(tmp_path / "x.npz"), None))


def test_combinations_are_counted_before_they_are_made(tmp_path: Path) -> None:
    many = "[" + ", ".join(map(str, range(1, 51))) + "]"
    block = f"{{ridge: {many}, c_transforms: {many}, seed: {many}, ridge_mode: [risk, direct]}}"
    (tmp_path / "grid.yaml").write_text(f"blocks: [{block}]")
    refused(lambda: load_grid(tmp_path / "grid.yaml"))
    (tmp_path / "recipe.yaml").write_text(f"candidates: [{{ridge: {many}, c_transforms: {many}}}]")
    refused(lambda: load_recipe(tmp_path / "recipe.yaml"), "at most")
    for text in ("pivots: 1000000000000", "slices: 99999999", "features: ['sliced:99999999999']",
                 f"features: ['sliced:{'9' * 5000}']"):  # fmt: skip
        (tmp_path / "recipe.yaml").write_text(text)
        refused(lambda: load_recipe(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize("text", [
    "[" * 10**6, '{"a":' * 10**5, "9" * 5000, '"\\ud800"', b"\xff", b"", '"\ud800"', '{"a": 1} x',
], ids=lambda text: ascii(text)[:12])  # fmt: skip
def test_json(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


# --- models ---------------------------------------------------------------------------------------

TEXT = {"vocab_size": 9, "seq_len": 4, "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8}
VIT = {"image_size": 4, "patch_size": 2, "num_classes": 3, "dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8}
SIZES = [
    *[("sinkformer-text", {key: 10**12}) for key in ("vocab_size", "seq_len", "n_layers", "max_iter")],
    *[("sinkformer-vit", {key: 10**12}) for key in ("image_size", "dim", "depth", "dim_head")],
    ("sinkformer-vit", {"image_size": 10**12, "patch_size": 10**12}),
    ("sinkformer-vit", {"patch_size": 0}), ("sinkformer-text", {"d_model": -8}),
    ("sinkformer-text", {"d_model": 2**70}), ("sinkformer-text", {"d_model": 40000, "d_ff": 40000}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), SIZES, ids=lambda value: str(value)[:40])
def test_sizes_of_a_model_that_its_weights_do_not_have(
    tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    base = TEXT if name == "sinkformer-text" else VIT
    model = SinkformerText(**TEXT) if base is TEXT else SinkformerViT(**VIT)  # type: ignore[arg-type]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name, **base, **change}))
    refused(lambda: load_teacher(str(tmp_path)))


@pytest.mark.parametrize("change", [
    {"shape": [10**12]}, {"shape": [2**40, 2**40]}, {"data_offsets": [0, 10**15]},
    {"data_offsets": [8, 0]}, {"dtype": "X"}, {"dtype": "F4"}, {"shape": [-1]}, {"length": 5},
    {"length": 2**63}, {"shape": [10**12, 0], "data_offsets": [0, 0]},
], ids=str)  # fmt: skip
def test_a_safetensors_header_that_lies(tmp_path: Path, change: dict[str, Any]) -> None:
    """The last one tells the truth: a million million examples without a number."""
    header = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}
    length, data = header.pop("length", None), bytes(header["data_offsets"] != [0, 0] and 8)
    text, path = json.dumps({"x": header}).encode(), tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length or len(text)) + text + data)
    refused(lambda: open_data(str(path), None), *["every example"][: not data])
    if data:
        refused(lambda: read_state_dict(path))


def test_checkpoints_that_are_larger_than_their_file(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"a": torch.ones(1).expand(2**40)}, path)
    refused(lambda: read_state_dict(path), "bytes of tensors")
    torch.save({"a": torch.eye(3).to_sparse()}, path)
    refused(lambda: read_state_dict(path), "dense")
    torch.save({"a": torch.ones(2, device="meta")}, path)
    refused(lambda: read_state_dict(path))
    torch.save({"a": torch.zeros(2**20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(path, "w", 8) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    refused(lambda: read_state_dict(path), "unpack to")
    shared = torch.ones(10)
    torch.save({"a": shared, "b": shared}, path)
    assert len(read_state_dict(path)) == 2


# --- npz ------------------------------------------------------------------------------------------


def npz(path: Path, header: str, *, data: bytes = bytes(64), version: bytes = b"\1\0") -> str:
    length = struct.pack("<H" if version == b"\1\0" else "<I", len(header) + 1)
    content = b"\x93NUMPY" + version + length + header.encode() + b"\n" + data
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", content)
    return str(path)


HEADERS = {
    "huge": "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}",
    "empty items": "{'descr': '|S0', 'fortran_order': False, 'shape': (1000000000000,)}",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "code": "{'descr': __import__('os').system('exit 1'), 'fortran_order': False, 'shape': (1,)}",
    "deep": "{'descr': " + "(" * 500 + ")" * 500 + ", 'fortran_order': False, 'shape': (1,)}",
    "short": "{'descr': '<f4', 'fortran_order': False, 'shape': (15,)}",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_an_npy_header_that_lies(tmp_path: Path, header: str) -> None:
    for version in (b"\1\0", b"\7\0"):
        path = npz(tmp_path / "x.npz", header, version=version)
        refused(lambda: open_data(path, None))  # noqa: B023


# 256 MB, of which the size is refused; of the others any size is, since numpy does not write them.
@pytest.mark.parametrize(
    ("method", "count"),
    [(zipfile.ZIP_DEFLATED, 2**25), (zipfile.ZIP_BZIP2, 2**10), (zipfile.ZIP_LZMA, 2**10)],
)
def test_a_bomb(tmp_path: Path, method: int, count: int) -> None:
    path = tmp_path / "x.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(count, np.int64))
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", buffer.getvalue())
    del buffer
    refused(lambda: open_data(str(path), None))


def test_many_members_that_share_their_bytes(tmp_path: Path) -> None:
    """The directory lists one stored array a thousand times."""
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros(2**17, np.int64))
    content = path.read_bytes()
    start = content.index(b"PK\1\2")
    end = content.index(b"PK\5\6")
    entry = content[start:end]
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1000, 1000, len(entry) * 1000, start, 0)
    path.write_bytes(content[:start] + entry * 1000 + tail)
    refused(lambda: open_data(str(path), None), "unpack to")


def test_data_that_compresses_well_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((1000, 512), np.int64))
    assert open_data(str(tmp_path / "x.npz"), None).examples == 1000
