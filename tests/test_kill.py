"""kill -9 before every call of a write that changes a disk: what is left is absent, old or complete.

The folders are then what any kill between that call and the one before would have left.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asapc.calibration.shards import Shards
from asapc.errors import InputError
from asapc.formats import atomic
from asapc.formats.atomic import read_whole
from asapc.inputs.onnx.settings import MODEL, RECORD, read_record
from asapc.terminal.progress import SILENT

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
import onnx
import onnx_ir

from asapc.inputs.onnx.verify import Verified
from asapc.onnx.export import place

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

SIZE = 5000  # of a write, in whatever it counts
# Calls that change a disk, and flushes, which lie between a file's first byte and its last.
CALLS = ((os, "replace"), (os, "rename"), (os, "unlink"), (os, "fsync"), (atomic, "_exchange"))


def armed(last: int) -> list[str]:
    """Notes the names of such calls from now on; before the last one the process is killed."""
    calls: list[str] = []

    def noted(name: str, true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*arguments, **options)

        return call

    for module, name in CALLS:
        setattr(module, name, noted(name, getattr(module, name)))
    return calls


def killed_at(last: int, noted: Path, work: Callable[[], object]) -> None:
    """In a process of its own; where none is the last call, it notes how many there were."""
    worker = os.fork()
    if worker == 0:
        try:
            torch.set_num_threads(1)  # no other thread of this process is there
            calls = armed(last)
            work()
            noted.write_text(str(len(calls)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(worker, 0)


def folder(target: Path, n: int) -> None:
    with atomic.replace_folder(target) as partial:
        (partial / "modules").mkdir()
        save_file({"x": torch.full((SIZE,), float(n))}, partial / "model.safetensors")
        (partial / "modules" / "0.graph.pt2").write_text(f"{n} " * SIZE)
        (partial / "manifest.json").write_text(json.dumps({"number": n}))


def by_two_renames(target: Path, n: int) -> None:
    exchange, atomic._exchange = atomic._exchange, lambda first, second: False
    folder(target, n)
    atomic._exchange = exchange


def file(target: Path, n: int) -> None:
    atomic.replace_file(target, f"{n} " * SIZE)


def part(target: Path, n: int) -> None:
    with Shards(target, {"model": "a"}) as parts:
        parts.put("key", {"x": torch.full((SIZE,), float(n))}, {"number": n})


def number_in_folder(target: Path) -> int:
    def read() -> tuple[int, torch.Tensor, str]:
        try:
            number = json.loads((target / "manifest.json").read_text())["number"]
            x = load_file(target / "model.safetensors")["x"]
            program = (target / "modules" / "0.graph.pt2").read_text()
        except FileNotFoundError as error:
            raise InputError(f"{target}: absent") from error
        return int(number), x, program

    number, x, program = read_whole(target, read)
    assert torch.equal(x, torch.full((SIZE,), float(number)))
    assert program == f"{number} " * SIZE
    return number


def number_in_file(target: Path) -> int:
    if not target.exists():
        raise InputError("absent")
    text = target.read_text()
    assert text == f"{text[0]} " * SIZE
    return int(text[0])


def number_in_part(target: Path) -> int:
    with Shards(target, {"model": "a"}) as parts:
        found = parts.get("key")
        if found is None:
            assert not [*target.glob("[!.]*.safetensors")]  # none was torn
            raise InputError("absent")
    tensors, facts = found
    assert torch.equal(tensors["x"], torch.full((SIZE,), float(facts["number"])))
    return int(facts["number"])


WRITES = {
    folder: number_in_folder, by_two_renames: number_in_folder, file: number_in_file,
    part: number_in_part,
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("old", [None, 1], ids=["nothing there", "an old one"])
def test_a_write_killed(write: Callable[[Path, int], None], old: int | None, tmp_path: Path) -> None:
    """The next write goes through, and clears up what is left."""
    root, noted, seen = tmp_path / "root", tmp_path / "calls", set()

    def left_by(last: int) -> int | None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        if old is not None:
            write(root / "it", old)
        killed_at(last, noted, lambda: write(root / "it", 2))
        try:
            return WRITES[write](root / "it")
        except InputError:
            return None

    assert left_by(0) == 2
    for last in range(1, int(noted.read_text()) + 1):
        seen.add(left_by(last))
        write(root / "it", 3)
        assert WRITES[write](root / "it") == 3
        assert not [path for path in root.rglob(".*") if path.suffix in (".partial", ".previous")]
    assert seen == {old, 2}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file that a reader finds, by its path: not of what a killed run has left aside."""
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    return {name: sha256(p.read_bytes()) for name, p in found.items() if not name.startswith(".")}


TINY = """<ir_version: 10, opset_import: ["" : 18]> g (float[n] x) => (float[n] y) { y = Neg (x) }"""


def test_an_export_killed(tmp_path: Path) -> None:
    """A model.onnx that is there is the old or the new one, and the record is of it or of none."""
    out, before, noted = (tmp_path / name for name in ("out", "before", "calls"))
    before.mkdir()
    (before / MODEL).write_bytes(b"of an earlier export")
    record = {"opset": 18, "bytes": 20, "sha256": sha256(b"of an earlier export"), "float16": False,
              "functions": [], "largest": 0.0, "tolerance": 1.0, "shapes": [], "skipped": []}  # fmt: skip
    (before / RECORD).write_text(json.dumps(record))
    old = digests(before)
    assert read_record(before) == record

    def export() -> None:
        model = onnx_ir.from_proto(onnx.parser.parse_model(TINY))
        place(out, model, lambda path, **_: Verified(1e-4, 0.0, [], []), 1e-4, False, SILENT)

    def left_by(last: int) -> dict[str, str]:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(before, out)
        killed_at(last, noted, export)
        return digests(out)

    new = left_by(0)  # which lives
    assert new != old and set(new) == set(old) and read_record(out) is not None
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    seen = set()
    for last in range(1, int(noted.read_text()) + 1):
        found = left_by(last)
        for name, digest in found.items():
            assert digest in (old[name], new[name]), f"{name} is torn"
        if found.get(RECORD) is not None and read_record(out) is not None:
            assert json.loads((out / RECORD).read_text())["sha256"] == found[MODEL]
        seen.add((found.get(MODEL) == new[MODEL], found.get(RECORD) == new[RECORD]))
    assert {(False, False), (True, False)} <= seen  # before the model's rename, and after it
