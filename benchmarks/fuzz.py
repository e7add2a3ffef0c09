"""Hostile files against everything asapc reads, and hostile places against everything it writes.

    python benchmarks/fuzz.py --count 10000 --seed 0

Each case changes a valid file (a byte, a value of its JSON, its zip members), composes one (nested
sizes, doublings of doublings, rare operators, archives with duplicate or absolute names) or takes one
of the known attacks, and reads it as a command would; programs and ONNX models are run too, and allowed
operators are called with hostile arguments. Every case has a process of its own, with a limit on its
address space and on its time. It must end in something that was read or in an AsapcError that a
terminal can show, without much more memory than the file has bytes, and without touching anything
outside its folder; a death by a signal is a failure like any other. Prints how the cases of each target
ended; exits 1 if one ended otherwise, and says how to repeat it: --target NAME --only NUMBER.
"""

from __future__ import annotations

import argparse
import collections
import copy
import io
import json
import math
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import torch
from safetensors.torch import save_file

import asapc
from asapc.artifact.write import write_facts
from asapc.calibration.shards import Shards
from asapc.calibration.stored import load_calibration
from asapc.errors import AsapcError
from asapc.formats.atomic import check_replaceable, replace_file, replace_folder
from asapc.formats.json_text import read_json
from asapc.inputs.data import open_data
from asapc.inputs.load import load_teacher
from asapc.inputs.pt2 import load_program
from asapc.inputs.recipe import Recipe, load_recipe
from asapc.inputs.weights import read_state_dict
from asapc.models import SinkformerText
from asapc.pipeline import calibrate, compile
from asapc.report import Report, write_report
from asapc.report.baseline import load_baseline
from asapc.report.gates import load_gates
from asapc.study import load_grid
from asapc.terminal.printed import escaped
from asapc.terminal.progress import Progress

sys.path.insert(0, str(Path(__file__).parent))
from hostile_calls import hostile_calls

SECONDS = 20.0  # of a processor: a case that takes longer hangs
WAITING = 60.0  # by the clock: a case that waits for longer hangs
ADDRESS_SPACE = 12 << 30  # beyond what the process has: a wild allocation fails instead of swapping
MEMORY = 400 << 20  # a case may add this and RATIO times its files
RATIO = 200
RUN_MEMORY = 3 << 30  # of an ONNX model that is run: its values may take one GiB, and torch copies
RUN_ADDRESS_SPACE = 5 << 30  # beyond what the process has, of a case that is run

TEXT = {"vocab_size": 20, "seq_len": 8, "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8,
        "num_classes": 3, "max_iter": 4}  # fmt: skip
RECIPE = """
operator: auto
candidates:
  - {operator: asap, side: [target, source], c_transforms: [1, 2],
     features: [["coarse:2"], ["coarse:2", gaussian]]}
budget: {attention_rel_l2: 0.5, prediction_agreement: 0.5}
objective: latency
shapes: [8, [2, 8]]
batch_size: 8
max_examples: 32
sites: {"layers.0*": {operator: asap, side: source, c_transforms: 1, features: ["sliced:2"]}}
"""
GRID = """
blocks:
- {features: [['coarse:2'], [gaussian]], side: [target, source], c_transforms: 1}
- {half_steps: [1, 3]}
"""
GATES = "attention_rel_l2: {max: 0.5}\nprediction_agreement: {min: 0.9, max: 1.0}\n"

EVIL_TEXT = [
    "", "\0", "\ud800", "../../../../etc/passwd", "/etc/passwd", "..", ".", "/", "a\nb", "\x1b[2J",
    "x" * 10**5,
    "__import__('os').system('touch ESCAPED')", "open('ESCAPED', 'w')", "{{7*7}}", "<script>", "%s%n",
    "NaN",
    "coarse:99999999999999999999", "coarse:" + "9" * 5000, "sliced:2:2:2", "*" * 200 + "b", "1e400",
    "é" * 300,
]  # fmt: skip
EVIL_NUMBERS = [
    -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, -(10**12), 1e-320, 1e308, float("nan"),
    float("inf"),
    -float("inf"), 0.5, 10**400,
]  # fmt: skip
EVIL = [
    *EVIL_TEXT,
    *EVIL_NUMBERS,
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": {}},
    [1, 2, 3],
    ["a"] * 1000,
]

EVIL_YAML = [
    "a: &a [x, x]\nb: &b [*a, *a]\n" + "".join(
        f"{chr(99 + i)}: &{chr(99 + i)} [{', '.join(['*' + chr(98 + i)] * 9)}]\n" for i in range(12)),
    "a: &a {k: v}\nb: &b {<<: [*a, *a]}\nc: {<<: [*b, *b, *b]}\n",
    "&a [*a, *a]", "&a {a: *a}", "? &a [*a]\n: 1", "[" * 5000, "{a: " * 5000, "- " * 5000 + "x",
    "a:\n" * 3,
    "!!python/object/apply:os.system ['touch ESCAPED']", "!!python/name:os.system",
    "!!python/object/new:os.system [x]",
    "seed: !!int x", "seed: !!int ''", "seed: !!float x", "seed: !!bool x", "seed: !!timestamp x",
    "seed: !!binary x",
    "seed: 2001-99-99", "seed: !!set {a}", "seed: !!omap [a: 1]", "seed: !!pairs [a: 1]",
    "seed: " + "9" * 10**5,
    "seed: " + "1:" * 50000 + "1", "seed: 0x" + "f" * 10**5, "a: 1\na: 1\n", "--- a\n--- b\n",
    "%YAML 9.9\n---\na: 1",
    "%TAG ! tag:evil\n---\n!x a", "\ufeffseed: 1", "\x00", "\xff\xfe", "'", '"\\ud800": 1',
    "seed: \"\\ud800\"", "? a",
    "- - - a", "1: 2", "null: 1", "[]", "a", "1", "", "---", "...", "<<: {seed: 1}", "=: 1", "seed: =",
    "a" * 2**18,
    "&" + "a" * 2000 + " x", "*a", "seed: |\n" + " x\n" * 1000, "{" * 60 + "}" * 60, "[[[[[[[[[]]]]]]]]]",
    "candidates: [{ridge: [" + ", ".join(map(str, range(400))) + "], c_transforms: [" +
    ", ".join(map(str, range(50))) + "], seed: [" + ", ".join(map(str, range(400))) + "]}]",
    "blocks: [{ridge: [" + ", ".join(map(str,
    range(900))) + "], ridge_mode: [risk, direct], c_transforms: [" +
    ", ".join(map(str, range(1, 50))) + "], fit: [ls, kl]}]",
]  # fmt: skip


