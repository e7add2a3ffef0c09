"""Every Triton kernel compiled for sm_90, on a machine without a GPU: registers, spills, shared memory,
instructions.

    python benchmarks/sm90.py -o benchmarks/results/sm90      # a few minutes on two cores

The host code runs on CPU tensors as it would on a GPU's; each launch compiles its kernel by ptxas, which
Triton ships, and is not made. What a kernel computes the interpreter tests; how fast it is no compiler
tells, but one that spills registers is slow, and one that needs more shared memory than there is fails.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from written import write_results

from asapc.kernels.gpu import backward, dual, plan, resident, sinkhorn, stored
from asapc.kernels.gpu.tiles import Scores
from asapc.kernels.loop import Loop, Tail
from asapc.kernels.plan import Task

SHARED_LIMIT = 227 * 1024  # bytes that a block of an H100 may have
DTYPES = (torch.float32, torch.bfloat16)
DIMS = (32, 64, 128)
TOKENS = (65, 197, 1000, 2048)
FACTOR = [1.0, 1.0, 0.0, 0.0]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Built:
    """case: of the call.  kernel: its name.  spilled: bytes of a thread's stack.  an_entry: instructions
    of a thread for an entry of a tile, in the shortest loop with exponentials; 0 where there is none.
    unset: an instruction that reads a uniform register which none has written, "" where there is none.
    waits: how many times products of a warp group are waited for, for each of them; about 1 where ptxas
    has too few registers to let them overlap.
    """

    case: str
    kernel: str
    warps: int
    registers: int
    spilled: int
    shared: int
    an_entry: float
    unset: str
    waits: float


class Sm90:
    """Stands for a driver: what is asked of one before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def told(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread, bytes of its stack)."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", text := told(cubin, "-res-usage"))
    if found is None:
        raise SystemExit(f"sm90.py: cuobjdump tells no usage: {text[:300]}")
    return int(found[1]), int(found[2])


def shortest_loop(cubin: bytes) -> int:
    """Instructions of the shortest loop with exponentials of base 2, 0 where there is none."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", told(cubin, "-sass"), re.MULTILINE)
    code = [(int(place, 16), text) for place, text in lines]
    found = []
    for place, text in code:
        to = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if to is not None and int(to[1], 16) < place:
            body = [other for at, other in code if int(to[1], 16) <= at <= place]
            if any("MUFU.EX2" in other for other in body):
                found.append(len(body))
    return min(found, default=0)


def reads_unset(cubin: bytes) -> str:
    """The first instruction that reads a uniform register before one has written it, else "".

    ptxas 12.8 moves the sums that make addresses of products ahead of what they are sums of, in kernels
    of one warp group: such a kernel reads anywhere, and only sometimes fails.
    """
    written: set[str] = set()
    for text in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", told(cubin, "-sass"), re.MULTILINE):
        instruction = re.sub(r"^@!?U?P\w+\s+", "", text.strip())
        operation, _, rest = instruction.partition(" ")
        operands = [operand.strip() for operand in rest.split(",")]
        to = re.fullmatch(r"UR(\d+)", operands[0]) if re.match(r"U|S2UR|R2UR", operation) else None
        read = [operand for operand in operands[1 if to else 0 :] if "gdesc" not in operand]
        for register in re.findall(r"\bUR\d+\b", " ".join(read)):
            if register not in written:
                return text.strip()
        if to:
            wide = re.search(r"\.64|WIDE", operation)
            written |= {f"UR{int(to[1]) + extra}" for extra in range(2 if wide else 1)}
    return ""


def waits(cubin: bytes) -> float:
    """Waits for products of a warp group for each of them, 0 without any."""
    code = told(cubin, "-sass")
    return round(code.count("WARPGROUP.DEPBAR") / max(1, code.count("HGMMA")), 2)


class Compiling:
    """In place of launches: compiles, and keeps what came of it."""

    def __init__(self) -> None:
        self.case = ""
        self.built: list[Built] = []
        self._known: set[int] = set()

    def launch(self, kernel: JITFunction[Any], grid: Any) -> Callable[..., Any]:
        def compiled(*args: Any, **kwargs: Any) -> None:
            made = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            if id(made) in self._known:
                return
            self._known.add(id(made))
            registers, spilled = usage(made.asm["cubin"])
            warps = made.metadata.num_warps
            entries = kwargs.get("BLOCK_X", 0) * kwargs.get("BLOCK_Y", 0) / (32 * warps)
            an_entry = shortest_loop(made.asm["cubin"]) / entries if entries else 0.0
            self.built.append(
                Built(self.case, made.metadata.name, warps, registers, spilled, made.metadata.shared,
                      round(an_entry, 2), reads_unset(made.asm["cubin"]), waits(made.asm["cubin"]))
            )  # fmt: skip

        return compiled


def points(tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(1, 2, tokens, dim, dtype=dtype)


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A name, and host code that launches kernels."""
    for dtype in DTYPES:
        for dim in DIMS:
            for tokens in TOKENS:
                q = k = v = points(tokens, dim, dtype)
                keep = torch.ones(1, tokens, dtype=torch.bool)
                bias = torch.zeros(1, 2, tokens, tokens, dtype=dtype)
                name = f"{str(dtype).removeprefix('torch.')} N{tokens} D{dim}"
                given_to = {"": (None, None), " masked": (keep, None), " bias": (keep, bias)}
                for what, given in given_to.items():
                    for side, steps in (("row", 4), ("column", 4)):
                        loop = Loop(0.125, steps, side, FACTOR)  # type: ignore[arg-type]
                        yield f"loop {name}{what} {side}", partial(
                            sinkhorn.streaming_loop, Scores(q, k, *given, 0.125), v, None, loop
                        )
                loop = Loop(0.125, 4, "row", FACTOR)
                if tokens <= resident.MOST_KEYS:
                    for what, given in given_to.items():
                        yield f"resident {name}{what}", partial(
                            resident.resident_loop, Scores(q, k, *given, 0.125), v, None, loop
                        )
                else:
                    for what, given in given_to.items():
                        yield f"stored {name}{what}", partial(
                            stored.stored_loop, Scores(q, k, *given, 0.125), v, None, loop
                        )
                yield f"gradients {name}", partial(
                    backward.sinkhorn_backward, v, q, k, v, keep, None, None, loop,
                    Tail(loop.half_steps),
                )
                for features in ("coarse:32", "farthest:32", "gaussian", "sliced:32"):
                    parameters = {
                        "coarse:32": [torch.zeros(2, 32, dim)], "farthest:32": [], "gaussian": [],
                        "sliced:32": [torch.zeros(32, dim)],
                    }[features]  # fmt: skip
                    width = {"coarse:32": 1, "farthest:32": 1, "gaussian": 3, "sliced:32": 32}[features]
                    yield f"dual {features} {name}", partial(
                        dual.dual, q, k, keep, None, parameters, torch.ones(2, width), features, "source",
                        0.125, 5, True,
                    )  # fmt: skip
    yield from edges()
    task = Task.of(None, None, score_multiplier=1.0, half_steps=5, rows_first=True, output_factor=FACTOR)
    for dtype in DTYPES:
        yield f"plan {dtype}", partial(plan.plan, torch.zeros(64, 1, 4, 4, dtype=dtype), task)


