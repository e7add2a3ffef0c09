"""The command line's ONNX options, and the record of a model.onnx, around stand-ins for the pipeline."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asapc import cli, pipeline
from asapc.errors import InputError
from asapc.inputs.data import Batch
from asapc.inputs.onnx.settings import OnnxSettings, is_unverified, read_record
from asapc.report import Report
from asapc.report.tables import onnx_tables

CONTENT = b"a model"
RECORD: dict[str, Any] = {
    "opset": 18, "bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest(), "float16": False,
    "functions": ["asap"], "tolerance": 1e-4, "largest": 2e-6,
    "shapes": [{"batch": 1, "length": 5}, {"batch": 2, "length": 5}], "skipped": [],
}  # fmt: skip
MANIFEST = {
    "capture": "whole", "sites": [{"name": "layers.0", "operator": "asap", "reason": "r"}], "refused": [],
    "onnx": {"inputs": ["ids"], "outputs": ["logits"]},
}  # fmt: skip


def write(folder: Path, content: bytes | None = CONTENT, **changes: Any) -> Path:
    """model.onnx and its onnx.json."""
    folder.mkdir(exist_ok=True)
    if content is not None:
        (folder / "model.onnx").write_bytes(content)
    (folder / "onnx.json").write_text(json.dumps({**RECORD, **changes}))
    return folder


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `asapc compile` asks for; it writes a model.onnx where asked to, or for an .onnx model."""
    monkeypatch.chdir(tmp_path)
    for place in ("teacher/config.json", "teacher.onnx", "calib/x"):
        Path(place).parent.mkdir(exist_ok=True)
        Path(place).touch()
    seen: list[OnnxSettings | None] = []

    def compile(teacher: str, calibration: str, out: str, *rest: Any, **options: Any) -> Any:
        *_, onnx = rest
        seen.append(onnx)
        if onnx is not None or teacher.endswith(".onnx"):
            write(Path(out))
        return SimpleNamespace(manifest=MANIFEST, selection={})

    monkeypatch.setattr("asapc.inputs.load.load_teacher", lambda model, **_: model)
    monkeypatch.setattr(pipeline, "compile", compile)
    return seen


def call_compile(model: str, *options: str) -> int:
    return cli.main(["compile", model, "--calibration", "calib", "-o", "out", *options])


