"""Compiling an ONNX teacher edits its own file: attention is replaced, everything else stays."""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from steps import run as call
from torch.export import Dim

import asapc
from asapc.inputs.load import load_teacher

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
import onnx
import onnx_ir
import small_text
from onnx import numpy_helper

from asapc.errors import InputError, VerificationError
from asapc.inputs.data import Batch
from asapc.inputs.onnx.module import value_nodes
from asapc.inputs.onnx.session import open_session, run
from asapc.inputs.onnx.settings import DOMAIN, read_record
from asapc.inputs.onnx.verify import verify
from asapc.onnx import edit, export
from asapc.passes.capture import capture
from asapc.terminal.progress import make_progress

# Of one family of features: the exporter takes seconds for most, and test_onnx_out.py goes through them.
RECIPE = "operator: asap\nfeatures: ['norm']\nside: target\nc_transforms: 1\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PyTorch teacher, the same as teacher.onnx, data, and a calibration of the latter."""
    place = tmp_path_factory.mktemp("edit")
    small_text.write_teacher(place / "teacher", n_layers=1, max_iter=2)
    small_text.write_data(place / "data.npz", 120)
    model = load_teacher(str(place / "teacher")).model
    ids = torch.randint(1, 40, (3, 12))
    ids[0, 7:] = 0
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(
            model, (ids,), place / "teacher.onnx", dynamo=True, input_names=["inputs"],
            dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},), external_data=False,
        )  # fmt: skip
    (place / "recipe.yaml").write_text(RECIPE)
    settings = ("--data", place / "data.npz", "--recipe", place / "recipe.yaml")
    out = place / "teacher.onnx.calibration"
    assert call("calibrate", place / "teacher.onnx", *settings, "-o", out, "-q") == 0
    return place


@pytest.fixture(scope="module")
def out(folder: Path) -> Path:
    calibration = folder / "teacher.onnx.calibration"
    written = folder / "out"
    settings = ("--calibration", calibration, "-o", written, "-q")
    assert call("compile", folder / "teacher.onnx", *settings) == 0
    return written


def test_what_is_not_attention_stays_as_it_is(folder: Path, out: Path) -> None:
    before, after = onnx.load(folder / "teacher.onnx"), onnx.load(out / "model.onnx")
    assert [own.name for own in after.graph.input] == [own.name for own in before.graph.input]
    assert [own.name for own in after.graph.output] == [own.name for own in before.graph.output]
    old = {node.name: node for node in before.graph.node}
    kept = [node for node in after.graph.node if node.name in old]
    assert len(kept) > 10 and all(node.op_type == old[node.name].op_type for node in kept)
    new = [node for node in after.graph.node if node.name not in old]
    assert all(node.name.startswith("asapc_") for node in new)
    calls = [node.op_type for node in new if node.domain == DOMAIN]
    assert calls.count("asap") + calls.count("asap_attention") == 1
    removed = [node for name, node in old.items() if name not in {own.name for own in kept}]
    assert {"Log", "Exp"} & {node.op_type for node in removed}  # the loops
    weights = {own.name: own for own in before.graph.initializer}
    same = [own for own in after.graph.initializer if own.name in weights]
    assert same and all(own.raw_data == weights[own.name].raw_data for own in same)


def test_the_edited_file_is_the_compiled_model(folder: Path, out: Path) -> None:
    record = read_record(out)
    assert record is not None and record["largest"] <= 1e-4 and len(record["shapes"]) > 3
    model, session = asapc.load(out), open_session(out / "model.onnx")
    assert all(weight.requires_grad for weight in model.parameters())
    ids = torch.randint(1, 40, (4, 9))
    ids[2, 3:] = 0
    with torch.no_grad():
        ours = torch.utils._pytree.tree_leaves(model(ids))
    theirs = run(session, {"inputs": ids})
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) < 1e-5
    assert call("report", out, "-q", "--examples", 16, "--fast") == 0
    report = json.loads((out / "report.json").read_text())
    assert report["model"]["source"].endswith("teacher.onnx") and report["model"]["examples"] == 16
    assert 0 < report["sites"][0]["metrics"]["attention_rel_l2"] < 1


def test_the_first_value_that_differs_is_one_of_the_file(folder: Path, tmp_path: Path) -> None:
    """The program's nodes have names of their own."""
    teacher = load_teacher(str(folder / "teacher.onnx"))
    ids = torch.randint(1, 40, (3, 12))
    captured = capture(teacher.model, (ids,), {}).programs[0].graph
    known = {node.name: [name] for name, node in value_nodes(captured, teacher.model).items()}
    model = onnx.load(folder / "teacher.onnx")
    last = next(node for node in model.graph.node if "linear.bias" in node.input)
    bias = next(own for own in model.graph.initializer if own.name == "linear.bias")
    spoilt = numpy_helper.to_array(bias).copy()
    spoilt[0] += 0.5  # of all entries alike the log-softmax would take no notice
    bias.CopyFrom(numpy_helper.from_array(spoilt, bias.name))
    onnx.save(model, tmp_path / "spoilt.onnx")
    batch, quiet = Batch((ids,), {}, None, [0] * 3), make_progress(quiet=True)
    with pytest.raises(VerificationError, match=rf"first in {re.escape(last.output[0])}: \d"):
        verify(tmp_path / "spoilt.onnx", captured, ["inputs"], [batch], 1e-4, quiet, known)


def test_a_file_that_cannot_be_cut_is_written_anew(
    folder: Path, out: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def refuse(*arguments: object) -> None:
        raise InputError("a value to cut at", got="none")

    monkeypatch.setattr(edit, "edited_model", refuse)
    ends = []

    def onnx_model(exported: object, opset: int, names: object) -> onnx_ir.Model:
        ends.append(names)
        return onnx_ir.load(out / "model.onnx")  # without the exporter's seconds

    monkeypatch.setattr(export, "onnx_model", onnx_model)
    calibration = folder / "teacher.onnx.calibration"
    arguments = ("--calibration", calibration, "-o", tmp_path / "out")
    assert call("compile", folder / "teacher.onnx", *arguments) == 0
    assert "writing the whole program anew" in capsys.readouterr().err
    graph = onnx.load(folder / "teacher.onnx").graph
    assert ends == [tuple([own.name for own in of] for of in (graph.input, graph.output))]
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert {own.domain for own in model.functions} == {DOMAIN}


def test_the_opset_that_was_asked_for(folder: Path) -> None:
    teacher = onnx.load(folder / "teacher.onnx")
    own = next(opset.version for opset in teacher.opset_import if opset.domain == "")
    assert edit.of_opset(teacher, None) is teacher is edit.of_opset(teacher, own)
    newer = edit.of_opset(teacher, own + 1)
    assert next(opset.version for opset in newer.opset_import if opset.domain == "") == own + 1
    onnx.checker.check_model(newer, full_check=True)
