"""kill -9 at random points of every kind of write: what is left is absent, old or complete.

Most are killed at their own calls that change a disk, which random times seldom meet: the folders are
then what any kill between that call and the one before would have left.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_text import write_data, write_teacher

from asapc.calibration.shards import Shards
from asapc.errors import InputError
from asapc.formats.atomic import clean_leftovers, read_whole
from asapc.inputs.onnx.settings import MODEL, RECORD, read_record

KILLS = 48
SHARDS, SIZE = 4, 5000  # of a write, in whatever it counts

class Nursery:
    """Imports once; every line of input forks a worker, whose process id is the answer."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py")), str(SHARDS), str(SIZE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert self._answer() == "ready"

    def _answer(self) -> str:
        return self.process.stdout.readline().strip()

    def _say(self, *words: object) -> str:
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def analyse(self, teacher: Path, data: Path) -> None:
        """Once for all commands that are started from now on."""
        assert self._say("analyse", str(teacher), str(data)) == "analysed"

    def start(self, *words: object) -> int:
        return int(self._say(*words))

    def run(self, *words: object) -> None:
        self.wait(self.start(*words))

    def wait(self, worker: int) -> None:
        assert self._say("reap", worker) == "reaped"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    own = Nursery()
    yield own
    own.process.kill()
    own.process.wait()


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


def test_kills_while_writing(nursery: Nursery, quick_disk: Path) -> None:
    root = quick_disk
    chance = random.Random(0)
    counts: Counter[str] = Counter()
    latest = dict.fromkeys(READERS, -1)
    most = 0
    for kill in range(KILLS):
        timed = kill % 4 == 0  # in the middle of whatever it does; the others at one of their own calls
        last = 0 if timed else chance.randrange(1, 30)
        worker = nursery.start("loop", str(root), 1000 * kill, chance.randrange(4), last)
        if timed:
            time.sleep(chance.uniform(0.005, 0.1))
            for name in ("folder", "folder by two renames"):
                if latest[name] >= 0:
                    assert READERS[name](root) >= latest[name]
                    counts["read beside a writer"] += 1
            os.kill(worker, signal.SIGKILL)
        nursery.wait(worker)
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


@pytest.fixture(scope="module")
def work(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a compiled model in out/."""
    folder = tmp_path_factory.mktemp("killed")
    teacher, data = write_teacher(folder / "teacher", n_layers=1), write_data(folder / "data.npz", 300)
    nursery.analyse(teacher, Path(data))
    recipe = "{operator: asap, c_transforms: 1, side: source, features: [norm], max_examples: 40}"
    (folder / "quick.yaml").write_text(recipe)
    nursery.run("asapc", "calibrate", str(teacher), "--data", data, "-o", str(folder / "quick"),
                "--recipe", str(folder / "quick.yaml"), "--quiet")  # fmt: skip
    nursery.run("asapc", "compile", str(teacher), "--calibration", str(folder / "quick"),
                "-o", str(folder / "out"), "--quiet")  # fmt: skip
    assert (folder / "out" / "manifest.json").exists()
    return folder


def test_export_killed(nursery: Nursery, work: Path) -> None:
    """A model.onnx that is there is the old or the new one, and the record is of it or of none."""
    out = work / "exporting" / "out"
    shutil.copytree(work / "out", out)
    arguments = ["export", str(out), "--data", str(work / "data.npz"), "--quiet"]
    (out / MODEL).write_bytes(b"of an earlier export")
    record = {"opset": 18, "bytes": 20, "sha256": sha256(b"of an earlier export"), "float16": False,
              "functions": [], "largest": 0.0, "tolerance": 1.0, "shapes": [], "skipped": []}  # fmt: skip
    (out / RECORD).write_text(json.dumps(record))
    old = digests(out)
    assert read_record(out) == record
    states = work / "states"
    states.mkdir()
    nursery.run("many times", str(out.parent), str(states), arguments)
    left = sorted((p for p in states.iterdir() if p.is_dir()), key=lambda p: int(p.name))
    whole, *cut = [place / out.name for place in left]  # the first is of the command that lives
    new = digests(whole)
    assert new != old and set(new) == set(old) and read_record(whole) is not None
    seen = set()
    for place in cut:
        found = digests(place)
        for name, digest in found.items():
            assert digest in (old[name], new[name]), f"{name} is torn"
        if found.get(RECORD) is not None and read_record(place) is not None:
            assert json.loads((place / RECORD).read_text())["sha256"] == found[MODEL]
        seen.add((found.get(MODEL) == new[MODEL], found.get(RECORD) == new[RECORD]))
    assert {(False, False), (True, False)} <= seen  # before the model's rename, and after it
    assert digests(out) == new
    assert [p.name for p in out.iterdir() if p.name.startswith(".")] == []