# What is run may fail, and may take its time: an operator says what is wrong with its arguments.
GOOD = ("read", "refused", "failed", "timed out")


class Hang(BaseException):
    """A case took longer than SECONDS or WAITING."""


@dataclass(frozen=True)
class Target:
    """change: make a hostile version of the corpus in a folder; read: what a command does with it.

    runs: what is read is run too, which may take memory and fail as it likes, but not end the process.
    bounded: what is run is of ONNX, whose values have a bound; a .pt2 program may ask for a tensor of any
    size (SECURITY.md), and has the address space.
    """

    change: Callable[[Random, Path], None]
    read: Callable[[Path], Any]
    runs: bool = False
    bounded: bool = False


# Changes


def bytes_of(random: Random, content: bytes, other: bytes = b"") -> bytes:
    """content with a few bytes changed."""
    data = bytearray(content)
    for _ in range(random.choice([1, 1, 1, 2, 4, 16])):
        at = random.randrange(len(data) + 1)
        match random.randrange(9):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 2 if data:
                data[at % len(data)] = random.choice([0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B])
            case 3:
                del data[at : at + random.choice([1, 4, 100])]
            case 4:
                data[at:at] = random.randbytes(random.choice([1, 4, 100]))
            case 5:
                data = data[:at]
            case 6:
                number = random.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1, len(data)])
                at = random.choice([0, at])
                data[at : at + 8] = struct.pack("<Q", number)
            case 7:
                end = at + random.randrange(64)
                data[at:at] = data[at:end] * random.choice([1, 2, 50])
            case _:
                data[at:at] = other[: random.randrange(200)]
    return bytes(data)


def json_of(random: Random, document: Any) -> str:
    """The document with a few values changed, and sometimes what no parser should take."""
    document = copy.deepcopy(document)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        spots = list(_spots(document))
        if not spots:
            break
        holder, key = random.choice(spots)
        match random.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[random.choice(EVIL_TEXT)] = holder.pop(key)
            case 2:
                other, there = random.choice(spots)
                with suppress(IndexError, KeyError, TypeError, ValueError):
                    holder[key] = copy.deepcopy(other[there])
            case 3 if isinstance(holder[key], str):
                text = holder[key]
                at = random.randrange(len(text) + 1)
                holder[key] = text[:at] + random.choice(EVIL_TEXT)[:300] + text[at:]
            case 4 if isinstance(holder[key], list):
                holder[key] = holder[key] * random.choice([0, 2, 300])
            case 5 if isinstance(holder[key], int):
                holder[key] += random.choice([-1, 1, 100, 2**31])
            case _:
                holder[key] = copy.deepcopy(random.choice(EVIL))
    text = json.dumps(document)
    match random.randrange(40):
        case 0:
            return text[: random.randrange(len(text) + 1)]
        case 1:
            return random.choice(
                ["[" * 10**5, '{"a":' * 10**5, "9" * 5000, "", "null", "[]", "1", '"a"', text + text]
            )
        case 2:
            return text.replace(":", ': {"x":', 1)
    return text


def _spots(document: Any) -> Iterator[tuple[Any, Any]]:
    stack = [document]
    while stack:
        item = stack.pop()
        keys = (
            list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else []
        )
        for key in keys:
            yield item, key
            stack.append(item[key])


def change_json(name: str) -> Callable[[Random, Path], None]:
    def change(random: Random, folder: Path) -> None:
        path = folder / name
        text = json_of(random, json.loads(path.read_text()))
        path.write_bytes(text.encode(errors="surrogatepass"))

    return change


def change_bytes(name: str) -> Callable[[Random, Path], None]:
    def change(random: Random, folder: Path) -> None:
        path = folder / name
        path.write_bytes(bytes_of(random, path.read_bytes(), json.dumps(EVIL_TEXT[:-1]).encode()))

    return change


def change_tensors(name: str) -> Callable[[Random, Path], None]:
    """A safetensors header that lies."""

    def change(random: Random, folder: Path) -> None:
        content = (folder / name).read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        text = json_of(random, header).encode(errors="surrogatepass")
        if random.random() < 0.3:
            entry = random.choice([k for k in header if k != "__metadata__"] or [""])
            lie = random.choice([
                {"shape": [10**12]}, {"shape": [2**40, 2**40]}, {"shape": [-1]}, {"data_offsets": [0,
                10**15]},
                {"data_offsets": [10, 0]}, {"dtype": random.choice(["F8_E4M3", "F4", "F6_E2M3", "C64",
                "I64", "X", 3])},
                {"shape": [10**12, 0], "data_offsets": [0, 0]}, {"shape": []},
            ])  # fmt: skip
            header.get(entry, {}).update(lie)
            text = json.dumps(header).encode()
        length = random.choice([len(text)] * 6 + [0, 2**63, len(text) + 1, 10**8 + 1])
        (folder / name).write_bytes(struct.pack("<Q", length) + text + data)

    return change


