"""Exported programs on disk: a checked reader, and a writer that leaves weights and traces out.

torch.export.load unpickles and evaluates parts of the archive: it is meant for files one trusts. A
program is read here only after every part that could run code has been looked at:

    payloads      raw tensors only, nothing pickled, no custom objects
    sample inputs absent, or tensors that load with weights_only=True
    node targets  ATen, asapc and scalar operators
    expressions   symbols, numbers and arithmetic of sizes
"""

from __future__ import annotations

import ast
import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from asapc.errors import InputError

MAX_JSON_BYTES = 256 << 20
TARGETS = re.compile(
    r"(torch\.ops\.(aten|asapc)\.\w+(\.\w+)?|_operator\.\w+|math\.\w+|torch\.sym_\w+"
    r"|torch\._sym_\w+|torch\.ops\.higher_order\.wrap_with_set_grad_enabled)"
)
EXPRESSION_NAMES = {
    "Symbol", "Integer", "Rational", "Float", "Mod", "PythonMod", "FloorDiv", "CleanDiv", "Max",
    "Min", "CeilToInt", "FloorToInt", "IntTrueDiv", "FloatTrueDiv", "ToFloat", "TruncToInt",
    "Eq", "Ne", "Le", "Lt", "Ge", "Gt", "And", "Or", "Not", "Add", "Mul", "Pow", "PowByNatural",
    "Identity", "ceiling", "floor", "true", "false", "True", "False", "positive", "integer",
    "nonnegative", "evaluate", "int_oo", "oo", "Piecewise", "Where",
}  # fmt: skip
SYMBOL = re.compile(r"[suz]\d+|u\d+|zuf\d+")
NUMBER = re.compile(r"-?\d+(\.\d*)?(e[+-]?\d+)?")
NAMESPACES = {"torch", "_operator", "math", "builtins"}
GUARD_ATTRIBUTES = {"size", "dim", "stride", "dtype", "shape", "ndim"}


def save_program(exported: ExportedProgram, path: Path) -> None:
    """Write the program without its weights, example inputs, stack traces or origins.

    The weights belong to model.safetensors; load_program(path, weights=...) puts them back.
    The same program gives the same bytes.
    """
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for key in [k for k in node.meta if k not in ("val", "tensor_meta")]:
                    del node.meta[key]
    own = dict(exported.state_dict)
    examples = exported._example_inputs
    try:
        exported._state_dict = {name: _emptied(tensor) for name, tensor in own.items()}
        exported._example_inputs = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(exported, path)
    finally:
        exported._state_dict = own
        exported._example_inputs = examples


def _emptied(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty


def load_program(path: str | Path, weights: Mapping[str, Tensor] | None = None) -> ExportedProgram:
    """Read a .pt2 file after checking it (see the module's docstring).

    weights: replaces the state dict of a program written by save_program; every name is needed.
    Raises InputError for a missing, truncated or unsafe file, or for missing weights.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path}: must be a readable .pt2 file", got=error.strerror or str(error)
        ) from error
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        problem = _unsafe_part(archive)
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError) as error:
        raise InputError(
            f"{path}: must be a program written by torch.export.save",
            got=f"{type(error).__name__}: {error}",
            help="write it again with torch.export.save(program, path)",
        ) from error
    if problem is not None:
        raise InputError(
            f"{path}: a .pt2 file must hold nothing that runs code when it is read",
            got=problem,
            help="give the model as file.py:factory with --weights instead",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.load(io.BytesIO(content))
    except Exception as error:  # the reader raises many types for a damaged or newer program
        line = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InputError(
            f"{path}: must be a program this version of torch can read",
            got=line,
            help="export it again with the installed torch",
        ) from error
    if weights is not None:
        _attach(exported, weights, path)
    return exported


def _attach(exported: ExportedProgram, weights: Mapping[str, Tensor], path: Path) -> None:
    own = exported.state_dict
    missing = sorted(set(own) - set(weights))
    if missing:
        raise InputError(f"{path}: every weight must be in model.safetensors", got=missing[:4])
    exported._state_dict = {
        name: nn.Parameter(weights[name], requires_grad=weights[name].is_floating_point())
        if isinstance(tensor, nn.Parameter)
        else weights[name]
        for name, tensor in own.items()
    }


def _unsafe_part(archive: zipfile.ZipFile) -> str | None:
    """What in the archive could run code, in words, or None."""
    for info in archive.infolist():
        name = info.filename
        if name.endswith(".json") and info.file_size > MAX_JSON_BYTES:
            return f"{name} of {info.file_size} bytes"
        inner = name.split("/", 1)[-1]
        if inner.startswith("data/weights/") and inner.endswith(".pt"):
            return f"pickled weights ({name})"
        if inner.startswith("data/constants/") and inner.endswith(".pt"):
            return f"pickled constants ({name})"
        if "/custom_obj" in name or "/opaque_obj" in name or inner.startswith("data/aotinductor"):
            return f"a custom object ({name})"
        if inner.startswith("data/sample_inputs/") and info.file_size:
            try:
                torch.load(io.BytesIO(archive.read(name)), weights_only=True)
            except Exception as error:  # anything that plain tensors do not explain
                return f"example inputs that need a pickle ({type(error).__name__})"
        if inner.endswith("config.json"):
            for entry, payload in json.loads(archive.read(name)).get("config", {}).items():
                if payload.get("use_pickle"):
                    return f"a pickled tensor ({entry})"
        if inner.startswith("models/") and inner.endswith(".json"):
            problem = _unsafe_model(json.loads(archive.read(name)))
            if problem is not None:
                return problem
    return None


def _unsafe_model(model: Any) -> str | None:
    for key, value in _strings(model):
        callee = key == "target" and value.partition(".")[0] in NAMESPACES and "." in value
        if callee and not TARGETS.fullmatch(value):
            return f"a call of {value}"
        if key == "expr_str" and not _is_size_expression(value):
            return f"the expression {value[:80]!r}"
    for guard in model.get("guards_code", []):
        if not _is_plain_guard(guard):
            return f"the guard {guard[:80]!r}"
    nodes = model.get("graph_module", {}).get("graph", {}).get("nodes", [])
    for node in nodes:
        if not TARGETS.fullmatch(node.get("target", "")):
            return f"a call of {node.get('target')}"
    return None


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every (key, string) of a JSON document; strings in lists carry the list's key."""
    stack = [(key, value)]
    while stack:
        name, item = stack.pop()
        if isinstance(item, str):
            yield name, item
        elif isinstance(item, dict):
            stack.extend((str(k), v) for k, v in item.items())
        elif isinstance(item, list):
            stack.extend((name, v) for v in item)


def _is_size_expression(text: str) -> bool:
    """Arithmetic of symbols: no attribute, no subscript, no name beyond the known functions."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    allowed = (
        ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call, ast.Name,
        ast.Constant, ast.keyword, ast.Load, ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
    )  # fmt: skip
    for node in ast.walk(tree):
        if not isinstance(node, allowed):
            return False
        if isinstance(node, ast.Name):
            known = node.id in EXPRESSION_NAMES or SYMBOL.fullmatch(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            known = SYMBOL.fullmatch(node.value) or NUMBER.fullmatch(node.value)
        else:
            continue
        if not known:
            return False
    return True


def _is_plain_guard(text: str) -> bool:
    """Comparisons of sizes of inputs, L['x'].size()[0] and the like."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in GUARD_ATTRIBUTES:
            return False
        if isinstance(node, ast.Name) and node.id not in {"L", "len", "Mod", "max", "min", "float"}:
            return False
        if isinstance(node, ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.JoinedStr):
            return False
    return True
