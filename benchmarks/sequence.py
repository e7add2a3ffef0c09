"""What one long sequence costs on processes that share it, `asapc.load(OUT, sequence_group=group)`.

    python benchmarks/sequence.py            # a text Sinkformer, N = 8192, T = 4; 1, 2, 4 processes
    python benchmarks/sequence.py --tokens 16384 --processes 1 2

The model is built in, its weights and tokens are random; it is compiled on short sequences. Outputs are
held against those of one process by the usual kernels before anything else is printed. Memory is the
most that a process had resident while it ran, less what it had before: weights and imports do not count.
Processes have one thread each; where there are fewer cores than processes, times say little.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from attention import environment
from teacher import write_teacher
from written import parser_of, write_results

import asapc
from asapc.cli import main as asapc_main

CONFIG: dict[str, Any] = {
    "vocab_size": 1000, "d_model": 512, "n_layers": 2, "n_heads": 8, "d_ff": 2048, "num_classes": 4,
    "max_iter": 4,
}  # fmt: skip
DROP = "drop_attention_maps: true\nbatch_size: 8\n"  # N x N of them would be all that is measured
RECIPES = {"lossless": f"operator: lossless\n{DROP}", "asap": f"operator: asap\n{DROP}"}
SAME = 1e-5


def compiled(folder: Path, tokens: int, half_steps: int) -> None:
    """OUT.lossless and OUT.asap, of the same teacher."""
    config = {**CONFIG, "seq_len": tokens, "max_iter": half_steps}
    write_teacher(folder / "teacher", "sinkformer-text", config)
    ids = np.random.default_rng(0).integers(1, 1000, (64, 64))
    np.savez(folder / "data.npz", inputs=ids)
    for name, recipe in RECIPES.items():
        (folder / f"{name}.yaml").write_text(recipe)
        teacher, out = str(folder / "teacher"), str(folder / f"calibration.{name}")
        data = ["--data", str(folder / "data.npz"), "--recipe", str(folder / f"{name}.yaml"), "--quiet"]
        if asapc_main(["calibrate", teacher, *data, "-o", out]) or asapc_main(
            ["compile", teacher, "--calibration", out, "-o", str(folder / f"OUT.{name}"), "--quiet"]
        ):
            raise SystemExit("sequence.py: the model is not compiled")


def one_process(out: Path, tokens: int, shared: bool) -> None:
    """Prints seconds, MiB and where the output is: of one rank."""
    torch.set_num_threads(1)
    group = None
    if shared:
        torch.distributed.init_process_group("gloo")
        group = torch.distributed.group.WORLD
    model = asapc.load(out, sequence_group=group)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model(torch.randint(1, 1000, (1, 64), generator=draw))
        ids = torch.randint(1, 1000, (1, tokens), generator=draw)
        me = psutil.Process()
        before = most = me.memory_info().rss
        over = threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.002):
                most = max(most, me.memory_info().rss)

        watching = threading.Thread(target=watch)
        watching.start()
        start = time.perf_counter()
        logits = model(ids)
        seconds = time.perf_counter() - start
        over.set()
        watching.join()
    logits = torch.utils._pytree.tree_leaves(logits)[0]
    print(json.dumps({"seconds": seconds, "mib": (most - before) / 2**20, "logits": logits.tolist()}))


def measured(out: Path, tokens: int, processes: int, shared: bool) -> list[dict[str, Any]]:
    """What each rank prints."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    command = [sys.executable, __file__, "--one", str(out), "--tokens", str(tokens)]
    ranks = [
        subprocess.Popen(
            command + (["--shared"] if shared else []), stdout=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_PORT": port,
                 "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(processes)
    ]  # fmt: skip
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("sequence.py: a process has failed")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, tokens=8192, half_steps=4, processes=[1, 2, 4])
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # see one_process
    parser.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one is not None:
        one_process(options.one, options.tokens, options.shared)
        return 0
    lines = [f"### One sequence of {options.tokens} tokens, T = {options.half_steps}, a thread a process"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        compiled(Path(place), options.tokens, options.half_steps)
        for name in RECIPES:
            lines += ["", f"| {name} | seconds | MiB a process | differs by |", "|---|---:|---:|---:|"]
            out = Path(place) / f"OUT.{name}"
            (usual,) = measured(out, options.tokens, 1, False)
            expected = torch.tensor(usual["logits"])
            seconds, mib = usual["seconds"], usual["mib"]
            lines.append(f"| one process, usual kernels | {seconds:.1f} | {mib:.0f} | |")
            for count in options.processes:
                ranks = measured(out, options.tokens, count, True)
                found = torch.tensor([rank["logits"] for rank in ranks])
                worst = float((found - expected).abs().max() / expected.abs().max())
                if worst > SAME:
                    raise SystemExit(f"sequence.py: {count} processes differ by {worst:.2g}")
                seconds, mib = (max(rank[key] for rank in ranks) for key in ("seconds", "mib"))
                lines.append(f"| {count} on shares | {seconds:.1f} | {mib:.0f} | {worst:.1g} |")
                rows.append({"model": name, "processes": count, "seconds": seconds, "mib": mib})
    print("\n".join(lines))
    document = {"environment": environment(cpu=True), "tokens": options.tokens, "rows": rows}
    write_results(options.out, "sequence", document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
