"""Workers for tests/test_kill.py: imports once, and analyses a teacher once; every line of input, a list
in JSON, forks a process whose id is the answer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from known_analyses import analysed_once
from safetensors.torch import save_file

import asapc.onnx.export
import asapc.pipeline
from asapc import cli
from asapc.calibration.shards import Shards
from asapc.formats import atomic
from asapc.inputs.load import load_teacher

SHARDS, SIZE = map(int, sys.argv[1:])
FLUSHES = 2  # calls that are no rename, and yet among those that a command is killed at

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


# --- writing without an end ------------------------------------------------------------------------


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


def loop(root: str, first: int, seed: int, last: int) -> int:
    """Until a signal ends it, its own before its call of the number `last`."""
    armed(last)
    try:
        for n in itertools.count(first):
            for i in range(len(WRITES)):
                WRITES[(i + seed) % len(WRITES)](root, n)
    except BaseException as error:
        Path(root, "error").write_text(repr(error))
    return 1


# --- commands that are killed ----------------------------------------------------------------------


def many_times(folder: str, states: str, arguments: list[str]) -> int:
    """The export up to where its files take their places, and the rest of it often: in one child that
    lives, for each rename in one that is killed before it, and in some at flushes.  What each leaves of
    the folder is copied."""
    owner, true = asapc.onnx.export, asapc.onnx.export.place
    before, record = Path(states, "before"), Path(states, "calls")
    living: list[list[str]] = []

    def branching(*given: Any, **options: Any) -> Any:
        owner.place = true
        shutil.copytree(folder, before)
        lasts = [0]
        while lasts:
            last = lasts.pop(0)
            child = os.fork()
            if child == 0:
                living.append(armed(last))
                return true(*given, **options)
            os.waitpid(child, 0)
            shutil.copytree(folder, Path(states, str(last)))
            if last == 0:
                calls = list(enumerate(json.loads(record.read_text()), 1))
                flushes = [n for n, own in calls if own == "fsync"]
                lasts = [n for n, own in calls if own != "fsync"]
                lasts += random.Random(0).sample(flushes, min(FLUSHES, len(flushes)))
            if lasts:
                shutil.rmtree(folder)
                shutil.copytree(before, folder)
        shutil.rmtree(before)
        return true(*given, **options)

    owner.place = branching
    code = cli.main(arguments)
    for calls in living:  # in the child that nothing killed
        record.write_text(json.dumps(calls))
    return code


def worker(command: str, arguments: list[Any]) -> int:
    if command == "loop":
        return loop(*arguments)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return many_times(*arguments) if command == "many times" else cli.main(arguments)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:  # what is imported on a first call is there for all
        for write in WRITES:
            write(root, 0)
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "reap":
            os.waitpid(arguments[0], 0)
            print("reaped", flush=True)
        elif command == "analyse":
            asapc.pipeline.inspect(load_teacher(arguments[0]), arguments[1])
            print("analysed", flush=True)
        else:
            child = os.fork()
            if child == 0:
                os._exit(worker(command, arguments))
            print(child, flush=True)


if __name__ == "__main__":
    with analysed_once():
        main()
