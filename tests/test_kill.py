"""kill -9 at random points of every kind of write: what is left is absent, old or complete.

Most are killed at their own calls that change a disk, which random times seldom meet: the folders are
then what any kill between that call and the one before would have left.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asapc.calibration.shards import Shards
from asapc.errors import InputError
from asapc.formats import atomic
from asapc.formats.atomic import clean_leftovers, read_whole
from asapc.inputs.onnx.settings import MODEL, RECORD, read_record
from asapc.terminal.progress import SILENT

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
import onnx
import onnx_ir

from asapc.inputs.onnx.verify import Verified
from asapc.onnx.export import place

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

KILLS = 28
SHARDS, SIZE = 4, 5000  # of a write, in whatever it counts
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


def start(work: Callable[..., object], *arguments: Any) -> int:
    """A process that does this and ends; its id."""
    worker = os.fork()
    if worker == 0:
        try:
            torch.set_num_threads(1)  # no other thread of this process is there
            work(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return worker


def folder(root: str, n: int, name: str = "folder") -> None:
    with atomic.replace_folder(f"{root}/{name}") as partial:
        (partial / "modules").mkdir()
        save_file({"x": torch.full((SIZE,), float(n))}, partial / "model.safetensors")
        (partial / "modules" / "0.graph.pt2").write_text(f"{n} " * SIZE)
        (partial / "manifest.json").write_text(json.dumps({"number": n}))


def two_renames(root: str, n: int) -> None:
    exchange, atomic._exchange = atomic._exchange, lambda first, second: False
    folder(root, n, "two_renames")
    atomic._exchange = exchange


def file(root: str, n: int) -> None:
    atomic.replace_file(f"{root}/file", f"{n} " * SIZE)


def shards(root: str, n: int) -> None:
    with Shards(f"{root}/parts", {"model": "a"}) as parts:
        key = str(n // 1000 % SHARDS)
        parts.put(key, {"x": torch.full((SIZE,), float(n))}, {"number": n})


WRITES = (folder, two_renames, file, shards)


def loop(root: str, first: int, seed: int, last: int) -> None:
    """Until a signal ends it, its own before its call of the number `last`."""
    armed(last)
    try:
        for n in itertools.count(first):
            for i in range(len(WRITES)):
                WRITES[(i + seed) % len(WRITES)](root, n)
    except BaseException as error:
        Path(root, "error").write_text(repr(error))


def number_in_folder(folder: Path) -> int:
    def read() -> tuple[int, torch.Tensor, str]:
        try:
            number = json.loads((folder / "manifest.json").read_text())["number"]
            x = load_file(folder / "model.safetensors")["x"]
            program = (folder / "modules" / "0.graph.pt2").read_text()
        except FileNotFoundError as error:
            raise InputError(f"{folder}: absent") from error
        return int(number), x, program

    # What was read while another run replaced the folder is thrown away: only the last read is one.
    number, x, program = read_whole(folder, read)
    assert torch.equal(x, torch.full((SIZE,), float(number)))
    assert program == f"{number} " * SIZE
    return number


def number_in_file(path: Path) -> int:
    if not path.exists():
        raise InputError("absent")
    text = path.read_text()
    number = text.split()[0]
    assert text == f"{number} " * SIZE
    return int(number)


def number_in_shards(root: Path) -> int:
    with Shards(root / "parts", {"model": "a"}) as parts:
        found = [part for key in range(SHARDS) if (part := parts.get(str(key))) is not None]
        assert len(found) == len(list((root / "parts").glob("*.safetensors")))  # none was torn
    for tensors, facts in found:
        assert torch.equal(tensors["x"], torch.full((SIZE,), float(facts["number"])))
    if not found:
        raise InputError("no shard")
    return max(int(facts["number"]) for _, facts in found)


READERS = {
    "folder": lambda root: number_in_folder(root / "folder"),
    "folder by two renames": lambda root: number_in_folder(root / "two_renames"),
    "file": lambda root: number_in_file(root / "file"),
    "shards": number_in_shards,
}


def leftovers(root: Path) -> list[str]:
    names = [path.name for path in root.rglob(".*")]
    return [name for name in names if name.endswith((".partial", ".previous"))]


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is one: a kill, unlike a power cut, leaves what was not flushed, too."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as place:
        yield Path(place)


def test_kills_while_writing(quick_disk: Path) -> None:
    root = quick_disk
    chance = random.Random(0)
    counts: Counter[str] = Counter()
    latest = dict.fromkeys(READERS, -1)
    most = 0
    for kill in range(KILLS):
        timed = kill % 4 == 0  # in the middle of whatever it does; the others at one of their own calls
        last = 0 if timed else chance.randrange(1, 30)
        worker = start(loop, str(root), 1000 * kill, chance.randrange(4), last)
        if timed:
            time.sleep(chance.uniform(0.005, 0.1))
            for name in ("folder", "folder by two renames"):
                if latest[name] >= 0:
                    assert READERS[name](root) >= latest[name]
                    counts["read beside a writer"] += 1
            os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        assert not (root / "error").exists(), (root / "error").read_text()
        left = leftovers(root)
        most = max(most, len(left))
        counts["killed in the middle of a write" if left else "killed between writes"] += 1
        counts["neither old nor new in place"] += any(n.endswith(".previous") for n in left)
        for name, read in READERS.items():
            try:
                number = read(root)
            except InputError:
                assert latest[name] == -1, f"{name} is gone"
                counts["absent"] += 1
                continue
            assert number >= latest[name]
            counts["new" if number > latest[name] else "old"] += 1
            latest[name] = number
    print(f"{KILLS} kills: {dict(counts)}; at most {most} leftovers at once")
    assert counts["killed in the middle of a write"] > KILLS / 4
    assert min(latest.values()) >= 0 and max(latest.values()) > 1000 * KILLS / 2

    for name in ("folder", "two_renames", "file", "parts"):
        clean_leftovers(root / name)
    with Shards(root / "parts", {"model": "a"}) as parts:
        for path in (root / "parts").glob("*.safetensors"):
            clean_leftovers(path)
        assert parts.keys() == [str(key) for key in range(SHARDS)]
    assert leftovers(root) == []
    assert sorted(os.listdir(root)) == ["file", "folder", "parts", "two_renames"]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file that a reader finds, by its path: not of what a killed run has left aside."""
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    return {name: sha256(p.read_bytes()) for name, p in found.items() if not name.startswith(".")}