def change_yaml(name: str) -> Callable[[Random, Path], None]:
    def change(random: Random, folder: Path) -> None:
        import yaml

        path = folder / name
        text = path.read_text()
        match random.randrange(4):
            case 0:
                own = random.choice(EVIL_YAML)
                text = own if random.random() < 0.7 else text + own
                path.write_bytes(text.encode(errors="surrogatepass"))
            case 1:
                path.write_bytes(
                    bytes_of(random, text.encode(), random.choice(EVIL_YAML).encode(errors="replace"))
                )
            case _:
                path.write_bytes(json_of(random, yaml.safe_load(text)).encode(errors="surrogatepass"))

    return change


def change_npz(name: str) -> Callable[[Random, Path], None]:
    def npy(random: Random) -> bytes:
        buffer = io.BytesIO()
        array = random.choice([
            np.ones((4, 8), np.int64), np.array([[1], [1, 2]], dtype=object), np.array(["a", "b"]),
            np.full((4, 8), np.nan), np.ones((4, 8), np.complex64), np.ones(3, [("a", "i4")]),
            np.float16(3),
            np.zeros((0, 8)), np.zeros((8, 0)), np.ones((4, 8), ">i8"), np.array(["2001-01-01"], "M8[D]"),
            np.asfortranarray(np.ones((4, 8), np.int64)), np.ones((4, 8), np.longdouble),
        ])  # fmt: skip
        np.save(buffer, array, allow_pickle=True)
        content = buffer.getvalue()
        if random.random() < 0.5:
            shape = random.choice([
                "(1000000000000,)", "(-1,)", "(2147483648, 2147483648, 4)", "(4, 8" * 30, "()", "(1e9,)",
                "[4]", "(True,)",
                "__import__('os').system('touch ESCAPED')", "(" * 300 + ")" * 300, "(0, 1000000000000)",
            ])  # fmt: skip
            descr = random.choice(
                ["'<i8'", "'|O'", "'|S0'", "'|V1000000000'", "[('a', '<i8')]", "'<x9'", "1", "'<i8' * 9"]
            )
            header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
            version = random.choice([b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\x09\0"])
            length = struct.pack("<H" if version == b"\1\0" else "<I", len(header))
            content = b"\x93NUMPY" + version + length + header + bytes(256)
        return content

    def change(random: Random, folder: Path) -> None:
        path = folder / name
        if random.random() < 0.3:
            path.write_bytes(bytes_of(random, path.read_bytes()))
            return
        method = random.choice(
            [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with zipfile.ZipFile(path, "w", method) as archive:
                for member in random.sample(["inputs.npy", "labels.npy", "../ESCAPED.npy", "/ESCAPED",
                "inputs.npy", "x"],
                                            random.randrange(1, 4)):  # fmt: skip
                    archive.writestr(member, npy(random))
                if random.random() < 0.1:  # 300 MB of zeros
                    buffer = io.BytesIO()
                    np.save(buffer, np.zeros((300, 1 << 17), np.int64))
                    archive.writestr("inputs.npy", buffer.getvalue(), zipfile.ZIP_DEFLATED)
        if random.random() < 0.3:
            content = bytearray(path.read_bytes())
            at = content.rfind(b"PK\1\2")
            if at >= 0:  # flags, method, sizes and offsets of the last entry in the directory
                field = at + random.choice([8, 10, 16, 20, 24, 42])
                content[field : field + 4] = struct.pack("<I", random.choice([0, 1, 9, 2**31, 2**32 - 1]))
            path.write_bytes(content)

    return change


def a_size(random: Random, depth: int) -> str:
    """A size as SymPy writes it, and as it would not."""
    symbol = f"Symbol('s{random.randrange(12)}', positive=True, integer=True)"
    if depth == 0 or random.random() < 0.15:
        return random.choice([
            symbol, symbol, f"Integer({random.choice([1, 2, 3, -1, 9, 10**9, 10**29, 0])})", "s0", "9",
            f"Float('0.1', {random.choice(['precision=53', 'precision=4000000000', '4000000000'])})",
            "Rational(1, 3)", "Rational(1, 0)",
        ])  # fmt: skip
    match random.randrange(8):
        case 0:
            own = a_size(random, depth - 1)
            for _ in range(random.randrange(1, 10)):
                own = f"({own})**{random.choice([2, 8, 99])}"
            return own
        case 1:
            own = a_size(random, depth - 1)
            for _ in range(random.randrange(1, 10)):
                own = f"Pow({own}, Integer({random.choice([2, 3, 8])}))"
            return own
        case 2:
            terms = ", ".join(
                f"Symbol('s{i}', positive=True, integer=True)" for i in range(random.randrange(2, 12))
            )
            power = random.choice([1, 2, 3, 8])
            sums = [f"Pow(Add({terms}), Integer({power}))", a_size(random, depth - 1)]
            random.shuffle(sums)
            return f"{random.choice(['Mod', 'FloorDiv', 'PythonMod', 'CleanDiv'])}({', '.join(sums)})"
        case _:
            name = random.choice([
                "Add", "Mul", "Mod", "FloorDiv", "Max", "Min", "Eq", "Ge", "And", "Where", "Pow",
                "IntTrueDiv", "ToFloat", "CeilToInt", "ModularIndexing", "open", "Piecewise",
            ])  # fmt: skip
            count = random.choice([1, 2, 2, 2, 3, 9])
            return f"{name}({', '.join(a_size(random, depth - 1) for _ in range(count))})"


def with_a_size(random: Random, model: Any) -> None:
    values = [own for own in model["graph_module"]["graph"]["tensor_values"].values() if own["sizes"]]
    size = {"as_expr": {"expr_str": a_size(random, random.randrange(1, 7)), "hint": None}}
    random.choice(values)["sizes"][0] = size


def with_calls(random: Random, model: Any) -> None:
    """Rare operators, whichever torch has, and arithmetic of numbers that grow."""
    graph = model["graph_module"]["graph"]
    tensors, nodes = [*graph["tensor_values"]], graph["nodes"]
    operators = torch._C._dispatch_get_all_op_names()
    number = None
    for count in range(random.choice([1, 1, 3, 40])):
        name = f"extra_{count}"
        if random.random() < 0.5:
            full = random.choice(operators).replace("::", ".")
            target = f"torch.ops.{full}" + ("" if full.count(".") > 1 else ".default")
            output = {"as_tensor": {"name": name}}
            graph["tensor_values"][name] = copy.deepcopy(graph["tensor_values"][random.choice(tensors)])
            own = [random.choice([
                {"as_tensor": {"name": random.choice(tensors)}},
                {"as_int": random.choice([1 << 40, -1, 2])},
                {"as_ints": [2, 2]}, {"as_float": 1e-300}, {"as_none": True}, {"as_string": "x"},
            ]) for _ in range(random.randrange(1, 5))]  # fmt: skip
            schema = None
            with suppress(RuntimeError):
                library, _, rest = full.partition(".")
                plain, _, overload = rest.partition(".")
                schema = torch._C._get_schema(f"{library}::{plain}", overload)
            names = [argument.name for argument in schema.arguments] if schema else "abcdef"
            inputs = [{"name": n, "arg": value, "kind": 1} for n, value in zip(names, own, strict=False)]
        else:
            target = f"_operator.{random.choice(['mul', 'mul', 'pow', 'add', 'mod'])}"
            earlier = {"as_int": 10} if number is None else {"as_sym_int": {"as_name": number}}
            number, output = name, {"as_sym_int": {"as_name": name}}
            other = random.choice([earlier, earlier, {"as_int": 10**6}, {"as_string": "%99999999999d"}])
            inputs = [{"name": n, "arg": value, "kind": 1} for n, value in zip("ab", (earlier, other),
                                                                               strict=True)]  # fmt: skip
            graph["sym_int_values"][name] = {"as_int": 100}
        nodes.insert(random.randrange(len(nodes) + 1), {
            "target": target, "inputs": inputs, "outputs": [output], "metadata": {},
            "is_hop_single_tensor_return": None, "name": name,
        })  # fmt: skip


def change_pt2(name: str) -> Callable[[Random, Path], None]:
    def change(random: Random, folder: Path) -> None:
        path = folder / name
        content = path.read_bytes()
        if random.random() < 0.1:
            path.write_bytes(bytes_of(random, content))
            return
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
        by_name = dict(members)
        model = next(n for n in by_name if n.endswith("/models/model.json"))
        root = model.partition("/")[0]
        own = random.choice([n for n in by_name if n.endswith(".json")] * 4 + list(by_name))
        match random.randrange(6):
            case 0 | 1:
                document = json.loads(by_name[model])
                for compose in random.choice([[with_a_size], [with_calls], [with_a_size, with_calls]]):
                    compose(random, document)
                by_name[model] = json.dumps(document).encode(errors="surrogatepass")
            case 2 if own.endswith(".json"):
                by_name[own] = json_of(random, json.loads(by_name[own])).encode(errors="surrogatepass")
            case 3:  # constants are indices of what the graph computes
                weight = random.choice([n for n in by_name if "/weights/weight" in n or "/tensor_" in n])
                size = len(by_name[weight])
                by_name[weight] = (struct.pack("<q", random.choice([1 << 40, -1, 2**62])) * size)[:size]
            case _:
                by_name[own] = (
                    json_of(random, json.loads(by_name[own])).encode(errors="surrogatepass")
                    if own.endswith(".json") else bytes_of(random, by_name[own])
                )  # fmt: skip
        members = [*by_name.items()]
        if random.random() < 0.2:
            evil = ["ESCAPED", "../ESCAPED", "/tmp/ESCAPED", f"{own}/x", own.upper(), "version",
                    f"{root}/data/weights/model.pt", f"{root}/extra/../../ESCAPED", f"//{root}/x"]
            members.append((random.choice(evil), pickle.dumps(Bomb())))
        if random.random() < 0.1:  # of two parts of one name readers take different ones
            members.insert(random.randrange(len(members)), (own, random.choice([b"{}", by_name[own]])))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with zipfile.ZipFile(path, "w", random.choice([zipfile.ZIP_STORED] * 7 + [8])) as archive:
                for member, data in members:
                    archive.writestr(member, data)

    return change


def run_program(folder: Path) -> None:
    module = load_program(folder / "teacher.pt2").module(check_guards=False)
    with torch.no_grad():
        module(torch.from_numpy(np.random.default_rng(0).integers(1, 20, (3, 8))))


def run_onnx(folder: Path) -> None:
    module = load_teacher(str(folder / "teacher.onnx")).model
    assert module is not None
    with torch.no_grad():
        module(torch.ones(3, 4))


GROWING: dict[str, Callable[[Random], tuple[list[str], dict[str, Any]]]] = {
    "Concat": lambda r: (["{}"] * r.choice([2, 2, 2, 30]), {"axis": r.choice([0, 0, -1])}),
    "Tile": lambda r: (["{}", r.choice(["two", "huge"])], {}),
    "Expand": lambda r: (["{}", r.choice(["two", "huge"])], {}),
    "Pad": lambda r: (["{}", r.choice(["pads", "huge_pads"])], {"mode": "constant"}),
    "Unsqueeze": lambda r: (["{}", "axis"], {}),
    "Add": lambda r: (["{}", r.choice(["column", "row", "{}"])], {}),
    "MatMul": lambda r: ([r.choice(["column", "{}"]), r.choice(["row", "{}"])], {}),
    "Gather": lambda r: (["{}", r.choice(["index", "{}"])], {"axis": 0}),
    "ConstantOfShape": lambda r: ([r.choice(["two", "huge", "long"])], {}),
    "Range": lambda r: (["zero", "depth", "one"], {}),
    "Reshape": lambda r: (["{}", "flat"], {}),
    "Split": lambda r: (["{}"], {"num_outputs": r.choice([1, 2, 10**9]), "axis": 0}),
    "Shape": lambda r: (["{}"], {}),
    "Slice": lambda r: (["{}", "minus", "least", "first", "minus"], {}),
    "Div": lambda r: (["least", "minus"], {}),
    "Transpose": lambda r: (["{}"], {}),
}


def grow_onnx(random: Random, folder: Path) -> None:
    """Operators that grow what they are given, one behind the other."""
    make, info = onnx.helper, onnx.helper.make_tensor_value_info
    constants = {
        "two": [2, 2], "huge": [2**30, 2**20], "long": [2] * 10, "pads": [1, 1, 1, 1],
        "huge_pads": [2**30] * 4, "axis": [0], "index": [0] * 40, "depth": 2**30, "zero": 0, "one": 1,
        "flat": [-1], "minus": [-1], "least": [-(2**63)], "first": [0],
    }  # fmt: skip
    initial = [onnx.numpy_helper.from_array(np.array(own, np.int64), n) for n, own in constants.items()]
    initial += [
        onnx.numpy_helper.from_array(np.ones(shape, np.float32), n)
        for n, shape in (("column", (4096, 1)), ("row", (1, 4096)))
    ]
    nodes, last = [], random.choice(["x", "x", "two", "column"])
    favourite = random.choice([*GROWING])
    for number in range(random.choice([1, 3, 10, 40])):
        kind = favourite if random.random() < 0.6 else random.choice([*GROWING])
        inputs, attributes = GROWING[kind](random)
        name = f"n{number}"
        nodes.append(make.make_node(kind, [own.format(last) for own in inputs], [name], **attributes))
        last = name
    opset = [make.make_opsetid("", 18)]
    graph = make.make_graph(nodes, "g", [info("x", 1, ["n", 4])], [info(last, 1, None)], initial)
    model = make.make_model(graph, opset_imports=opset, ir_version=10)
    (folder / "teacher.onnx").write_bytes(model.SerializeToString())


def change_seed(random: Random, folder: Path) -> None:
    (folder / "seed").write_text(str(random.random()))


class Bomb:
    """Unpickling it leaves a file behind."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ESCAPED",)


def change_checkpoint(name: str) -> Callable[[Random, Path], None]:
    def change(random: Random, folder: Path) -> None:
        path = folder / name
        match random.randrange(4):
            case 0:
                path.write_bytes(bytes_of(random, path.read_bytes()))
            case 1:
                with zipfile.ZipFile(path) as archive:
                    members = {info.filename: archive.read(info) for info in archive.infolist()}
                own = random.choice([n for n in members if n.endswith("data.pkl")] * 3 + list(members))
                members[own] = bytes_of(random, members[own])
                with zipfile.ZipFile(path, "w", random.choice([0, 0, 8])) as archive:
                    for member, data in members.items():
                        archive.writestr(member, data)
            case 2:
                own = random.choice([
                    {"a": Bomb()}, Bomb(), [], {"a": 1}, {"state_dict": {}},
                    {"state_dict": {"model": {}}}, {1: torch.ones(1)},
                    {"a": torch.ones(1).expand(2**40)}, {"a": torch.eye(3).to_sparse()},
                    {"a": torch.ones(2, device="meta")},
                    {"a": torch.ones(3, dtype=torch.float8_e4m3fn)}, {"a": torch.ones(3,
                    dtype=torch.complex64)},
                    {f"n{i}": torch.ones(100).expand(10**4, 100) for i in range(3)},
                    {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, bytearray(100),
                ])  # fmt: skip
                torch.save(own, path)
            case _:
                path.write_bytes(pickle.dumps(random.choice([Bomb(), {"a": Bomb()}, 1, b"x" * 100])))

    return change


def change_onnx(name: str) -> Callable[[Random, Path], None]:
    """A model whose fields lie."""

    def message(random: Random, document: Any) -> Any:
        """A part of the model that has fields, larger ones more often."""
        while True:
            inner = [
                item
                for field, value in document.ListFields() if field.message_type is not None
                for item in (value if isinstance(value, Sequence) or hasattr(value, "add") else [value])
            ]  # fmt: skip
            if not inner or random.random() < 0.2:
                return document
            document = random.choice(inner)

    def change(random: Random, folder: Path) -> None:
        path = folder / name
        model = onnx.load_model_from_string(path.read_bytes())
        for _ in range(random.choice([1, 1, 2, 5])):
            own = message(random, model)
            field = random.choice(own.DESCRIPTOR.fields)
            held = getattr(own, field.name)
            many = hasattr(held, "append")
            match random.randrange(4):
                case 0:
                    own.ClearField(field.name)
                case 1 if many and len(held):
                    held.extend(list(held) * random.choice([1, 50]))
                case 2 if field.message_type is not None:
                    other = message(random, model)
                    if field.message_type == other.DESCRIPTOR:
                        held.append(other) if many else held.CopyFrom(other)
                case _:
                    with suppress(TypeError, ValueError, AttributeError, OverflowError):  # another type
                        evil = random.choice(EVIL)
                        held.append(evil) if many else setattr(own, field.name, evil)
        path.write_bytes(model.SerializeToString())

    return change


def change_folder(files: list[str]) -> Callable[[Random, Path], None]:
    """Files that are missing, links, folders or pipes."""

    def change(random: Random, folder: Path) -> None:
        path = folder / random.choice(files)
        path.unlink()
        match random.randrange(9):
            case 0:
                path.symlink_to("/etc/passwd")
            case 1:
                path.symlink_to(path)
            case 2:
                path.symlink_to(folder)
            case 3:
                path.mkdir()
            case 4:
                os.mkfifo(path)
            case 5:
                path.touch()
            case 6:
                path.symlink_to("/dev/zero")
            case 7:
                path.write_bytes(random.randbytes(random.randrange(300)))

    return change


def one_of(*changes: Callable[[Random, Path], None]) -> Callable[[Random, Path], None]:
    return lambda random, folder: random.choice(changes)(random, folder)


def signed(change: Callable[[Random, Path], None]) -> Callable[[Random, Path], None]:
    """With digests of the changed files, where they can be had: whoever changes them may write these."""

    def changed(random: Random, folder: Path) -> None:
        change(random, folder)
        if random.random() < 0.9:
            with suppress(Exception):
                names = "manifest.json", "selection.json"
                manifest, selection = (read_json(folder / name) for name in names)
                selection.pop("sha256", None)
                write_facts(folder, manifest, selection)

    return changed


def change_config(random: Random, folder: Path) -> None:
    """Sizes of a built-in model that nothing could hold, next to the usual."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for _ in range(random.randrange(1, 3)):
        key = random.choice([*config, "dropout", "eps", "pad_id", "colour"])
        config[key] = random.choice(
            [10**12, 10**6, 10**4, 2**63, -1, 0, 1.5, "8", None, True, 10**30, float("nan"), [8, 8]]
        )
    path.write_text(json.dumps(config))


# What is read, and where to


def read_outputs(folder: Path) -> None:
    """Write into the place that `place` names, as every command does."""
    place = Path((folder / "place").read_text())
    check_replaceable(place, [folder / "data.npz"])
    with replace_folder(place) as partial:
        (partial / "manifest.json").write_text("{}")
    write_report(place, Report())
    replace_file(place / "file", "text")
    shutil.rmtree(place.resolve())


def change_place(random: Random, folder: Path) -> None:
    inside = folder / "inside"
    inside.mkdir()
    (folder / "data.npz").write_text("precious")
    (inside / "file").write_text("precious")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "absent" / "x")
    (folder / "out").symlink_to(folder / "real")
    (folder / "real").mkdir()
    places = [
        folder, inside, inside / "file", inside / "file" / "x", folder / "loop", folder / "dangling",
        folder / "out",
        folder / "loop" / "x", folder / "new" / "a" / "b", folder / ("x" * 250), folder / ("x" * 300),
        folder / "a\0b",
        Path("/proc/self/x"), Path("/dev/null"), Path("/proc"), folder / "data.npz",
        folder / "inside" / "..",
        folder / "é\ud800", Path("/"), folder / ".", folder / "new" / ".." / "inside", Path(""),
        Path("/sys/x/y"),
    ]  # fmt: skip
    place = random.choice(places)
    (folder / "place").write_bytes(str(place).encode(errors="replace"))


def read_model(folder: Path) -> None:
    load_teacher(str(folder))


def read_artifact(folder: Path) -> None:
    asapc.load(folder)
    asapc.load(folder, stage="teacher")


def read_shards(folder: Path) -> None:
    with Shards(folder / "parts", {"model": "a", "data": "b"}) as shards:
        for key in [*shards.keys(), "layers.0", "layers.1"]:
            shards.get(key)
    shards.discard()


ARTIFACT = [
    "manifest.json",
    "model.safetensors",
    "graph.pt2",
    "teacher.pt2",
    "recipe.yaml",
    "selection.json",
]
CALIBRATION = ["calibration.json", "calibration.safetensors", "timings.json"]

TARGETS: dict[str, Target] = {
    "model": Target(
        one_of(change_config, change_config, change_json("config.json"), change_bytes("config.json"),
               change_tensors("model.safetensors"), change_bytes("model.safetensors"),
               change_folder(["config.json", "model.safetensors"])),
        read_model,
    ),
    "checkpoint": Target(change_checkpoint("weights.pt"), lambda f: read_state_dict(f / "weights.pt")),
    "npz": Target(
        one_of(change_npz("data.npz"), change_npz("data.npz"), change_folder(["data.npz"])),
        lambda f: list(open_data(str(f / "data.npz"), None).batches(4)),
    ),
    "safetensors": Target(
        one_of(change_tensors("data.safetensors"), change_bytes("data.safetensors"),
        change_folder(["data.safetensors"])),
        lambda f: list(open_data(str(f / "data.safetensors"), None).batches(4)),
    ),
    "calibration": Target(
        one_of(change_json("calibration.json"), change_json("timings.json"),
        change_bytes("calibration.json"),
               change_tensors("calibration.safetensors"), change_bytes("calibration.safetensors"),
               change_folder(CALIBRATION)),
        load_calibration,
    ),
    "artifact": Target(
        signed(one_of(
            change_json("manifest.json"), change_json("manifest.json"), change_json("selection.json"),
            change_bytes("manifest.json"), change_tensors("model.safetensors"),
            change_folder(ARTIFACT[:4]), change_pt2("graph.pt2"),
        )),
        read_artifact,
    ),
    "program": Target(
        change_pt2("teacher.pt2"), lambda f: load_program(f / "teacher.pt2").module(check_guards=False)
    ),
    "running": Target(change_pt2("teacher.pt2"), run_program, runs=True),
    "operators": Target(
        change_seed, lambda f: hostile_calls((f / "seed").read_text(), f / "last"), runs=True
    ),
    "growth": Target(grow_onnx, run_onnx, runs=True, bounded=True),
    "onnx": Target(
        one_of(change_onnx("teacher.onnx"), change_onnx("teacher.onnx"), change_bytes("teacher.onnx"),
               change_folder(["teacher.onnx", "w.bin"])),
        lambda f: load_teacher(str(f / "teacher.onnx")),
    ),
    "recipe": Target(
        one_of(change_yaml("recipe.yaml"), change_folder(["recipe.yaml"])),
        lambda f: load_recipe(f / "recipe.yaml")
    ),
    "gates": Target(
        one_of(change_yaml("gates.yaml"), change_folder(["gates.yaml"])),
        lambda f: load_gates(f / "gates.yaml")
    ),
    "grid": Target(one_of(change_yaml("grid.yaml"), change_folder(["grid.yaml"])),
    lambda f: load_grid(f / "grid.yaml")),
    "baseline": Target(
        one_of(change_json("report.json"), change_bytes("report.json"), change_folder(["report.json"])),
        lambda f: load_baseline(f / "report.json"),
    ),
    "shards": Target(
        one_of(change_json("parts/shards.json"), change_bytes("parts/shards.json"),
        change_bytes("parts/a.safetensors"),
               change_tensors("parts/a.safetensors"), change_folder(["parts/shards.json",
               "parts/a.safetensors"])),
        read_shards,
    ),
    "output": Target(change_place, read_outputs),
}  # fmt: skip


# The corpus


def build_corpus(folder: Path) -> None:
    """One folder of valid files for each target."""
    torch.manual_seed(0)
    places = {name: folder / name for name in TARGETS}
    for place in places.values():
        place.mkdir(parents=True)
    model = SinkformerText(**TEXT).eval()  # type: ignore[arg-type]
    teacher = places["model"]
    (teacher / "config.json").write_text(json.dumps({"architecture": "sinkformer-text", **TEXT}))
    save_file(model.state_dict(), teacher / "model.safetensors")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, places["checkpoint"] / "weights.pt")
    inputs = np.random.default_rng(0).integers(1, 20, (60, 8))
    np.savez(places["npz"] / "data.npz", inputs=inputs, labels=inputs[:, 0] % 3)
    save_file({"inputs": torch.from_numpy(inputs)}, places["safetensors"] / "data.safetensors")
    data = str(places["npz"] / "data.npz")
    for name, text in (("recipe", RECIPE), ("grid", GRID), ("gates", GATES)):
        (places[name] / f"{name}.yaml").write_text(text)
    recipe = Recipe.from_dict({"operator": "asap", "c_transforms": 1, "side": "source",
    "features": ["coarse:2"],
                               "batch_size": 8, "max_examples": 32})  # fmt: skip
    loaded = load_teacher(str(teacher))
    for place in (places["calibration"], places["artifact"]):
        place.rmdir()
    calibrate(loaded, data, places["calibration"], recipe, Progress())
    compile(loaded, places["calibration"], places["artifact"], None, data, Progress())
    write_onnx(places["onnx"])
    program = torch.export.export(model, (torch.from_numpy(inputs[:3]),))
    for name in ("program", "running"):
        torch.export.save(program, places[name] / "teacher.pt2")
    (places["baseline"] / "report.json").write_text(json.dumps(a_report()))
    with Shards(places["shards"] / "parts", {"model": "a", "data": "b"}) as shards:
        shards.put("layers.0", {"gram": torch.eye(3)}, {"tokens": 3})
    own = next((places["shards"] / "parts").glob("*.safetensors"))
    shutil.copy(own, own.with_name("a.safetensors"))


def write_onnx(folder: Path) -> None:
    """A weight in a file of its own, one inside, a function, a loop and a branch."""
    make, info = onnx.helper, onnx.helper.make_tensor_value_info
    number, flag = onnx.TensorProto.INT64, onnx.TensorProto.BOOL
    outside = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    (folder / "w.bin").write_bytes(outside.raw_data)
    onnx.external_data_helper.set_external_data(outside, "w.bin", offset=0, length=64)
    outside.ClearField("raw_data")
    constants = [
        onnx.numpy_helper.from_array(np.array(value, kind), name)
        for name, value, kind in (
            ("trips", 3, np.int64), ("true", True, bool), ("b", [0.1, 0.2], np.float32),
            ("shape", [0, 2, 2], np.int64),
        )
    ]  # fmt: skip
    body = make.make_graph(
        [make.make_node("MatMul", ["x_in", "w"], ["x_out"]), make.make_node("Identity", ["go"], ["on"])],
        "body", [info("i", number, []), info("go", flag, []), info("x_in", 1, None)],
        [info("on", flag, []), info("x_out", 1, None)],
    )  # fmt: skip
    branch = make.make_graph([make.make_node("Neg", ["z"], ["n"])], "b", [], [info("n", 1, None)])
    nodes = [
        make.make_node("Loop", ["trips", "true", "x"], ["y"], body=body),
        make.make_node("Softmax", ["y"], ["s"], axis=-1),
        make.make_node("Reshape", ["s", "shape"], ["r"]),
        make.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1]),
        make.make_node("Plus", ["t", "b"], ["z"], domain="own"),
        make.make_node("If", ["true"], ["out"], then_branch=branch, else_branch=branch),
    ]  # fmt: skip
    opsets = [make.make_opsetid("", 18), make.make_opsetid("own", 1)]
    plus = make.make_function(
        "own", "Plus", ["a", "b"], ["c"], [make.make_node("Add", ["a", "b"], ["c"])], opsets[:1]
    )
    graph = make.make_graph(
        nodes, "g", [info("x", 1, ["n", 4])], [info("out", 1, None)], [outside, *constants]
    )
    model = make.make_model(graph, opset_imports=opsets, functions=[plus], ir_version=10)
    (folder / "teacher.onnx").write_bytes(model.SerializeToString())


