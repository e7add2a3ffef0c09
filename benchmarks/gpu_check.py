"""All that is to be known of a GPU, in one run of at most eight minutes: parity, the demo, speed.

    make gpu-check                          # on a machine with a GPU; writes benchmarks/results/gpu

Needs Python 3.12, torch 2.11, triton 3.6 and pytest (with xdist) or newer, a C compiler for Triton's
launchers, and the packages of NEEDED. Nothing is fetched: this checkout's modules are copied into a
folder of their own, with the wheels of `.wheels/`, which `make gpu-wheels` gathers on a machine with a
network. Every step is a process with a limit, and a step that fails or runs out of time does not take
the others along: gpu_check.json says which did, and the exit code. What steps print goes to
gpu_check.log as they print it, and results are written whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from written import write_whole

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("loops", "features", "plan", "stream")
NEEDED = (
    "numpy", "scipy", "safetensors", "psutil", "yaml", "typer", "rich", "pydantic", "annotated_types",
    "onnx", "pytest", "xdist",
)  # fmt: skip
PARTS = {"asapc": "asapc", "passes": "asapc/passes", "calibration": "asapc/calibration"}  # as installed
TAIL = 1500  # characters of what a step printed
KERNELS = 75.0  # seconds for compiling them
LEAST = 10.0  # seconds that a step is begun with


@dataclass(frozen=True)
class Step:
    """minutes: at most.  arguments: of this Python."""

    name: str
    minutes: float
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    name: str
    seconds: float
    outcome: str
    tail: str


def script(name: str, of: str, minutes: float, out: Path, *arguments: str) -> Step:
    """benchmarks/<of>.py"""
    return Step(name, minutes, (str(ROOT / "benchmarks" / f"{of}.py"), *arguments, "-o", str(out / name)))


def attention(name: str, minutes: float, out: Path, *arguments: str) -> Step:
    return script(name, "attention", minutes, out, *arguments, "--max-memory", "20")


def steps(out: Path) -> list[Step]:
    """In the order of what is to be known first; their limits add up to the eight minutes."""
    tests = [str(ROOT / "tests" / f"test_gpu_{name}.py") for name in TESTS]
    tests.append(str(ROOT / "tests" / "test_graphed.py"))
    # What matters most comes first: a step that is cut off has written what it had.
    bf16, one = ("--dtype", "bfloat16"), ("--batch", "1", "--heads", "8", "--head-dim")
    workers = str(max(1, min(14, (os.cpu_count() or 1) - 2)))  # kernels are compiled on the CPU
    return [
        Step("parity", 1.7, ("-m", "pytest", "-q", "-s", "-n", workers, "-p", "no:cacheprovider", "-p",
                             "gpu_worker", *tests)),
        attention("bf16_D64", 0.8, out, *bf16, *one, "64", "--tokens", "4096", "512", "1024", "16384"),
        script("blocks", "gpu_blocks", 1.0, out),
        attention("compiled", 0.6, out, *bf16, *one, "64", "--tokens", "512", "4096", "--compile"),
        attention("bf16_dims", 0.6, out, *bf16, *one, "40", "80", "128", "256", "--tokens", "4096"),
        attention("fp32_D64", 0.4, out, *one, "64", "--tokens", "512", "4096"),
        Step("demo", 1.1, ("-m", "asapc", "demo", "--example", "digits", "--device", "cuda",
                           "-o", str(out / "digits"))),
        # Torch's own operators: whether they need kernels of ours.
        script("lot", "lot", 0.2, out, "--tokens", "1024", "16384", "131072"),
        script("esp_4096", "esp", 0.2, out, "--tokens", "4096", "--repeats", "3", "--temperature", "0.1"),
    ]  # fmt: skip


def installed(into: Path) -> dict[str, str]:
    """The environment in which this checkout's package is found, and what is in .wheels/."""
    here = f"-cp{sys.version_info.major}{sys.version_info.minor}-"
    for wheel in sorted((ROOT / ".wheels").glob("*.whl")):
        if any(tag in wheel.name for tag in ("py3-none-any", "-abi3-", here)):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
    for source, place in PARTS.items():
        shutil.copytree(ROOT / source, into / place, ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = into / f"asapc-{project['version']}.dist-info"
    metadata.mkdir()
    version = project["version"]
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: asapc\nVersion: {version}\n")
    with (metadata / "entry_points.txt").open("w") as listing:  # torch.compile finds its backends there
        for group, points in project["entry-points"].items():
            lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
            listing.write("\n".join(lines) + "\n")
    path = [str(into), str(ROOT / "tests"), str(ROOT / "benchmarks")]
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # its pool outlives a step that is cut off
    return {**os.environ, **threads, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(path)}


def taken(step: Step, left: float, environment: Mapping[str, str], folder: Path, log: Path) -> Done:
    """left: seconds of the whole run.  log: what the step prints is added to it, as it is printed."""
    limit = min(60 * step.minutes, left)
    if limit < LEAST:
        return Done(step.name, 0.0, "no time left", "")
    start = time.monotonic()
    with log.open("ab") as printed:
        printed.write(f"\n# {step.name}\n".encode())
        printed.flush()
        begins = printed.tell()
        process = subprocess.Popen(
            [sys.executable, *step.arguments], env=dict(environment), cwd=folder, stdout=printed,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=limit)
            outcome = "done" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            outcome = f"not done in {limit:.0f} s"
        finally:  # its workers too: the next step has the GPU to itself
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_bytes()[begins:].decode(errors="replace")
    return Done(step.name, time.monotonic() - start, outcome, text[-TAIL:])


def compile_kernels(timed: Sequence[Step], seconds: float, environment: Mapping[str, str]) -> Done:
    """Runs every shape of the attention steps once, all at the same time: a kernel takes seconds of a CPU
    to compile, and Triton keeps it for the steps that time it."""
    start = time.monotonic()
    steps = [step for step in timed if "attention.py" in step.arguments[0]]
    shapes = [shape for step in steps for shape in each_shape(step)]
    running = [
        subprocess.Popen(
            [sys.executable, *shape, "--once"], env=dict(environment),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) for shape in shapes
    ]  # fmt: skip
    late = 0
    for process in running:
        try:
            process.wait(timeout=max(0.0, start + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            late += 1
    spent = time.monotonic() - start
    return Done("kernels", spent, f"{late} of {len(running)} not done" if late else "done", "")


def each_shape(step: Step) -> list[list[str]]:
    """Its arguments with one number of tokens and one of features a head."""
    before, rest = list(step.arguments), {}
    for option in ("--tokens", "--head-dim"):
        place = before.index(option)
        stop = next((i for i in range(place + 1, len(before)) if before[i].startswith("-")), len(before))
        rest[option] = before[place + 1 : stop]
        del before[place:stop]
    return [
        [*before, "--tokens", tokens, "--head-dim", dim]
        for dim in rest["--head-dim"] for tokens in rest["--tokens"]
    ]  # fmt: skip


def gathered(out: Path, done: Sequence[Done], device: str) -> None:
    """One file of numbers and one to read, of all the steps that left theirs in `out`."""
    found: dict[str, Any] = {}
    texts = [f"# Measured on {device}", ""]
    texts += ["| step | seconds | outcome |", "|---|---:|---|"]
    texts += [f"| {step.name} | {step.seconds:.0f} | {step.outcome} |" for step in done]
    for step in done:
        place = out / step.name
        for result in sorted(place.glob("*.json")):
            found[step.name] = json.loads(result.read_text())
            texts += ["", f"## {step.name}", "", result.with_suffix(".md").read_text()]
    report = out / "digits" / "asap" / "report.json"
    if report.exists():
        found["demo"] = json.loads(report.read_text())
    document = {"device": device, "steps": [asdict(step) for step in done], "results": found}
    write_whole(out / "gpu_check.json", json.dumps(document, indent=1) + "\n")
    write_whole(out / "gpu_check.md", "\n".join(texts) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", help="these steps")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    import torch

    if not torch.cuda.is_available():
        print("gpu_check.py: torch.cuda.is_available() is false: a GPU is needed", file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_check.log").unlink(missing_ok=True)
    done: list[Done] = []
    with tempfile.TemporaryDirectory() as place:
        site = Path(place) / "site"
        environment = installed(site)
        missing = [name for name in NEEDED if find_spec(name) is None and not (site / name).exists()]
        if missing:
            print(f"gpu_check.py: steps will fail for want of {', '.join(missing)}: `make gpu-wheels`, "
                  "on a machine with a network, gathers some of them", file=sys.stderr)  # fmt: skip
        wanted = [step for step in steps(out) if not options.only or step.name in options.only]
        for step in wanted:
            left = end - time.monotonic()
            if "attention.py" in step.arguments[0] and not any(one.name == "kernels" for one in done):
                done.append(compile_kernels(wanted, min(KERNELS, left), environment))
                left = end - time.monotonic()
            done.append(taken(step, left, environment, Path(place), out / "gpu_check.log"))
            last = done[-1]
            print(f"{last.name}: {last.outcome}, {last.seconds:.0f} s\n{last.tail}\n", flush=True)
            gathered(out, done, torch.cuda.get_device_name())  # the next may be the last
    print((out / "gpu_check.md").read_text())
    return int(any(step.outcome != "done" for step in done if step.name != "kernels"))


if __name__ == "__main__":
    sys.exit(main())
