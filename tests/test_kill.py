"""kill -9 at random points of every kind of write: what is left is absent, old or complete.

Most writers are killed at their own calls that change a disk, which random times seldom meet: the folders
are then what any kill between that call and the one before would have left.
"""

from __future__ import annotations

import json
import os
import random
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

from asapc.calibration.shards import Shards
from asapc.errors import InputError
from asapc.formats.atomic import clean_leftovers, read_whole

KILLS = 50
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
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def _say(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def start(self, *words: object) -> int:
        return int(self._say(*words))

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
