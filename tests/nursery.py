"""Workers for tests/test_kill.py: imports once; every line of input, a list in JSON, forks a process
whose id is the answer.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asapc.calibration.shards import Shards
from asapc.formats import atomic

SHARDS, SIZE = map(int, sys.argv[1:])

# Calls that change a disk, and flushes, which lie between a file's first byte and its last.
CALLS = ((os, "replace"), (os, "rename"), (os, "unlink"), (os, "fsync"), (atomic, "_exchange"))


def armed(last: int) -> None:
    """Before so many such calls, counted from now on, the process is killed."""
    numbers = itertools.count(1)

    def counted(true: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(numbers) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*arguments, **options)

        return call

    for module, name in CALLS:
        setattr(module, name, counted(getattr(module, name)))


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
        else:
            child = os.fork()
            if child == 0:
                os._exit(loop(*arguments))
            print(child, flush=True)


if __name__ == "__main__":
    main()
