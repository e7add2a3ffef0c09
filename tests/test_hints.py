"""What a run says to do next can be pasted, and what it has written is found from any folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from asapc import cli, pipeline
from asapc.artifact import places_moved
from asapc.errors import InputError
from asapc.formats import places
from asapc.inputs.data import open_data, recorded_data
from asapc.inputs.load import build_factory
from asapc.inputs.onnx.settings import OnnxSettings
from asapc.terminal.hints import command_line
from asapc.terminal.progress import Progress

MODEL = '''
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width=4, title="x"):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        score = self.q(x) @ self.k(x).transpose(1, 2) / 2
        for side in (-1, -2, -1, -2):
            score = score - score.logsumexp(side, keepdim=True)
        return (score.exp() @ self.v(x)).mean(1)
'''
KWARGS = '{"width": 8, "title": "a \\"title\\""}'
WORDS = ["plain", "it's", 'a "quoted" $HOME', "", "back\\slash", "é; rm -rf x", "line\nbreak"]


def test_a_command_line_is_read_back_by_a_shell():
    text = "; ".join(command_line("compile", word, o="out", weights=None, kwargs=word) for word in WORDS)
    seen = "import sys; print(ascii(sys.argv[1:]))"
    script = f"asapc() {{ {shlex.quote(sys.executable)} -c '{seen}' \"$@\"; }}; {text}"
    found = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == [
        ascii(["compile", word, "-o", "out", "--kwargs", word]) for word in WORDS
    ]


def test_a_folder_that_looks_like_an_option_stays_a_folder():
    assert command_line("report", "-out") == "asapc report ./-out"


def hint(err: str) -> str:
    lines = [line.removeprefix("next: ") for line in err.splitlines() if line.startswith("next: ")]
    assert len(lines) == 1, err
    return lines[0]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A factory's model, its weights and its data, in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("hints") / "my work"
    folder.mkdir()
    (folder / "the model.py").write_text(MODEL)
    torch.manual_seed(0)
    state = build_factory(f"{folder / 'the model.py'}:Layer", KWARGS).state_dict()
    weights = {name: 2 * torch.randn_like(tensor) for name, tensor in state.items()}
    save_file(weights, folder / "its weights.safetensors")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).standard_normal((300, 6, 8), np.float32))
    (folder / "recipe.yaml").write_text("operator: asap\nbatch_size: 32\n")
    return folder


class Run:
    """A command in a folder: its exit code and what it printed."""

    def __init__(self, folder: Path, *words: str) -> None:
        out, err = io.StringIO(), io.StringIO()
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with contextlib.chdir(folder), streams[0], streams[1]:
            self.code = cli.main(list(words))
        self.out, self.err = out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def calibrated(work):
    ran = Run(
        work, "calibrate", "the model.py:Layer", "--weights", "its weights.safetensors",
        "--kwargs", KWARGS, "--data", "data.npz", "-o", "my calib", "--recipe", "recipe.yaml",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    return ran


@pytest.fixture(scope="module")
def compiled(work, calibrated):
    """By the hint of calibrate."""
    ran = Run(work, *shlex.split(hint(calibrated.err))[1:])
    assert ran.code == 0 and (work / "my calib.compiled" / "manifest.json").is_file(), ran.err
    return ran


def test_what_compile_says_to_run_next_runs(work, compiled):
    ran = Run(work, *shlex.split(hint(compiled.err))[1:], "--examples", "8", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["model"]["data"] == "data.npz"


def test_recorded_data_is_found_from_any_folder(work, compiled, tmp_path, monkeypatch):
    out, calibration = work / "my calib.compiled", work / "my calib"
    for folder, name in ((out, "manifest.json"), (calibration, "calibration.json")):
        assert json.loads((folder / name).read_text())["data"] == "../data.npz"
    ran = Run(tmp_path, "report", str(out), "--examples", "8", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["model"]["data"] == str(work / "data.npz")
    # On the data of the calibration a report measures the gate split alone.
    assert json.loads(ran.out)["splits"]["gate"] == 8
    monkeypatch.chdir(tmp_path)
    opened: list[Any] = []
    monkeypatch.setattr(pipeline, "write_verified", lambda _, source, *rest: opened.append(source) or {})
    pipeline.export(out, None, OnnxSettings(), Progress())
    assert opened[0].examples == 300
    arguments = (f"{work / 'the model.py'}:Layer", "--weights", str(work / "its weights.safetensors"),
                 "--kwargs", KWARGS, "--calibration", str(calibration), "-o", "elsewhere")  # fmt: skip
    ran = Run(tmp_path, "compile", *arguments)
    assert ran.code == 0, ran.err
    recorded = json.loads((tmp_path / "elsewhere" / "manifest.json").read_text())["data"]
    assert (tmp_path / "elsewhere" / recorded).resolve() == (work / "data.npz").resolve()


def test_data_and_artefact_move_together_and_one_without_the_other_is_told(work, compiled, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(work, moved)
    out = moved / "my calib.compiled"
    manifest = json.loads((out / "manifest.json").read_text())
    assert recorded_data(manifest["data"], out, "report") == str(moved / "data.npz")
    (moved / "data.npz").rename(moved / "renamed.npz")
    ran = Run(tmp_path, "report", str(out))
    assert ran.code == 2 and ran.out == ""
    last = ran.err.splitlines()[-2:]
    assert last[0] == (
        f"asapc: report: the data that {out} was made from must be there, or be named again, got no "
        f"file {moved / 'data.npz'}"
    )
    assert last[1].startswith("  help: pass --data DATA")
    found = str(moved / "renamed.npz")
    assert Run(tmp_path, "report", str(out), "--data", found, "--examples", "8").code == 0


def test_a_refresh_elsewhere_takes_its_places_along(work, compiled, tmp_path):
    again = tmp_path / "refreshed"
    shutil.copy(work / "data.npz", tmp_path / "more.npz")
    ran = Run(tmp_path, "refresh", str(work / "my calib.compiled"), "--data", "more.npz", "--distil",
              "--epochs", "1", "-o", "refreshed")  # fmt: skip
    assert ran.code == 0, ran.err
    manifest = json.loads((again / "manifest.json").read_text())
    assert (again / manifest["data"]).resolve() == (work / "data.npz").resolve()
    assert manifest["refresh"]["data"] == "../more.npz"
    assert shlex.split(hint(ran.err)) == ["asapc", "report", "refreshed", "--data", "more.npz"]


def test_places(tmp_path, monkeypatch):
    here = tmp_path / "a" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    specs = {
        "d.npz": "../d.npz", "../up.safetensors": "../../up.safetensors",
        "gen.py:batches": "../gen.py:batches", "/data/d.npz": "/data/d.npz",
        "/code/gen.py:batches": "/code/gen.py:batches",
        "pkg.module:batches": "pkg.module:batches", "(arrays in memory)": "(arrays in memory)",
    }  # fmt: skip
    for spec, record in specs.items():
        assert places.recorded(spec, "out") == record
        own = places.found(record, "out")
        assert own == spec or os.path.normpath(here / spec) == own
        assert places.moved(record, "out", "deep/er") == places.recorded(spec, "deep/er")
    monkeypatch.chdir(tmp_path)
    assert places.found("../d.npz", "a/here/out") == "a/here/d.npz"
    for name in ("d.npz", "gen.py"):
        (here / name).write_text("def batches(): ...\n")
    assert places.same("a/here/d.npz", str(here / "d.npz"))
    assert places.same("a/here/gen.py:batches", f"{here / 'gen.py'}:batches")
    assert not places.same("a/here/gen.py:batches", "a/here/gen.py:others")
    assert not places.same("a/here/d.npz", "d.npz")


def test_a_manifest_moves_with_all_its_places():
    manifest = {
        "data": "../d.npz", "onnx": {}, "teacher": {"source": "../teacher.onnx", "fingerprint": "f"},
        "refresh": {"data": "/far/e.npz", "earlier": [{"data": "../f.npz"}, {"mode": "distil"}]},
        "sites": [],
    }  # fmt: skip
    moved = places_moved(manifest, "out", "deep/er/out")
    assert moved == {
        "data": "../../../d.npz", "onnx": {},
        "teacher": {"source": "../../../teacher.onnx", "fingerprint": "f"},
        "refresh": {"data": "/far/e.npz", "earlier": [{"data": "../../../f.npz"}, {"mode": "distil"}]},
        "sites": [],
    }  # fmt: skip
    assert places_moved(moved, "deep/er/out", "out") == manifest
    words = {"data": "d.npz", "teacher": {"source": "m.py:build with w.safetensors"}}
    assert places_moved(words, "out", "other/out")["teacher"] == words["teacher"]


def test_a_callable_is_named_again_and_is_the_same_by_any_path(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "my gen.py").write_text("def batches(): ...\n")
    monkeypatch.chdir(tmp_path / "sub")
    specs = ("../my gen.py:batches", f"{tmp_path / 'my gen.py'}:batches")
    near, far = (open_data(spec, None) for spec in specs)
    assert near.fingerprint == far.fingerprint
    with pytest.raises(InputError) as caught:
        recorded_data("../my gen.py:batches", tmp_path / "out", "export")
    assert caught.value.help == f"pass --data {shlex.quote(str(tmp_path / 'my gen.py:batches'))}"
    with pytest.raises(InputError, match="in memory"):
        recorded_data("(batches in memory)", tmp_path / "out", "export")


def test_commands_write_the_same_bytes_in_another_checkout(work, tmp_path):
    """The paths given being relative: nothing of where the folder lies is recorded."""
    files = []
    for name in ("one", "two"):
        folder = tmp_path / name / "deep" if name == "two" else tmp_path / name
        shutil.copytree(work, folder, ignore=lambda *_: {"my calib", "my calib.compiled"})
        arguments = ("the model.py:Layer", "--kwargs", KWARGS, "--data", "data.npz", "-o", "c")
        assert Run(folder, "calibrate", *arguments, "--quiet").code == 0
        files.append((folder / "c" / "calibration.json").read_bytes())
    assert files[0] == files[1]
