"""kill -9 at random points of every kind of write: what is left is absent, old or complete."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asapc.errors import InputError
from asapc.formats.atomic import clean_leftovers, read_whole
from asapc.formats.calibration import load_calibration
from asapc.formats.shards import Shards
from asapc.models import SinkformerText
from asapc.onnx.settings import MODEL, RECORD, read_record
from asapc.report import Report, json_text, markdown

KILLS = 220
SHARDS = 4

# Imports once; every line of input forks a worker, whose process id is the answer.
NURSERY = """
import itertools, json, os, sys
import torch
from safetensors.torch import save_file
from asapc import cli
from asapc.formats import atomic
from asapc.formats.calibration import Calibration, save_calibration
from asapc.formats.shards import Shards
import asapc.pipeline
import asapc.report

asapc.report._page = lambda report: ("<p>" + report.model.source, None)  # drawing is slow


def calibration(root, n):
    hashes = tuple([n] * 20000)
    own = Calibration(str(n), {}, "whole", {}, str(n), "parallel", hashes)
    save_calibration(f"{root}/calibration", own)


def artifact(root, n, name="artifact"):
    with atomic.replace_folder(f"{root}/{name}") as folder:
        (folder / "modules").mkdir()
        save_file({"x": torch.full((50000,), float(n))}, folder / "model.safetensors")
        (folder / "modules" / "0.graph.pt2").write_text(f"{n} " * 20000)
        (folder / "manifest.json").write_text(json.dumps({"number": n}))


def two_renames(root, n):
    exchange, atomic._exchange = atomic._exchange, lambda first, second: False
    artifact(root, n, "two_renames")
    atomic._exchange = exchange


def report(root, n):
    report = {"model": {"source": str(n)}, "environment": {"padding": [n] * 3000}}
    asapc.report.write_report(f"{root}/reports", asapc.report.Report.from_json(report, "report"))


