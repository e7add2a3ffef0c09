"""What each command takes on a model of real size, next to the teacher's own forward passes.

    python benchmarks/real_size.py                       # a Sinkformer of ViT-B's size, T = 20 and 40
    python benchmarks/real_size.py --depth 2 --images 8  # a first look
    python benchmarks/real_size.py --half-steps 20 40 --commands "teacher alone" inspect
    python benchmarks/real_size.py --layers 6 12 24      # capture and matching, by depth
    python benchmarks/real_size.py --text --half-steps 20  # a text teacher, a report on 500 examples

The model is built in, its weights and images are random: 12 layers, 12 heads, d = 768, N = 197. With
--text: 3 layers, 8 heads, d = 256, N = 256, padded, calibrated by the default recipe. Every
command is a process of its own, timed with its imports; its peak memory is the system's. The teacher is
loaded and run on as many images as calibrate fits on, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attention import environment
from teacher import write_teacher
from written import parser_of, write_results

SHAPE: dict[str, Any] = {
    "image_size": 224, "patch_size": 16, "num_classes": 1000, "dim": 768, "heads": 12, "mlp_dim": 3072,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 1000, "seq_len": 256, "d_model": 256, "n_layers": 3, "n_heads": 8, "d_ff": 256,
    "num_classes": 2,
}  # fmt: skip
TEXT_EXAMPLES, GATE_SHARE = 500, 7  # one of so many examples is for the gate
BATCH = 8
SPLITS = 3  # times as many images: the calibration split is the larger part, and each command has its own
TEACHER = """
import sys, numpy, torch, asapc
from asapc.inputs.load import load_teacher
model = load_teacher(sys.argv[1]).model.eval()
(inputs,) = numpy.load(sys.argv[2]).values()
inputs = torch.from_numpy(inputs[: int(sys.argv[3])])
with torch.no_grad():
    for batch in inputs.split(int(sys.argv[4])):
        model(batch)
"""


MEASURED = """
import resource, sys
sys.argv = sys.argv[1:]
{}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""

ANALYSED = """
import json, sys, tempfile, time
from pathlib import Path
from asapc.inputs.load import load_teacher
from asapc.inputs.pt2 import load_program, save_program
import torch
from asapc.passes import capture as capturing
from asapc.passes.identify import matched_program
teacher = load_teacher(sys.argv[1])
inputs = teacher.model.example_inputs(4)
def seconds(call):
    start = time.perf_counter()
    return call(), time.perf_counter() - start
with torch.no_grad():
    teacher.model(**inputs)
    _, once = seconds(lambda: teacher.model(**inputs))
export, traced, tracing = capturing.export_graph, [], []
def timed(*given):
    made, taken = seconds(lambda: export(*given))
    traced.append(made)
    tracing.append(taken)
    return made
capturing.export_graph = timed
captured, whole = seconds(lambda: capturing.capture(teacher.model, (), inputs))
found, matching = seconds(lambda: [matched_program(program) for program in captured.programs])
assert sum(len(sites) for _, sites in found) == int(sys.argv[2])
assert captured.kind == "whole"
with tempfile.TemporaryDirectory() as place:
    path = Path(place) / "traced.pt2"
    save_program(traced[-1], path)
    _, reading = seconds(lambda: load_program(path, trust=True))  # marks of modules are in it
print(json.dumps({"forward": once, "capture": whole, "trace": sum(tracing), "matching": matching,
                  "reading": reading}))
"""