def words(text: str) -> str:
    """Without the frames and line breaks of a help text."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("teacher", (), None), ("teacher", ("--emit", "onnx"), OnnxSettings()),
        ("teacher", ("--emit", "onnx", "--opset", "20"), OnnxSettings(20)), ("teacher.onnx", (), None),
        ("teacher.onnx", ("--opset", "20"), OnnxSettings(20)),
        ("teacher.onnx", ("--tolerance", "1e-3"), OnnxSettings(tolerance=1e-3)),
    ],
)
def test_options_of_the_file(model, options, expected, asked):
    assert call_compile(model, *options, "-q") == 0
    assert asked == [expected]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("teacher", ("--opset", "20"), "got no --emit onnx"),
        ("teacher.onnx", ("--opset", "17"), "opset must be from 18 to 23, got 17"),
        ("teacher.onnx", ("--emit", "tflite"), "--emit must be onnx, got tflite"),
        ("teacher.onnx", ("--tolerance", "nan"), "tolerance must lie between 0 and 1"),
    ],
)
def test_options_that_are_none(model, options, message, asked, capsys):
    assert call_compile(model, *options) == 2
    assert message in capsys.readouterr().err and not asked


def test_compile_shows_what_was_written(asked, capsys):
    assert call_compile("teacher.onnx") == 0
    out, err = capsys.readouterr()
    assert "1 layer compiled" in out and "ONNX opset 18" in out and "model.onnx" in err
    assert call_compile("teacher.onnx", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {**MANIFEST, "onnx_file": RECORD}
    shutil.rmtree("out")
    assert call_compile("teacher") == 0
    assert "ONNX" not in "".join(capsys.readouterr())
    assert call_compile("teacher", "--json") == 0
    assert json.loads(capsys.readouterr().out) == MANIFEST


def test_a_record_is_of_its_file_only(tmp_path):
    folder = write(tmp_path)
    assert read_record(folder) == RECORD and not is_unverified(folder)
    (folder / "model.onnx").write_bytes(b"another")
    assert read_record(folder) is None and is_unverified(folder)
    (folder / "model.onnx").unlink()
    assert read_record(folder) is None and not is_unverified(folder)
    (folder / "onnx.json").unlink()
    assert read_record(folder) is None


BROKEN: list[dict[str, Any]] = [
    {"functions": 5}, {"functions": [5]}, {"opset": True}, {"opset": 18.0}, {"bytes": 10**400},
    {"bytes": -1}, {"largest": float("nan")}, {"tolerance": float("inf")}, {"largest": False},
    {"float16": 0}, {"sha256": "0" * 63}, {"shapes": [{"batch": 1.5}]}, {"shapes": {}}, {"skipped": [[]]},
]  # fmt: skip


def test_a_broken_record_is_one_message(tmp_path):
    broken = [{**RECORD, **changes} for changes in BROKEN]
    broken += [{k: v for k, v in RECORD.items() if k != key} for key in RECORD]
    for text in ("[]", *map(json.dumps, broken)):
        (tmp_path / "onnx.json").write_text(text)
        with pytest.raises(InputError, match="must be what `asapc export` writes"):
            read_record(tmp_path)
    (tmp_path / "onnx.json").write_text("")
    with pytest.raises(InputError, match="must be readable JSON"):
        read_record(tmp_path)


def test_the_table_says_float16_and_how_many_shapes_were_run():
    shapes = [{"batch": 1, "length": 5}, {"batch": 2}]
    rows = dict(onnx_tables({**RECORD, "float16": True, "shapes": shapes})[0].rows)
    assert rows["float16"] == "yes" and rows["shapes run"] == "2"
    assert dict(onnx_tables(RECORD)[0].rows)["float16"] == "no"


@pytest.mark.parametrize("command", ["bench", "report"])
def test_a_file_that_is_not_the_verified_one_is_told(command, tmp_path, monkeypatch, capsys):
    result = {"model": {}, "sites": [], "gate": {"passed": True}}
    monkeypatch.setattr(pipeline, "bench", lambda *args, **kwargs: result)
    report = Report.from_json(result, "report")
    monkeypatch.setattr(pipeline, "report", lambda *args, **kwargs: report)
    folder, data = write(tmp_path / "my out"), tmp_path / "d.npz"
    for place in (folder / "manifest.json", data):
        place.touch()
    call = [command, str(folder), "--data", str(data)]
    assert cli.main(call) == 0
    assert "verified" not in capsys.readouterr().err
    write(folder, b"another")
    assert cli.main(call) == 0
    told = f"was verified, so it is left out: asapc export '{folder}' --data {data}"
    assert told in words(capsys.readouterr().err)


def test_bench_refuses_a_file_with_other_inputs(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from onnx import TensorProto, helper, save

    from asapc.onnx.bench import bench_onnx
    from asapc.terminal.progress import make_progress

    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 2]) for n in "abc"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "g", values[:2], values[2:])
    opsets = [helper.make_opsetid("", 18)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx")
    artifact: Any = SimpleNamespace(folder=tmp_path)
    with pytest.raises(InputError, match=r"must take the 1 tensors .*, got a, b\n  help: asapc export"):
        bench_onnx(artifact, Batch((torch.ones(3, 2),), {}, None, [0] * 3), 1, make_progress(quiet=True))


@pytest.mark.parametrize("out", [None, "other"])
def test_refresh_tells_that_the_file_is_left_behind(out, tmp_path, monkeypatch, capsys):
    def refresh(artifact: str, *rest: Any, **options: Any) -> dict[str, Any]:
        if out is None:
            (Path(artifact) / "model.onnx").unlink(missing_ok=True)
        return {"best_epoch": 1}

    monkeypatch.setattr(pipeline, "refresh", refresh)
    folder = str(write(tmp_path / "out"))
    data = tmp_path / "d.npz"
    for place in (Path(folder) / "manifest.json", data):
        place.touch()
    options = ["refresh", folder, "--data", str(data), "--distil", *([] if out is None else ["-o", out])]
    assert cli.main(options) == 0
    told = f"the old weights and was left behind; export it again: asapc export {out or folder}"
    assert told in words(capsys.readouterr().err)
    (Path(folder) / "model.onnx").unlink(missing_ok=True)
    assert cli.main(options) == 0
    assert "model.onnx" not in capsys.readouterr().err
