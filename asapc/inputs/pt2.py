"""Exported programs on disk: a checked reader, and a writer that leaves weights and traces out.

torch.export.load is meant for trusted files. It unpickles parts of the archive, imports modules and
evaluates expressions that it names, allocates what it declares, and turns the names of nodes, arguments
and modules into Python source. So a program is taken apart first, and only what is known to be harmless
goes into a new archive, which torch reads:

    members       those torch.export.save writes, stored, each once; example inputs are dropped
    payloads      raw tensors only, of sizes that the file holds
    names         identifiers
    node targets  the operators of program_operators.py, arithmetic of numbers (program_calls.py)
    expressions   sizes that are quickly worked out (sizes.py)
    containers    tuples, lists and dicts

Reading is safe for any file. A program that runs computes what it says: its operators are no threat to
files or to other processes, but may take much memory or time. trust=True is for your own files: it lifts
the list of operators and the checks of their arguments, and nothing else.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from asapc.errors import InputError
from asapc.formats.json_text import parse_json
from asapc.formats.sizes import SYMBOL, is_size_expression
from asapc.inputs.program_calls import UnlistedCallError, UnsafeError, check_calls, walk
from asapc.inputs.program_operators import replace_unchecked
from asapc.terminal.printed import first_line, reason

_MODEL = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_CONFIGS = {
    "data/weights/model_weights_config.json": re.compile(r"weight_\d{1,6}"),
    "data/constants/model_constants_config.json": re.compile(r"tensor_\d{1,6}"),
}
_KEPT = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/version|\.data/serialization_id"
    r"|models/model\.json|data/weights/(weight_\d{1,6}|model_weights_config\.json)"
    r"|data/constants/(tensor_\d{1,6}|model_constants_config\.json)"
)
_EXPANDED = 1 << 20  # entries a tensor may have beyond those stored: with a stride of 0 they cost nothing

_IDENTIFIER = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)?")
_PATH = re.compile(r"[A-Za-z0-9_.:/@+ -]*")  # of modules and weights: "layers.0.to-q.weight"
_CONTAINERS = {"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}


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
    weights = dict(exported.state_dict)
    examples = exported._example_inputs
    try:
        exported._state_dict = {name: torch.empty(0, dtype=x.dtype) for name, x in weights.items()}
        for name in (name for name, tensor in weights.items() if isinstance(tensor, nn.Parameter)):
            exported._state_dict[name] = nn.Parameter(exported._state_dict[name], requires_grad=False)
        exported._example_inputs = None
        with warnings.catch_warnings(action="ignore"):
            torch.export.save(exported, path)
    finally:
        exported._state_dict = weights
        exported._example_inputs = examples


def load_program(
    path: str | Path,
    weights: Mapping[str, Tensor] | None = None,
    *,
    trust: bool = False,
    sizes: bool = True,
) -> ExportedProgram:
    """Read a .pt2 file after checking it (see the module's docstring).

    weights: replaces the state dict of a program written by save_program; every name is needed.
    trust: operators that are not on the list may be called.
    sizes: read those of every value. Those of the inputs alone are several times as fast to read, and
    enough for a program that is only run; other values keep their dtype and device.
    Raises InputError for a missing, truncated or unsafe file, or for missing weights.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: must be a readable .pt2 file", got="something else")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: must be a readable .pt2 file", got=reason(error)) from error
    try:
        harmless = _rebuilt(content, trust, sizes)
    except UnlistedCallError as operator:
        raise InputError(
            f"{path}: a program from a file may call only known operators (see SECURITY.md)",
            got=operator,
            help="if the file is your own, pass --trust (in Python trust=True)",
        ) from None
    except UnsafeError as problem:
        raise InputError(
            f"{path}: a .pt2 file must hold nothing that runs code when it is read",
            got=problem,
            help="write it again with torch.export.save(program, path), or give the model as "
            "file.py:factory with --weights instead",
        ) from None
    except (  # the last three: values of another type than the schema says, or without end
        zipfile.BadZipFile, ValueError, EOFError, OSError, RuntimeError, LookupError,
        TypeError, AttributeError, ArithmeticError,
    ) as error:  # fmt: skip
        raise InputError(
            f"{path}: must be a program written by torch.export.save",
            got=f"{type(error).__name__}: {error}",
            help="write it again with torch.export.save(program, path)",
        ) from error
    log = logging.getLogger("torch.export")  # shows tracebacks of what is reported below
    silent, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(action="ignore"):
            exported = torch.export.load(io.BytesIO(harmless))
            if not trust:
                replace_unchecked(exported)
    except Exception as error:  # the reader raises many types for a damaged or newer program
        raise InputError(
            f"{path}: must be a program this version of torch can read",
            got=first_line(error, 200),
            help="export it again with the installed torch",
        ) from error
    finally:
        log.disabled = silent
    if weights is not None:
        _attach(exported, weights, path)
    return exported