def edges() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every width of a resident head, and the fewest and most features; float16, starts, factors."""
    for dtype in (*DTYPES, torch.float16):
        for queries, side in ((65, "row"), (1, "column")):  # the first side and the last
            loop = Loop(0.125, 5, side, [1.0, 0.0, 1.0, -1.0])  # type: ignore[arg-type]
            sizes = [(keys, 32, resident.resident_loop) for keys in (16, 32, 64, 128, 256, 512, 1024)]
            sizes += [(70, dim, sinkhorn.streaming_loop) for dim in (1, 256)]
            for keys, dim, run in sizes:
                q, k = points(queries, dim, dtype), points(keys, dim, dtype)
                keep = torch.ones(1, keys, dtype=torch.bool)
                start = torch.zeros(1, 2, keys if side == "row" else queries)
                name = f"edge {str(dtype).removeprefix('torch.')} N{queries} M{keys} D{dim} {side}"
                yield name, partial(run, Scores(q, k, keep, None, 0.125), k, start, loop)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names have one of these")
    parser.add_argument("-o", "--out", type=Path, help="folder for sm90.{json,md}")
    options = parser.parse_args()
    driver.set_active(Sm90())
    compiling = Compiling()
    JITFunction.__getitem__ = lambda kernel, grid: compiling.launch(kernel, grid)  # type: ignore
    failed = {}
    for name, call in cases():
        if not any(part in name for part in options.only):
            continue
        compiling.case = name
        try:
            call()
        except Exception as error:  # of the compiler: every kernel is tried
            failed[name] = f"{type(error).__name__}: {error}"[:500]
            print(f"{name}: {failed[name]}", file=sys.stderr, flush=True)
    return shown(compiling.built, failed, options.out)


def spread(values: list[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else "-"


def shown(built: list[Built], failed: dict[str, str], out: Path | None) -> int:
    """The table, a row a kernel; 1 where one does not compile, spills or does not fit."""
    bad = [b for b in built if b.spilled or b.shared > SHARED_LIMIT]
    kernels = sorted({b.kernel for b in built})
    lines = [f"### Triton {triton.__version__}, sm_90: {len(built)} kernels, {len(failed)} failed", ""]
    lines += ["| kernel | variants | registers | spilling | shared memory | instructions an entry |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for kernel in kernels:
        own = [b for b in built if b.kernel == kernel]
        registers = [b.registers for b in own]
        lines.append(
            f"| `{kernel}` | {len(own)} | {min(registers)} to {max(registers)} | "
            f"{sum(b.spilled > 0 for b in own)} | at most {max(b.shared for b in own) / 1024:.0f} KiB | "
            f"{spread([b.an_entry for b in own if b.an_entry])} |"
        )
    lines += ["", *(f"- {b.kernel}, {b.case}: {b.spilled} bytes spilled, {b.shared} shared" for b in bad)]
    print("\n".join(lines))
    document = {"triton": triton.__version__, "built": [asdict(b) for b in built], "failed": failed}
    write_results(out, "sm90", json.loads(json.dumps(document)), "\n".join(lines))
    return int(bool(failed or bad))


if __name__ == "__main__":
    sys.exit(main())