def a_report() -> dict[str, Any]:
    site = {"name": "layers.0.mha", "operator": "asap", "metrics": {"attention_rel_l2": 0.1, "r2": 0.9},
            "confidence": {"attention_rel_l2": [0.05, 0.15]}}  # fmt: skip
    return {
        "format_version": 2, "fingerprints": {"teacher": "a", "data": "b"}, "sites": [site],
        "model": {"prediction_agreement": 0.99, "confidence": {"prediction_agreement": [0.98, 1.0]}},
        "splits": {"calibration": 10, "selection": 5, "gate": 5}, "environment": {"device": "cpu"},
    }  # fmt: skip


# Running


def status(field: str) -> int:
    """VmHWM and the like, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def run_case(name: str, number: int, seed: int, corpus: Path, work: Path) -> tuple[str, str]:
    """(outcome, details): "read", "refused", or what went wrong."""
    random = Random(f"{seed} {name} {number}")
    case = work / "case"
    shutil.copytree(corpus / name, case, symlinks=True)
    os.chdir(case)
    target = TARGETS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target.change(random, case)
    size = sum(p.lstat().st_size for p in case.rglob("*"))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(outcome_of(target, case, size)).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writing)
    outcome, details = waited(child, reading)
    if outcome == "signal" and (case / "last").exists():
        details += f" in {(case / 'last').read_text()}"
    os.chdir(work)
    escaped_to = [p for p in (work / "ESCAPED", corpus / "ESCAPED", Path("/tmp/ESCAPED")) if p.exists()]
    escaped_to += list(case.rglob("ESCAPED"))
    precious = case / "inside" / "file"
    if escaped_to or (precious.parent.is_dir() and precious.read_text() != "precious"):
        outcome, details = "escaped", f"{escaped_to or precious}"
    if sorted(os.listdir(work)) != ["case"]:
        outcome, details = "escaped", f"left beside its folder: {sorted(os.listdir(work))}"
    remove(case)
    return outcome, details


def waited(child: int, reading: int) -> tuple[str, str]:
    """What the child says, unless a signal ends it: its own alarm is one, where Python is not reached."""
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        own = signal.Signals(os.WTERMSIG(ended))
        return ("hang", "beyond Python") if own == signal.SIGALRM else ("signal", own.name)
    if not answer:
        return "uncaught", f"exit code {os.WEXITSTATUS(ended)}, without a word"
    outcome, details = json.loads(answer)
    return str(outcome), str(details)


def outcome_of(target: Target, case: Path, size: int) -> tuple[str, str]:
    """In a process of its own, which ends with it."""
    space = status("VmSize") + (RUN_ADDRESS_SPACE if target.runs else ADDRESS_SPACE)
    resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(WAITING))  # if the exception is not raised by then, nothing raises it
        raise Hang(signal.Signals(number).name)

    for own in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(own, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(int(WAITING))
    outcome, details = "read", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(case)
    except AsapcError as error:
        outcome, details = "refused", str(error)
        if details != escaped(details):
            outcome = "unescaped"
        details.encode()
    except Hang as error:
        outcome, details = ("timed out", "") if target.runs else ("hang", str(error))
    except Exception as error:
        fails = target.runs and not isinstance(error, (AssertionError, TypeError, AttributeError))
        outcome, details = ("failed", str(error)[:200]) if fails else ("uncaught", traceback.format_exc())
    grown = status("VmHWM") - before
    most = RUN_MEMORY if target.bounded else RUN_ADDRESS_SPACE if target.runs else MEMORY
    if grown > most + RATIO * size:
        outcome, details = "memory", f"{grown >> 20} MiB more for {size} bytes ({outcome})"
    return outcome, details


def remove(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=[*TARGETS])
    parser.add_argument("--only", type=int, help="one case by its number")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [arguments.target] if arguments.target else list(TARGETS)
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    outcomes: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in names}
    seconds: collections.Counter[str] = collections.Counter()
    failures = 0
    start = time.monotonic()
    home = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="asapc-fuzz-") as temporary:
        corpus, work = Path(temporary, "corpus"), Path(temporary, "work")
        work.mkdir()
        build_corpus(corpus)
        try:
            for number in numbers:
                if time.monotonic() - start > 60 * arguments.minutes:
                    break
                name = names[number % len(names)]
                began = time.monotonic()
                outcome, details = run_case(name, number, arguments.seed, corpus, work)
                seconds[name] += time.monotonic() - began
                outcomes[name][outcome] += 1
                if outcome not in GOOD:
                    failures += 1
                    print(
                        f"{outcome}: --target {name} --only {number}\n{details}",
                        file=sys.stderr,
                        flush=True,
                    )
                elif arguments.only is not None:
                    print(f"{outcome}: {details}")
        finally:
            os.chdir(home)
    kinds = [*GOOD, *sorted({k for c in outcomes.values() for k in c} - {*GOOD})]
    for name, own in outcomes.items():
        print(
            f"{name:12s}"
            + "".join(f"  {kind} {own[kind]:5d}" for kind in kinds)
            + f"  {seconds[name]:5.0f} s"
        )
    total = sum(sum(own.values()) for own in outcomes.values())
    print(f"{total} cases, {failures} failures, {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