def _attach(exported: ExportedProgram, weights: Mapping[str, Tensor], path: Path) -> None:
    declared = exported.state_dict
    missing = sorted(set(declared) - set(weights))
    if missing:
        raise InputError(f"{path}: every weight must be in model.safetensors", got=missing[:4])
    placeholders = (node for node in exported.graph.nodes if node.op == "placeholder")
    values = {node.name: node.meta.get("val") for node in placeholders}
    for spec in exported.graph_signature.input_specs:
        expected, weight = values.get(getattr(spec.arg, "name", "")), weights.get(spec.target or "")
        if not isinstance(expected, Tensor) or weight is None:
            continue
        if (weight.shape, weight.dtype) != (expected.shape, expected.dtype):
            what, other = (f"{x.dtype} {[*x.shape]}" for x in (expected, weight))
            raise InputError(f"{path}: {spec.target} must be {what} in model.safetensors", got=other)
    exported._state_dict = {
        name: nn.Parameter(weights[name], requires_grad=weights[name].is_floating_point())
        if isinstance(tensor, nn.Parameter)
        else weights[name]
        for name, tensor in declared.items()
    }


def _rebuilt(content: bytes, trust: bool, sizes: bool) -> bytes:
    """A new archive of the harmless parts alone, so that no reader can find others in it."""
    members = _members(content)
    for name, pattern in _CONFIGS.items():
        config = _config(name, parse_json(members[name]), pattern, members)
        members[name] = json.dumps(config).encode()
    model = parse_json(members[_MODEL])
    if not _is_mapping(model, "range_constraints"):
        raise ValueError(f"{_MODEL} is no program")
    _strip(model)
    _check_model(model)
    check_calls(model, trust)
    if not sizes:
        _forget_sizes(model["graph_module"]["graph"])
    members[_MODEL] = json.dumps(model).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in {**members, _SAMPLES: b""}.items():
            archive.writestr(f"model/{name}", data)
    return buffer.getvalue()