def by_depth(depths: Sequence[int], half_steps: int) -> dict[int, dict[str, float]]:
    """Seconds of one forward pass, of capture (with runs of the model), its trace, and matching; and of
    reading the trace from a file instead, which would still have to be held against the model."""
    found = {}
    for depth in depths:
        with tempfile.TemporaryDirectory() as place:
            teacher, _ = written(Path(place), depth, half_steps, 1)
            command = [sys.executable, "-c", ANALYSED, str(teacher), str(depth)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[depth] = json.loads(done.stdout)
    return found


def written(folder: Path, depth: int, half_steps: int, images: int) -> tuple[Path, Path]:
    """A teacher and its data."""
    teacher = folder / "teacher"
    write_teacher(teacher, "sinkformer-vit", {**SHAPE, "depth": depth, "max_iter": half_steps})
    random = np.random.default_rng(0)
    data = folder / "images.npz"
    for path, count in ((data, SPLITS * images), (folder / "unseen.npz", images)):
        np.savez(path, img=random.standard_normal((count, 3, 224, 224), dtype=np.float32))
    (folder / "recipe.yaml").write_text(f"max_examples: {images}\nbatch_size: {BATCH}\n")
    return teacher, data


def written_text(folder: Path, half_steps: int) -> tuple[Path, Path]:
    """A text teacher and its data, reviews of 64 to 256 tokens."""
    teacher = folder / "teacher"
    write_teacher(teacher, "sinkformer-text", {**TEXT, "max_iter": half_steps})
    random = np.random.default_rng(0)
    count, tokens = GATE_SHARE * TEXT_EXAMPLES + TEXT_EXAMPLES, TEXT["seq_len"]
    lengths = random.integers(tokens // 4, tokens + 1, (count, 1))
    ids = random.integers(1, TEXT["vocab_size"], (count, tokens))
    data = folder / "reviews.npz"
    np.savez(data, inputs=np.where(np.arange(tokens) < lengths, ids, 0))
    (folder / "recipe.yaml").write_text("batch_size: 32\n")
    return teacher, data


def taken(*arguments: object) -> dict[str, float]:
    """Seconds and peak MiB of a process."""
    start = time.perf_counter()
    command = [sys.executable, "-c", MEASURED.format(arguments[0]), *map(str, arguments[1:])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"real_size.py: {' '.join(command[2:])[:200]}\n{done.stderr[-2000:]}")
    return {"seconds": seconds, "mib": int(done.stderr.splitlines()[-1]) / 1024}


ASAPC = "from asapc.cli import main\nstatus = main(sys.argv[1:])\nassert status == 0, status"


def measured(
    depth: int, half_steps: int, images: int, asked: Sequence[str] | None, text: bool
) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as place:
        folder, batch = Path(place), 32 if text else BATCH
        if text:
            teacher, data = written_text(folder, half_steps)
        else:
            teacher, data = written(folder, depth, half_steps, images)
        unseen = () if text else ("--data", folder / "unseen.npz")
        calibration, out = folder / "calibration", folder / "out"
        quiet = ("--quiet",)
        commands: dict[str, tuple[object, ...]] = {
            "teacher alone": (TEACHER, "teacher", teacher, data, images, batch),
            "inspect": (ASAPC, "asapc", "inspect", teacher, *quiet),
            "calibrate": (ASAPC, "asapc", "calibrate", teacher, "--data", data, "-o", calibration,
                          "--recipe", folder / "recipe.yaml", *quiet),
            "compile": (ASAPC, "asapc", "compile", teacher, "--calibration", calibration, "-o", out,
                        *quiet),
            "report": (ASAPC, "asapc", "report", out, *unseen, "--examples", images, *quiet),
            "report --fast": (ASAPC, "asapc", "report", out, *unseen, "--examples", images,
                              "--fast", *quiet),
        }  # fmt: skip
        found = {}
        for name, command in commands.items():
            if asked is not None and name not in asked:
                continue
            found[name] = taken(*command)
            seconds = found[name]["seconds"]
            print(f"T = {half_steps}, {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
        return found


def show_depths(found: dict[int, dict[str, float]], options: argparse.Namespace) -> int:
    lines = [f"### By depth, T = {options.half_steps[0]}, 4 images", ""]
    lines += ["| layers | one forward pass | capture | its trace | a layer | matching | a stored trace |"]
    lines += ["|---:|---:|---:|---:|---:|---:|---:|"]
    for depth, s in found.items():
        lines.append(f"| {depth} | {s['forward']:.1f} s | {s['capture']:.1f} s | "
                     f"{s['trace']:.1f} s | {s['trace'] / depth:.2f} s | {s['matching']:.1f} s | "
                     f"{s['reading']:.1f} s |")  # fmt: skip
    print("\n".join(lines))
    document = {"environment": environment(cpu=True), "by_depth": found}
    write_results(options.out, "real_size_depth", document, "\n".join(lines))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, depth=12, half_steps=[20, 40], images=64)
    parser.add_argument("--commands", nargs="+", help="only these")
    parser.add_argument("--text", action="store_true", help="a text teacher instead")
    parser.add_argument("--layers", type=int, nargs="+", help="only capture and matching, at such depths")
    options = parser.parse_args(arguments)
    if options.layers:
        return show_depths(by_depth(options.layers, options.half_steps[0]), options)
    images = TEXT_EXAMPLES if options.text else options.images
    found = {
        T: measured(options.depth, T, images, options.commands, options.text)
        for T in options.half_steps
    }
    title = f"Sinkformer, {options.depth} layers, d = 768, N = 197, {images} images"
    if options.text:
        title = f"Text Sinkformer, 3 layers, d = 256, N = 256 padded, {images} examples"
    head = " | ".join(f"T = {T} | memory" for T in found)
    lines = [f"### {title}", "", f"| command | {head} |", "|---|" + "---:|---:|" * len(found)]
    for name in next(iter(found.values())):
        cells = [f"{by[name]['seconds']:.0f} s | {by[name]['mib']:.0f} MiB" for by in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    print("\n".join(lines))
    document = {"environment": environment(cpu=True), "commands": found}
    name = "real_size_text" if options.text else "real_size"
    write_results(options.out, name, document, "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