def shards(root, n):
    with Shards(f"{root}/parts", {"model": "a"}) as parts:
        parts.put(str(n // 1000 % %d), {"x": torch.full((20000,), float(n))}, {"number": n})


def loop(root, first, seed):
    writes = (calibration, artifact, two_renames, report, shards)
    for n in itertools.count(first):
        for i in range(len(writes)):
            writes[(i + seed) %% len(writes)](root, n)


print("ready", flush=True)
for line in sys.stdin:
    command, *arguments = json.loads(line)
    if command == "reap":
        os.waitpid(arguments[0], 0)
        print("reaped", flush=True)
        continue
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        if command == "loop":
            try:
                loop(*arguments)
            except BaseException as error:
                open(f"{arguments[0]}/error", "w").write(repr(error))
                os._exit(1)
        sys.stdout = sys.stderr = open(os.devnull, "w")
        os._exit(cli.main(arguments))
    print(child, flush=True)
""".replace("%d", str(SHARDS)).replace("%%", "%")


class Nursery:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
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

    def kill(self, worker: int) -> None:
        os.kill(worker, signal.SIGKILL)
        assert self._say("reap", worker) == "reaped"

    def wait(self, worker: int) -> None:
        assert self._say("reap", worker) == "reaped"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    own = Nursery()
    yield own
    own.process.kill()
    own.process.wait()


def number_in_calibration(root: Path) -> int:
    own = load_calibration(root / "calibration")
    assert own.teacher == own.data and len(own.seen_hashes) == 20000
    assert set(own.seen_hashes) == {int(own.data)}
    return int(own.data)


def number_in_artifact(root: Path, name: str) -> int:
    folder = root / name

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
    assert torch.equal(x, torch.full((50000,), float(number)))
    assert program == f"{number} " * 20000
    return number


def number_in_report(root: Path, name: str) -> int:
    try:
        text = (root / "reports" / name).read_text()
    except FileNotFoundError as error:
        raise InputError(f"{name}: absent") from error
    written = json_text if name.endswith(".json") else markdown
    number = re.search(r'"source": "(\d+)"|\| model \| (\d+) \|', text)
    assert number is not None
    own = number[1] or number[2]
    document = {"model": {"source": own}, "environment": {"padding": [int(own)] * 3000}}
    whole = written(Report.from_json(document, "report"))
    assert sha256(text.rstrip("\n").encode()) == sha256(whole.rstrip("\n").encode())
    return int(own)


def number_in_shards(root: Path) -> int:
    with Shards(root / "parts", {"model": "a"}) as parts:
        found = [part for key in range(SHARDS) if (part := parts.get(str(key))) is not None]
        assert len(found) == len(list((root / "parts").glob("*.safetensors")))  # none was torn
    for tensors, facts in found:
        assert torch.equal(tensors["x"], torch.full((20000,), float(facts["number"])))
    if not found:
        raise InputError("no shard")
    return max(int(facts["number"]) for _, facts in found)


READERS = {
    "calibration": number_in_calibration,
    "artifact": lambda root: number_in_artifact(root, "artifact"),
    "artifact by two renames": lambda root: number_in_artifact(root, "two_renames"),
    "report.json": lambda root: number_in_report(root, "report.json"),
    "report.md": lambda root: number_in_report(root, "report.md"),
    "shards": number_in_shards,
}


def leftovers(root: Path) -> list[str]:
    names = [path.name for path in root.rglob(".*")]
    return [name for name in names if name.endswith((".partial", ".previous"))]


def test_kills_while_writing(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    chance = random.Random(0)
    counts: Counter[str] = Counter()
    latest = dict.fromkeys(READERS, -1)
    most = 0
    for kill in range(KILLS):
        worker = nursery.start("loop", str(tmp_path), 1000 * kill, chance.randrange(5))
        time.sleep(chance.uniform(0.005, 0.1))
        if kill % 4 == 0:  # a reader beside the writer
            for name in ("calibration", "artifact", "artifact by two renames"):
                if latest[name] >= 0:
                    assert READERS[name](tmp_path) >= latest[name]
                    counts["read beside a writer"] += 1
        nursery.kill(worker)
        assert not (tmp_path / "error").exists(), (tmp_path / "error").read_text()
        left = leftovers(tmp_path)
        most = max(most, len(left))
        counts["killed in the middle of a write" if left else "killed between writes"] += 1
        counts["neither old nor new in place"] += any(n.endswith(".previous") for n in left)
        for name, read in READERS.items():
            try:
                number = read(tmp_path)
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

    for name in ("calibration", "artifact", "two_renames", "parts"):
        clean_leftovers(tmp_path / name)
    for name in ("report.json", "report.md", "junit.xml", "report.html"):
        clean_leftovers(tmp_path / "reports" / name)
    with Shards(tmp_path / "parts", {"model": "a"}) as parts:
        for path in (tmp_path / "parts").glob("*.safetensors"):
            clean_leftovers(path)
        assert parts.keys() == [str(key) for key in range(SHARDS)]
    assert leftovers(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == ["artifact", "calibration", "parts", "reports", "two_renames"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    shape = {"vocab_size": 20, "seq_len": 24, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 8,
             "num_classes": 3, "max_iter": 8}  # fmt: skip
    torch.manual_seed(0)
    (folder / "teacher").mkdir()
    document = {"architecture": "sinkformer-text", **shape}
    (folder / "teacher" / "config.json").write_text(json.dumps(document))
    state = SinkformerText(**shape).state_dict()  # type: ignore[arg-type]
    save_file(state, folder / "teacher" / "model.safetensors")
    np.savez(folder / "data.npz", inputs=np.random.default_rng(0).integers(1, 20, (300, 24)))
    return folder


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


TIMES = ("timings.json", "selection.json")  # no one's to repeat


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file that a reader finds, by its path: not of what a killed run has left aside."""
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    return {
        name: sha256(p.read_bytes()) for name, p in sorted(found.items())
        if p.name not in TIMES and not name.startswith(".")
    }  # fmt: skip


def test_calibrate_killed(nursery: Nursery, work: Path) -> None:
    """The old folder stays whatever happens to the command; at last it ends as if never killed."""
    recipe = (
        "operator: asap\nclosures: 3\nside: source\nbatch_size: 8\nmax_examples: 200\n"
        "features: ['{}:8']\n"
    )

    def arguments(out: Path, name: str) -> list[str]:
        return ["calibrate", str(work / "teacher"), "--data", str(work / "data.npz"), "-o", str(out),
                "--recipe", str(work / name), "--quiet"]  # fmt: skip

    (work / "old.yaml").write_text(recipe.format("coarse"))
    (work / "new.yaml").write_text(recipe.format("sliced"))
    out = work / "calib"
    start = time.monotonic()
    nursery.wait(nursery.start("asapc", *arguments(out, "old.yaml")))
    seconds = time.monotonic() - start
    old = digests(out)
    assert load_calibration(out).sites
    nursery.wait(nursery.start("asapc", *arguments(work / "undisturbed", "new.yaml")))
    new = digests(work / "undisturbed")
    assert old != new
    kept = 0
    for part in (0.3, 0.6, 0.9):
        worker = nursery.start("asapc", *arguments(out, "new.yaml"))
        time.sleep(part * seconds)
        nursery.kill(worker)
        assert digests(out) in (old, new)
        kept += digests(out) == old
    nursery.wait(nursery.start("asapc", *arguments(out, "new.yaml")))
    assert digests(out) == new and load_calibration(out).sites
    hidden = [p.name for p in work.iterdir() if p.name.startswith(".")]
    print(f"calibrate: 3 kills in {seconds:.1f} s each, the old folder was there after {kept}")
    assert hidden == []


@pytest.fixture(scope="module")
def compiled(nursery: Nursery, work: Path) -> Path:
    recipe = "{operator: asap, closures: 1, side: source, features: [norm], max_examples: 40}"
    (work / "quick.yaml").write_text(recipe)
    teacher, data = str(work / "teacher"), str(work / "data.npz")
    nursery.wait(nursery.start("asapc", "calibrate", teacher, "--data", data, "-o", str(work / "quick"),
                               "--recipe", str(work / "quick.yaml"), "--quiet"))  # fmt: skip
    nursery.wait(nursery.start("asapc", "compile", teacher, "--calibration", str(work / "quick"),
                               "-o", str(work / "out"), "--quiet"))  # fmt: skip
    assert (work / "out" / "manifest.json").exists()
    return work / "out"


def killed(
    nursery: Nursery, arguments: list[str], folder: Path, old: dict[str, str], seconds: float
) -> list[dict[str, str]]:
    """What is in the folder after kills at several times, each from the old state on."""
    found = []
    for part in (0.6, 0.95):
        worker = nursery.start("asapc", *arguments)
        time.sleep(part * seconds)
        nursery.kill(worker)
        found.append(digests(folder))
        if found[-1] != old:  # it was through
            return found
    return found


def test_refresh_killed(nursery: Nursery, work: Path, compiled: Path) -> None:
    out = work / "refreshed"
    shutil.copytree(compiled, out)
    old = digests(out)

    def arguments(folder: Path) -> list[str]:
        return ["refresh", str(folder), "--data", str(work / "data.npz"), "--distil", "--epochs", "2",
                "--examples", "32", "--quiet"]  # fmt: skip

    undisturbed = work / "undisturbed refresh"
    shutil.copytree(compiled, undisturbed)
    start = time.monotonic()
    nursery.wait(nursery.start("asapc", *arguments(undisturbed)))
    seconds, new = time.monotonic() - start, digests(undisturbed)
    assert new != old
    for found in killed(nursery, arguments(out), out, old, seconds):
        assert found in (old, new)
    if digests(out) == old:
        nursery.wait(nursery.start("asapc", *arguments(out)))
    assert digests(out) == new
    assert [p.name for p in work.iterdir() if p.name.startswith(f".{out.name}.")] == []


def test_export_killed(nursery: Nursery, work: Path, compiled: Path) -> None:
    """A model.onnx that is there is the old or the new one, and the record is of it or of none."""
    out = work / "exported"
    shutil.copytree(compiled, out)
    data = ["--data", str(work / "data.npz"), "--quiet"]
    nursery.wait(nursery.start("asapc", "export", str(out), "--opset", "18", *data))
    old = digests(out)
    assert read_record(out) is not None
    undisturbed = work / "undisturbed export"
    shutil.copytree(out, undisturbed)
    start = time.monotonic()
    nursery.wait(nursery.start("asapc", "export", str(undisturbed), "--opset", "20", *data))
    seconds, new = time.monotonic() - start, digests(undisturbed)
    assert new != old and set(new) == set(old)
    for found in killed(nursery, ["export", str(out), "--opset", "20", *data], out, old, seconds):
        for name, digest in found.items():
            assert digest in (old[name], new[name]), f"{name} is torn"
        if found.get(RECORD) is not None and read_record(out) is not None:
            assert json.loads((out / RECORD).read_text())["sha256"] == found[MODEL]
    nursery.wait(nursery.start("asapc", "export", str(out), "--opset", "20", *data))
    assert digests(out) == new
    assert [p.name for p in out.iterdir() if p.name.startswith(".")] == []
