"""Several processes of one command: what they exchange, and the same fits as one process makes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_text import write_data, write_teacher
from steps import run

from asapc.calibration import distill, stream
from asapc.processes import ALONE, joined

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

LEAST_SQUARES = {"operator": "asap", "features": ["coarse:4", "sliced:2"]}
# Processes, recipe, options.
FITS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "least squares of both duals, layer by layer": (3, {"operator": "asap", "c_transforms": 0,
        "side": "both", "features": ["norm", "lse"], "coefficients": "pooled"}, ["--sequential"]),
    "KL": (2, {"operator": "asap", "fit": "kl", "features": ["coarse:4"]}, []),
    "distilled": (2, {"operator": "lot", "pivots": 4}, []),
    "shared, more processes than batches": (2, {"operator": "asap", "coefficients": "shared",
        "features": ["coarse:4"], "batch_size": 48}, []),
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells each of them."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def in_processes(size: int, work: Callable[[], Any]) -> list[Any]:
    """What `work` gives in each of so many processes, in the order of ranks."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ends = [context.Pipe(duplex=False) for _ in range(size)]

    def one(rank: int) -> None:
        os.environ.update(environment(rank, size, port))
        torch.set_num_threads(1)
        ends[rank][1].send(work())

    children = [context.Process(target=one, args=(rank,)) for rank in range(size)]
    for child in children:
        child.start()
    try:
        found = [
            mine.recv() if mine in wait([mine, child.sentinel], 120) else None
            for child, (mine, _) in zip(children, ends, strict=True)
        ]
    finally:
        for child in children:
            child.join(10)
            child.kill()
    return found


def in_one_and_in_two(folder: Path, command: Callable[[Path], int]) -> list[Path]:
    """What the command writes in one process, and in two."""
    outs = [folder / "one", folder / "two"]
    assert command(outs[0]) == 0 and in_processes(2, lambda: command(outs[1])) == [0, 0]
    return outs


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    write_teacher(folder / "teacher", n_layers=2)
    write_data(folder / "data.npz", 160)
    return folder


def calibrated(work: Path, recipe: dict[str, Any], out: Path, *options: str) -> int:
    path, part = out.with_suffix(".yaml"), out.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"batch_size": 5, "max_examples": 48, "selection_examples": 16, **recipe}))
    part.replace(path)  # in one step: another process may be reading it
    return run("calibrate", work / "teacher", "--data", work / "data.npz", "-o", out, "--recipe", path,
               *options)  # fmt: skip


def assert_same(out: Path, reference: Path) -> None:
    """Coefficients alike to the last digit of float32, everything else alike."""
    found, wanted = (load_file(next(folder.glob("*.safetensors"))) for folder in (out, reference))
    assert found.keys() == wanted.keys() and len(wanted) > 1
    for name, tensor in wanted.items():
        if tensor.is_floating_point():
            scale = float(tensor.abs().max())
            torch.testing.assert_close(found[name], tensor, rtol=2e-7, atol=2e-7 * scale, msg=name)
        else:
            assert sorted(found[name].flatten().tolist()) == sorted(tensor.flatten().tolist())
    left = sorted(path.name for path in out.parent.glob(f".{out.name}*"))
    assert left == []


def test_a_group_of_its_own_where_the_models_code_has_one() -> None:
    def work() -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        with joined() as processes:
            found = [facts for _, facts in processes.exchanged(({}, processes.rank))]
        return found, dist.is_initialized(), dist.get_world_size()

    assert in_processes(2, work) == [([0, 1], True, 2)] * 2


def test_alone_nothing_is_exchanged() -> None:
    with joined() as processes:
        assert processes is ALONE and processes.exchanged(({}, 1)) == [({}, 1)]
        assert list(processes.share([1, 2])) == [1, 2] and processes.least(3) == 3


