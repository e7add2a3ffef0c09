"""What `asapc calibrate` gains on several processes of one thread each, next to one of them.

    python benchmarks/processes.py                 # a text Sinkformer, N = 256, T = 20; 1 and 2 processes
    python benchmarks/processes.py --processes 4 --examples 8192

The model is built in, its weights and tokens are random. The fits are compared before anything is timed:
those of several processes are those of one. Imports, analysis and reading, which every process does,
count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attention import environment
from safetensors.torch import load_file
from teacher import write_teacher
from written import parser_of, write_results

CONFIG: dict[str, Any] = {
    "vocab_size": 1000, "seq_len": 256, "d_model": 256, "n_layers": 3, "n_heads": 8, "d_ff": 256,
    "num_classes": 4, "max_iter": 20,
}  # fmt: skip
SAME = 2e-7  # coefficients are float32


def calibrated(folder: Path, processes: int) -> float:
    """Seconds of the command, with its imports."""
    launched = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command = [
        sys.executable, *(launched if processes > 1 else []), "-m", "asapc", "calibrate", "teacher",
        "--data", "data.npz", "-o", f"calibration.{processes}", "--recipe", "recipe.yaml", "--quiet",
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"processes.py: {processes} processes\n{done.stderr[-2000:]}")
    return time.perf_counter() - start


def check_same(folder: Path, processes: int) -> float:
    """The largest relative difference of a fit from that of one process."""
    one, several = (
        load_file(next((folder / f"calibration.{count}").glob("*.safetensors")))
        for count in (1, processes)
    )
    floats = [name for name in one if one[name].is_floating_point()]
    worst = max(
        float((several[name] - one[name]).abs().max() / one[name].abs().max().clamp(min=1e-30))
        for name in floats
    )
    if worst > SAME:
        raise SystemExit(f"processes.py: fits of {processes} processes are {worst:.2g} from those of one")
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, processes=2, examples=4096)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_teacher(folder / "teacher", "sinkformer-text", CONFIG)
        tokens = np.random.default_rng(0).integers(1, 1000, (2 * options.examples, CONFIG["seq_len"]))
        np.savez(folder / "data.npz", inputs=tokens)
        (folder / "recipe.yaml").write_text(f"max_examples: {options.examples}\nbatch_size: 32\n")
        times = {count: calibrated(folder, count) for count in (1, options.processes)}
        worst = check_same(folder, options.processes)
    ratio = times[1] / times[options.processes]
    lines = [
        f"### calibrate, {options.examples} examples of 256 tokens, one thread a process", "",
        "| processes | seconds | faster | fits differ by |", "|---:|---:|---:|---:|",
        f"| 1 | {times[1]:.0f} | | |",
        f"| {options.processes} | {times[options.processes]:.0f} | {ratio:.2f}x | {worst:.1g} |",
    ]  # fmt: skip
    print("\n".join(lines))
    document = {"environment": environment(cpu=True), "seconds": times, "faster": ratio, "differ": worst}
    write_results(options.out, "processes", document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