def _members(content: bytes) -> dict[str, bytes]:
    """The members that are kept, by name below the archive's root folder."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        roots = {info.filename.partition("/")[0] for info in infos}
        if len(roots) != 1:
            raise UnsafeError("not one folder of parts" if infos else "an empty archive")
        if sum(info.file_size for info in infos) > len(content):
            raise UnsafeError("parts that are together larger than the file")
        members: dict[str, bytes] = {}
        for info in infos:
            name = info.filename.partition("/")[2]
            if info.compress_type != zipfile.ZIP_STORED:
                raise UnsafeError(f"a compressed part ({name})")
            if name == _SAMPLES or name.startswith("extra/"):
                continue
            if not _KEPT.fullmatch(name):
                raise UnsafeError(f"an unknown or pickled part ({name})")
            if name in members:
                raise UnsafeError(f"two parts of one name ({name})")
            members[name] = archive.read(info)
    for name in (_MODEL, *_CONFIGS):
        if name not in members:
            raise ValueError(f"no {name}")
    return members


def _config(name: str, document: Any, pattern: re.Pattern[str], members: Mapping[str, bytes]) -> Any:
    """Where tensors lie in the archive and their shapes, checked against what is there."""
    if not _is_mapping(document, "config"):
        raise ValueError(f"{name} lists no tensors")
    for tensor, entry in document["config"].items():
        if not _is_mapping(entry, "tensor_meta") or not _PATH.fullmatch(tensor):
            raise UnsafeError(f"{name}: the tensor {tensor!r}")
        path = entry.get("path_name")
        if entry.get("use_pickle") is not False or not pattern.fullmatch(str(path)):
            raise UnsafeError(f"{name}: a pickled tensor ({tensor})")
        stored = len(members.get(f"{Path(name).parent}/{path}", b""))
        meta = entry["tensor_meta"]
        sizes, strides = _integers(meta.get("sizes")), _integers(meta.get("strides"))
        entries = math.prod(sizes)
        negative = min([*sizes, *strides, *_integers([meta.get("storage_offset")])]) < 0
        if negative or entries > (max(stored, _EXPANDED) if stored else 0):
            raise UnsafeError(f"{name}: {tensor} of {entries} entries in {stored} bytes")
    return document


def _is_mapping(value: Any, key: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get(key), dict)


def _integers(values: Any) -> list[int]:
    """Of [{"as_int": 3}, ...].  Raises ValueError for anything else."""
    numbers = []
    for item in values if isinstance(values, list) else [None]:
        number = item.get("as_int") if isinstance(item, dict) else None
        if type(number) is not int:
            raise ValueError("a size, a stride or an offset is no number")
        numbers.append(number)
    return numbers


def _strip(model: dict[str, Any]) -> None:
    """Remove what torch would interpret and asapc does not need."""
    model["guards_code"] = []
    for _, _, item in walk(model):
        metadata = item.get("metadata") if isinstance(item, dict) else None
        if metadata is not None:
            modules = metadata.get("nn_module_stack") if isinstance(metadata, dict) else None
            plain = isinstance(modules, str) and modules.isprintable()
            item["metadata"] = {"nn_module_stack": modules} if plain else {}


def _forget_sizes(graph: dict[str, Any]) -> None:
    """Declare computed values without sizes: torch's reader parses every size as an expression."""
    inputs = {entry["as_tensor"]["name"] for entry in graph["inputs"] if "as_tensor" in entry}
    for name, meta in graph["tensor_values"].items():
        if name not in inputs:
            meta["sizes"], meta["strides"] = [], []


def _check_model(model: dict[str, Any]) -> None:
    """Raises UnsafeError for any string that could become more than a name or a constant."""
    for owner, key, text in _strings(model):
        called = key == "target" and "inputs" in owner  # by a node: that is for check_calls
        if not called and not _HARMLESS.get(key, _IDENTIFIER.fullmatch)(text):
            raise UnsafeError(f"{key} {text[:80]!r}")
    for symbol in model["range_constraints"]:
        if not SYMBOL.fullmatch(symbol):
            raise UnsafeError(f"the symbol {symbol[:80]!r}")


def _strings(document: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(the mapping it is in, its key, the string) for every string, names of weights and fields too."""
    for owner, key, item in walk(document):
        if isinstance(item, str):
            yield owner, key, item
        elif isinstance(item, dict):
            yield from ((item, "fqn", name) for name in item)


def _is_plain_container(text: str, keys: re.Pattern[str]) -> bool:
    """Whether this is a tree of tuples, lists and dicts: other containers import what they name."""
    try:
        protocol, top = parse_json(text)
        stack = [top]
        while stack:
            spec = stack.pop()
            stack.extend(spec["children_spec"])
            kind, context = spec["type"], spec["context"]
            if kind is None:
                continue
            if kind not in _CONTAINERS:
                return False
            names = parse_json(context)
            if names is not None and not all(type(n) is int or keys.fullmatch(n) for n in names):
                return False
    except (ValueError, TypeError, KeyError):
        return False
    return bool(protocol == 1)


# For each key, whether a string may stand there; under all other keys only a name may.
_HARMLESS: Mapping[str, Callable[[str], object]] = {
    **dict.fromkeys(("as_string", "as_strings"), lambda text: True),  # quoted wherever they go
    "nn_module_stack": lambda text: True,  # printable, and only shown
    "as_operator": lambda text: False,
    **dict.fromkeys(("as_float", "as_floats"), {"Infinity", "-Infinity", "NaN"}.__contains__),
    "expr_str": is_size_expression,
    "in_spec": partial(_is_plain_container, keys=_IDENTIFIER),
    "out_spec": partial(_is_plain_container, keys=_PATH),
    **dict.fromkeys(
        ("fqn", "parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name", "target",
         "torch_version", "verifiers"), _PATH.fullmatch,
    ),
}  # fmt: skip