TINY = """<ir_version: 10, opset_import: ["" : 18]> g (float[n] x) => (float[n] y) { y = Neg (x) }"""


def test_export_killed(tmp_path: Path) -> None:
    """At each of its calls: a model.onnx that is there is the old or the new one, and the record is of it
    or of none."""
    out, before, noted = (tmp_path / name for name in ("out", "before", "calls"))
    before.mkdir()
    (before / MODEL).write_bytes(b"of an earlier export")
    record = {"opset": 18, "bytes": 20, "sha256": sha256(b"of an earlier export"), "float16": False,
              "functions": [], "largest": 0.0, "tolerance": 1.0, "shapes": [], "skipped": []}  # fmt: skip
    (before / RECORD).write_text(json.dumps(record))
    old = digests(before)
    assert read_record(before) == record

    def export(last: int) -> None:
        calls = armed(last)
        model = onnx_ir.from_proto(onnx.parser.parse_model(TINY))
        place(out, model, lambda path, **_: Verified(1e-4, 0.0, [], []), 1e-4, False, SILENT)
        noted.write_text(json.dumps(calls))

    def left_by(last: int) -> dict[str, str]:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(before, out)
        os.waitpid(start(export, last), 0)
        return digests(out)

    new = left_by(0)  # which lives
    assert new != old and set(new) == set(old) and read_record(out) is not None
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    seen = set()
    for last in range(1, len(json.loads(noted.read_text())) + 1):
        found = left_by(last)
        for name, digest in found.items():
            assert digest in (old[name], new[name]), f"{name} is torn"
        if found.get(RECORD) is not None and read_record(out) is not None:
            assert json.loads((out / RECORD).read_text())["sha256"] == found[MODEL]
        seen.add((found.get(MODEL) == new[MODEL], found.get(RECORD) == new[RECORD]))
    assert {(False, False), (True, False)} <= seen  # before the model's rename, and after it