@pytest.mark.parametrize("name", FITS)
def test_the_same_fits(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(distill, "STEPS", 5)
    size, recipe, options = FITS[name]
    assert calibrated(work, recipe, tmp_path / "one", "--quiet", *options) == 0
    command = lambda: calibrated(work, recipe, tmp_path / "all", "--quiet", *options)  # noqa: E731
    assert in_processes(size, command) == [0] * size
    assert_same(tmp_path / "all", tmp_path / "one")


@pytest.fixture(scope="module")
def compiled(work: Path) -> Path:
    """LOT is distilled from little, so that outputs differ visibly."""
    recipe = {"operator": "asap", "features": ["norm"], "batch_size": 5}
    assert calibrated(work, recipe, work / "calibration", "--quiet") == 0
    given = (work / "teacher", "--calibration", work / "calibration", "-o", work / "compiled")
    assert run("compile", *given, "--quiet") == 0
    return work / "compiled"


def without_times(value: Any) -> Any:
    """A report without what is measured with a clock, numbers to nine digits."""
    if isinstance(value, dict):
        timed = ("latency", "speedup", "fit_seconds", "break_even", "environment", "seconds", "generated")
        return {k: without_times(v) for k, v in value.items() if not k.startswith(timed)}
    if isinstance(value, list):
        return [without_times(v) for v in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_the_same_report(compiled: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(compiled, tmp_path / name)
    outs = in_one_and_in_two(tmp_path, lambda out: run("report", out, "--fast", "--quiet"))
    assert all((out / "junit.xml").is_file() for out in outs)
    one, several = (without_times(json.loads((out / "report.json").read_text())) for out in outs)
    assert several == one and one["model"]["output_rel_l2"] > 1e-4
    assert len(one["sites"]) > 1 and one["model"]["examples"] > 3


def test_a_gate_fails_in_all_with_one_message(compiled: Path, tmp_path: Path) -> None:
    shutil.copytree(compiled, tmp_path / "out")
    (tmp_path / "gate.yaml").write_text("output_rel_l2: {max: 1.0e-12}\n")

    def report() -> int:
        with (tmp_path / f"messages.{os.environ['RANK']}").open("w") as file, redirect_stderr(file):
            return run("report", tmp_path / "out", "--gate", tmp_path / "gate.yaml", "--fast", "--quiet")

    assert in_processes(2, report) == [1, 1]
    said = [(tmp_path / f"messages.{rank}").read_text() for rank in (0, 1)]
    assert "output_rel_l2" in said[0] and said[1] == ""


def test_the_same_study(work: Path, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text("blocks: [{features: [[norm]], max_examples: 32}, {half_steps: 3}]")
    given = ("study", work / "teacher", "--data", work / "data.npz", "--grid", grid, "--batch-size", 8)
    outs = in_one_and_in_two(tmp_path, lambda out: run(*given, "-o", out, "--quiet"))
    rows = [json.loads((out / "study.json").read_text())["rows"] for out in outs]
    assert len(rows[0]) == 2
    for one, other in zip(*rows, strict=True):
        assert other["features"] == one["features"]
        for key in ("attention_rel_l2", "output_rel_l2", "prediction_agreement"):
            assert other[key] == pytest.approx(one[key], rel=1e-6)


def test_the_same_training(compiled: Path, work: Path, tmp_path: Path) -> None:
    given = ("refresh", compiled, "--data", work / "data.npz", "--distil", "--epochs", 2)
    outs = in_one_and_in_two(tmp_path, lambda out: run(*given, "--batch-size", 7, "-o", out, "--quiet"))
    weights = [load_file(out / "model.safetensors") for out in outs]
    entries = [json.loads((out / "manifest.json").read_text())["refresh"] for out in outs]
    assert entries[0]["best_epoch"] > 0 and entries[1]["parameters"] == entries[0]["parameters"]
    assert entries[1]["after"]["loss"] == pytest.approx(entries[0]["after"]["loss"], rel=1e-3)
    before, moved = load_file(compiled / "model.safetensors"), 0
    for name, one in weights[0].items():
        other = weights[1][name]
        if one.is_floating_point():
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=name)
        moved += name not in before or not torch.equal(before[name], one)
    assert moved > 2


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "asapc"]


def test_torchrun_ends_with_one_message(work: Path, tmp_path: Path) -> None:
    """Of what is wrong for all of them."""
    arrays = dict(np.load(work / "data.npz"))
    broken = {**arrays, "inputs": arrays["inputs"].copy()}
    broken["inputs"][:, 0] = 10**6  # no such token
    np.savez(tmp_path / "broken.npz", **broken)
    command = ["calibrate", str(work / "teacher"), "--data", str(tmp_path / "broken.npz"), "-o",
               str(tmp_path / "out"), "--quiet"]  # fmt: skip
    done = subprocess.run(
        [*TORCHRUN, *command], capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    assert len([line for line in done.stderr.splitlines() if line.startswith("asapc: ")]) == 1
    assert not (tmp_path / "out").exists()


def test_other_commands_run_alone(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ.update(environment(0, 2, free_port()))
    try:
        assert run("inspect", work / "teacher") == 2
    finally:
        for name in environment(0, 2, 0):
            del os.environ[name]
    assert "this command runs in one process, got 2, started by torchrun" in capsys.readouterr().err


def test_a_killed_process_ends_all_and_the_next_call_goes_on(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "ASIDE_EVERY", 0.0)
    monkeypatch.setattr(stream, "ASIDE_SHARE", 1e9)
    recipe, true = LEAST_SQUARES, stream.take_in
    assert calibrated(work, recipe, tmp_path / "one", "--quiet") == 0

    def counted(kill_at: int) -> tuple[int, int]:
        """The exit code, and the batches taken in; after that many, one process is killed."""
        batches = 0

        def take_in(*given: Any) -> None:
            nonlocal batches
            true(*given)
            batches += 1
            if batches == kill_at and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

        stream.take_in = take_in
        with (tmp_path / f"messages.{os.environ['RANK']}").open("w") as file, redirect_stderr(file):
            return calibrated(work, recipe, tmp_path / "all", "--quiet"), batches

    ended, killed = in_processes(2, lambda: counted(3))
    assert ended[0] == 2 and killed is None
    message = (tmp_path / "messages.0").read_text()
    assert message.startswith("asapc: every process must finish, got rank 1 has ended")
    assert not (tmp_path / "all").exists()
    again = in_processes(2, lambda: counted(0))
    assert again == [(0, 0), (0, 3)]  # of 5 each: the first had put all aside, the second two
    assert_same(tmp_path / "all", tmp_path / "one")
