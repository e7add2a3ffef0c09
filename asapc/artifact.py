"""The compiled artefact: a folder written whole, read back without any of the teacher's code.

    manifest.json            what was compiled, from what, and how to call it
    model.safetensors        every weight and operator parameter, once
    recipe.yaml              the resolved recipe
    selection.json           how the operators were chosen, and every time that was measured: the only
                             file that two runs do not write alike
    graph.pt2                the compiled program (whole capture)
    lossless.pt2, teacher.pt2   the same model with lossless operators, and as captured
    modules/<i>.<stage>.pt2  the three programs of each module (capture per module)
    live/<i>.pt2             the compiled program of a module, or of several alike, for a live model

The .pt2 files hold no weights. The three stages share one set of weights, so that a report and a
benchmark need nothing but the folder (and, for a capture per module, the model around it). A weight
of program <i> is named <i>.NAME; where training after the replacement has moved the compiled
program's away from the teacher's, the compiled one is graph.<i>.NAME. What a module's program in live/
reads is the live model's, a tensor of the compiled program, or live.<j>.NAME, which nothing else has.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import AfterValidator, ConfigDict, StringConstraints, ValidationError, create_model
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

import asapc.kernels.library as _library  # registers torch.ops.asapc, which the programs call
from asapc.device import running_on
from asapc.errors import InputError
from asapc.formats import places
from asapc.formats.atomic import read_whole
from asapc.formats.json_text import plain, read_json
from asapc.formats.records import read
from asapc.inputs.load import build_factory
from asapc.inputs.paths import check_artifact
from asapc.inputs.pt2 import load_program, save_program
from asapc.inputs.reading import Reading
from asapc.inputs.recipe import Recipe
from asapc.inputs.settings import list_of
from asapc.inputs.weights import read_safetensors
from asapc.ir import Program
from asapc.operators.catalogue import convention_from_json
from asapc.passes.patches import CompiledModule
from asapc.program.call import (
    Call,
    Child,
    Tensors,
    Tree,
    Undescribable,
    described,
    kind_of,
    known_of,
    leaves,
    plain_spec,
    rebuilt,
    types_at_hand,
)
from asapc.program.calls import attribute, name_calls, sites_of
from asapc.program.code import GraphCode, flat_graph, tensors_of, traced_inputs, under
from asapc.program.compiled import OPERATORS, CompiledModel, Inside, Operators, site_line
from asapc.program.exported import exported_program
from asapc.program.live import Patch, constants_of, install, operator_name, prepared, warn_left
from asapc.program.monitor import attach
from asapc.program.state import QUESTIONS
from asapc.program.summary import Summary, shown_by
from asapc.terminal.printed import reason, short

FORMAT_VERSION = 6
SELECTION = "selection.json"
Stage = Literal["graph", "lossless", "teacher"]
STAGES: tuple[Stage, ...] = ("graph", "lossless", "teacher")
_SEEN = "asapc.seen_hashes"
_MODEL = "model."  # weights of the model around captured modules
_LIVE = "live."
_DTYPES = {str(dtype).removeprefix("torch."): dtype
           for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}  # fmt: skip

assert _library is not None


@dataclass
class Artifact:
    """A loaded folder. programs: stage -> one program for each captured part of the model.

    trusted: read with trust, see read_artifact.
    """

    folder: Path
    manifest: dict[str, Any]
    programs: dict[Stage, list[Program]]
    seen_hashes: frozenset[int]
    model_weights: dict[str, Tensor]
    selection: dict[str, Any]
    trusted: bool = False

    @property
    def fit_seconds(self) -> float:
        """Spent on calibration."""
        return float(self.selection["fit_seconds"])

    @property
    def capture(self) -> str:
        return str(self.manifest["capture"])

    @property
    def site_names(self) -> list[str]:
        """Of the manifest's sites, in order."""
        return [str(site["name"]) for site in self.manifest["sites"]]

    def running_on(
        self, device: torch.device, surrounding: nn.Module | None
    ) -> AbstractContextManager[None]:
        """All programs, and the model around them, on the device for a while (asapc.device)."""
        graphs = [program.graph for parts in self.programs.values() for program in parts]
        return running_on(device, [surrounding, *graphs])

    def signature(self) -> inspect.Signature:
        """The arguments the model was captured with, for reading data."""
        return signature_of(self.manifest["call"])


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """How the model is called: names of its positional and keyword arguments."""
    return {"args": list(names[: len(args)]), "kwargs": sorted(kwargs)}


def signature_of(call: Mapping[str, Any]) -> inspect.Signature:
    kinds = inspect.Parameter
    return inspect.Signature(
        [kinds(str(name), kinds.POSITIONAL_OR_KEYWORD) for name in call["args"]]
        + [kinds(str(name), kinds.KEYWORD_ONLY) for name in call["kwargs"]]
    )


def write_artifact(
    folder: Path,
    manifest: Mapping[str, Any],
    recipe: Recipe,
    programs: Mapping[Stage, Sequence[Program]],
    seen_hashes: Sequence[int],
    model: nn.Module | None,
    selection: Mapping[str, Any],
    modules: tuple[Sequence[CompiledModule], Mapping[str, str]] = ((), {}),
) -> None:
    """Write everything into an existing empty folder. The same inputs give the same bytes.

    model: the module around captured modules, whose other weights are kept too.  selection: the trail,
    see passes.select, and fit_seconds; what holds times is apart from the rest.  modules: for a live
    model, and the sites that have none, with the reason.
    """
    tensors: dict[str, Tensor] = {}
    files: dict[str, dict[str, Any]] = {}
    weights = {} if model is None else tensors_of(model)
    for stage in STAGES:
        for index, program in enumerate(programs[stage]):
            exported = _exported(program)
            calls = sites_of(program)
            assert name_calls(exported.graph_module, calls), "a program is written call for call"
            prefix = f"{index}."
            for name, tensor in exported.state_dict.items():
                tensors.setdefault(prefix + name, tensor.detach().contiguous().clone())
            path = f"{stage}.pt2" if program.name == "" else f"modules/{index}.{stage}.pt2"
            (folder / path).parent.mkdir(exist_ok=True)
            save_program(exported, folder / path)
            entry = files.setdefault(
                str(index), {"name": program.name, "calls": {}, **_output(programs, index)}
            )
            entry[stage], entry["calls"][stage] = path, calls
            start = f"{program.name}." if program.name else ""
            entry["plain"] = sorted({*entry.get("plain", ())} | {
                name for name in exported.state_dict if start + name not in weights
            })  # fmt: skip
    if model is not None and manifest["capture"] == "module":
        for name, tensor in model.state_dict().items():
            tensors[_MODEL + name] = tensor.detach().contiguous().clone()
    live = {"programs": _write_modules(folder, modules[0], tensors), "left": dict(modules[1])}
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    text = json.dumps(plain(selection), indent=2, allow_nan=False)
    (folder / SELECTION).write_text(text + "\n", encoding="utf-8")
    document = {
        "format_version": FORMAT_VERSION, **manifest, "programs": list(files.values()), "live": live,
    }  # fmt: skip
    _finish(folder, document, tensors, seen_hashes)


def _output(programs: Mapping[Stage, Sequence[Program]], index: int) -> dict[str, Any]:
    """What a captured module returns, where a file's plain containers are not it; see returns_as."""
    program = programs["teacher"][index]
    call = next((call for call in program.calls if not call.name), None)
    if not program.name or call is None:
        return {}
    try:
        return {"output": described(call.output, [], output=True).to_json()}
    except Undescribable:
        return {}


def returns_as(artifact: Artifact) -> None:
    """Let the programs of modules return the types that the modules do, where the process has them.

    The code around a captured module may take its output apart by name.
    """
    for programs in artifact.programs.values():
        for program, entry in zip(programs, artifact.manifest["programs"], strict=True):
            codegen = program.graph.graph._codegen
            if "output" not in entry or not isinstance(codegen, _PyTreeCodeGen):
                continue
            tree = read(Tree, entry["output"], "output")
            shape = rebuilt(tree, [0] * sum(1 for _ in leaves(tree)), types_at_hand(tree))
            spec = pytree.tree_structure(shape)
            told = codegen.pytree_info.out_spec
            if told is not None and told.num_leaves == spec.num_leaves:
                codegen.pytree_info = codegen.pytree_info._replace(out_spec=spec)
                program.graph.recompile()


def _write_modules(
    folder: Path, modules: Sequence[CompiledModule], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """The programs of live modules, one for all alike; tensors that only they have go into `tensors`."""
    entries: dict[str, dict[str, Any]] = {}
    for number, module in enumerate(modules):
        entry = {
            "dtype": str(module.dtype).removeprefix("torch."),
            "call": module.call.to_json(),
            "children": [child.to_json() for child in module.children],
        }
        graph = module.program.graph
        read = [node for node in graph.graph.nodes if node.op == "get_attr"]
        shapes = [[str(node.target), *attribute(graph, node).shape] for node in read]
        key = json.dumps([graph.graph.python_code("self").src, shapes, entry])
        if key not in entries:
            path = f"live/{len(entries)}.pt2"
            (folder / path).parent.mkdir(exist_ok=True)
            save_program(_exported(module.program), folder / path)
            entries[key] = {"file": path, **entry, "modules": []}
        names = {name: f"{index}.{stored}" for name, (index, stored) in module.fitted.items()}
        for name, tensor in module.constants.items():
            names[name] = f"{_LIVE}{number}.{name}"
            tensors[names[name]] = tensor.detach().contiguous().clone()
        entries[key]["modules"].append(
            {
                "name": module.program.name,
                "sites": list(module.sites),
                "tensors": names,
                "own_forward": module.own_forward,
                "inside": [inner.to_json() for inner in module.inside],
            }
        )
    return list(entries.values())


def write_refreshed(
    folder: Path,
    artifact: Artifact,
    manifest: Mapping[str, Any],
    weights: Mapping[tuple[int, str], Tensor],
    seen_hashes: Collection[int],
    edit: Callable[[GraphModule], None] | None = None,
) -> None:
    """Write the artefact with other weights in its compiled programs; teacher and lossless stay.

    artifact: with all its stages read. weights: by (number of the program, name). edit: changes a
    compiled program's graph in place, its inputs, outputs and shapes excepted. Whatever else the old
    folder holds, a report of the old weights among it, is left behind.
    """
    tensors = read_safetensors(artifact.folder / "model.safetensors")
    for (index, name), tensor in weights.items():
        others = [artifact.programs[stage][index].graph for stage in ("lossless", "teacher")]
        shared = any(name in graph.state_dict() for graph in others)
        key = f"graph.{index}.{name}" if shared else f"{index}.{name}"
        tensors[key] = tensor.detach().contiguous().clone()
    for entry in artifact.manifest["programs"]:
        for stage in STAGES:
            target = _inside(folder, entry[stage])
            target.parent.mkdir(parents=True, exist_ok=True)
            source = _inside(artifact.folder, entry[stage])
            _copy_program(source, target, edit if stage == "graph" else None, artifact.trusted)
    for entry in artifact.manifest["live"]["programs"]:
        target = _inside(folder, entry["file"])
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_program(_inside(artifact.folder, entry["file"]), target, edit, artifact.trusted)
    for name in ("recipe.yaml", SELECTION):
        shutil.copyfile(artifact.folder / name, folder / name)
    _finish(folder, manifest, tensors, seen_hashes)


def places_moved(manifest: Mapping[str, Any], folder: Path, other: str | Path) -> dict[str, Any]:
    """The manifest of a copy of `folder` in `other`, see formats.places."""

    def moved(entry: Mapping[str, Any]) -> dict[str, Any]:
        data = {"data": places.moved(str(entry["data"]), folder, other)} if "data" in entry else {}
        earlier = {"earlier": [moved(x) for x in entry["earlier"]]} if "earlier" in entry else {}
        return {**entry, **data, **earlier}

    refresh = {"refresh": moved(manifest["refresh"])} if "refresh" in manifest else {}
    teacher = dict(manifest["teacher"])
    if "onnx" in manifest:
        teacher["source"] = places.moved(teacher["source"], folder, other)
    return {**moved(manifest), **refresh, "teacher": teacher}


def _copy_program(
    source: Path, target: Path, edit: Callable[[GraphModule], None] | None, trust: bool
) -> None:
    if edit is None:
        shutil.copyfile(source, target)
        return
    exported = load_program(source, trust=trust)
    edit(exported.graph_module)
    save_program(exported, target)


def _finish(
    folder: Path,
    document: Mapping[str, Any],
    tensors: dict[str, Tensor],
    seen_hashes: Collection[int],
) -> None:
    signed = [h - (1 << 64) if h >= 1 << 63 else h for h in sorted(set(seen_hashes))]
    tensors[_SEEN] = torch.tensor(signed, dtype=torch.int64)
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps(document, indent=2, allow_nan=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")
    for written in folder.rglob("*"):
        written.chmod(0o755 if written.is_dir() else 0o644)


def _exported(program: Program) -> ExportedProgram:
    """For a file, which names no types: outputs in plain containers."""
    exported = exported_program(program)
    signature = exported.module_call_graph[0].signature
    assert signature is not None
    signature.out_spec = plain_spec(signature.out_spec)
    return exported


def read_artifact(
    folder: str | Path, stages: Sequence[Stage] = STAGES, *, trust: bool = False
) -> Artifact:
    """Load the programs of some stages. Raises InputError for a missing or unsafe folder.

    trust: the folder is the user's own, and its programs may call operators that are not on the list.
    """
    return read_whole(folder, lambda: _read(Path(folder), stages, trust))


def _read(place: Path, stages: Sequence[Stage], trust: bool) -> Artifact:
    manifest = read_manifest(place)
    tensors = read_safetensors(place / "model.safetensors")
    programs: dict[Stage, list[Program]] = {stage: [] for stage in stages}
    for index, entry in enumerate(manifest["programs"]):
        shared = under(tensors, f"{index}.")
        for stage in stages:
            weights = {**shared, **under(tensors, f"{stage}.{index}.")}
            path = _inside(place, entry[stage])
            graph = _module(load_program(path, weights, trust=trust, sizes=False), path)
            if not name_calls(graph, entry["calls"][stage]):
                raise InputError(
                    f"{path}: must have one operator call for each site that the manifest lists",
                    got=f"{len(entry['calls'][stage])} sites listed", help="compile again",
                )  # fmt: skip
            programs[stage].append(Program(str(entry["name"]), graph, (), {}, None))
    seen = tensors.get(_SEEN, torch.empty(0, dtype=torch.int64))
    if seen.dtype != torch.int64 or seen.dim() != 1:
        raise InputError(f"{place}: {_SEEN} must list integers", got=f"{seen.dtype} {[*seen.shape]}")
    return Artifact(
        place, manifest, programs, frozenset(h & ((1 << 64) - 1) for h in seen.tolist()),
        under(tensors, _MODEL), _read_selection(place / SELECTION), trust,
    )  # fmt: skip


def read_exported(artifact: Artifact, stage: Stage = "graph") -> ExportedProgram:
    """The one program of a model captured whole, with its weights, as torch.export has it."""
    tensors = read_safetensors(artifact.folder / "model.safetensors")
    weights = {**under(tensors, "0."), **under(tensors, f"{stage}.0.")}
    place = _inside(artifact.folder, artifact.manifest["programs"][0][stage])
    return load_program(place, weights, trust=artifact.trusted)


def _module(exported: ExportedProgram, path: Path) -> GraphModule:
    try:
        graph = exported.module(check_guards=False)
    except Exception as error:  # torch raises many types for a program whose parts disagree
        raise InputError(
            f"{path}: must be a program that can be run", got=reason(error),
            help="compile again",
        ) from error  # fmt: skip
    for name in ("train", "eval"):  # a program has one mode: these may be called, not fail
        graph.__dict__.pop(name, None)
    assert isinstance(graph, GraphModule)
    return graph


def read_manifest(folder: Path) -> dict[str, Any]:
    """manifest.json, checked for what the rest relies on."""
    path = folder / "manifest.json"
    check_artifact(folder)
    try:
        manifest = read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: must be readable JSON", got=str(error)) from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise InputError(
            f"{path}: format_version must be {FORMAT_VERSION}",
            got=version,
            help="compile again with this version of asapc",
        )
    checked: dict[str, Any] = manifest
    _check_manifest(path, checked)
    return checked


def _made(make: Callable[[Any], Any]) -> Any:
    """The type of what this reads without a KeyError, a TypeError or the like."""

    def check(value: Any) -> Any:
        try:
            make(value)
        except (InputError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(reason(error)) from None
        return value

    return Annotated[Any, AfterValidator(check)]


def _keys(**types: Any) -> Any:
    """The type of a mapping that has these keys, and any others."""
    return create_model("_Keys", __config__=ConfigDict(strict=True), **types)


def _one_of(words: Iterable[str]) -> Any:
    return Annotated[str, StringConstraints(pattern=f"^({'|'.join(words)})$")]


_Texts, _Number = list[str], float | None
_Names = list[Annotated[str, StringConstraints(pattern=r"^[^\W\d]\w*$")]]
_Program = Annotated[str, StringConstraints(pattern=r"\.pt2$")]
_Call = _made(partial(Call.from_json, where="call"))
_Site = _keys(
    name=str, operator=str, reason=str, convention=_made(convention_from_json), replay_error=_Number,
    replay=dict[str, float], side=str | None, c_transforms=int | None, rescaled=bool | None,
    coefficients=str | None, features=_Texts | None, fit=str | None, fit_converged=bool | None,
    r2=_Number, condition_number=_Number, constants=dict[str, Literal["parameter", "buffer"]],
    no_gradient=str | None, aim=(str | None, None), points=(str | None, None),
    heads=(int | None, None), head_dim=(int | None, None),
    selection_attention_rel_l2=(_Number, None),
)  # fmt: skip
_Module = _keys(
    name=str, sites=_Texts, tensors=dict[str, str], own_forward=bool,
    inside=list_of(_made(partial(Inside.from_json, where="inside"))),
)  # fmt: skip
_Live = _keys(
    file=_Program, dtype=_one_of(_DTYPES), call=_Call, modules=list_of(_Module),
    children=list_of(_made(partial(Child.from_json, where="child"))),
)  # fmt: skip
_Part = _keys(
    name=str, plain=_Texts, calls=_keys(**dict.fromkeys(STAGES, _Texts)),
    **dict.fromkeys(STAGES, _Program),
    output=(_made(partial(read, Tree, where="output")), None),
)  # fmt: skip
_MANIFEST = _keys(
    capture=Literal["whole", "module"], call=_keys(args=_Names, kwargs=_Names), forward=_Call | None,
    teacher=_keys(source=str, fingerprint=str), data=str, calibration_order=str,
    programs=list_of(_Part, 1), sites=list_of(_Site, 1),
    refused=list_of(_keys(name=str, status=str, reason=str)),
    live=_keys(programs=list_of(_Live), left=dict[str, str]),
    sizes=(str, ""), questions=(list_of(_one_of(QUESTIONS)), []), refresh=(dict[str, Any], {}),
    onnx=(_keys(inputs=_Texts, outputs=_Texts), None),
    warnings=(list_of(_keys(sites=_Texts, text=str)), []),
)  # fmt: skip


def _check_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises InputError where a key that the rest relies on is missing or of another type."""
    try:
        _MANIFEST.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        *around, key = map(str, first["loc"])
        rule = f"{key} {first['msg'].replace('Input should', 'must')}".replace(" Value error, ", ": ")
        if first["type"] == "missing":
            rule = f"must have {key!r}"
        raise InputError(
            f"{path}: {': '.join([*around, rule])}", got=short(first["input"]), help="compile again"
        ) from None
    programs, live, sites = manifest["programs"], manifest["live"]["programs"], manifest["sites"]
    files = [entry[stage] for entry in programs for stage in STAGES]
    for file in (*files, *(entry["file"] for entry in live)):
        _inside(path.parent, file)
    names = [site["name"] for site in sites]
    called_for = [site["name"] for site in sites if site["operator"] != "teacher"]
    rules = {
        "a model captured whole has a forward": bool(manifest["forward"])
        == (manifest["capture"] == "whole"),
        "every program has a file of its own": len({*files}) == len(files),
        "every site has a name of its own": len({*names}) == len(names),
        "a live module has sites of the model": all(
            {*module["sites"]} <= {*names} for entry in live for module in entry["modules"]
        ),
    }
    for stage, wanted in (("lossless", names), ("graph", called_for), ("teacher", [])):
        called = [site for entry in programs for site in entry["calls"][stage]]
        rule = f"the {stage} programs call an operator for each of its sites, once"
        rules[rule] = sorted(called) == sorted(wanted)
    for rule, holds in rules.items():
        if not holds:
            raise InputError(f"{path}: {rule}", help="compile again")


def _read_selection(path: Path) -> dict[str, Any]:
    """selection.json, checked for what the rest relies on."""
    try:
        selection = read_json(path)
    except FileNotFoundError:
        selection = None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: must be readable JSON", got=str(error)) from error
    seconds = selection.get("fit_seconds") if isinstance(selection, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise InputError(f"{path}: fit_seconds must be a number", got=seconds, help="compile again")
    checked: dict[str, Any] = selection
    for key in ("sites", "rounds"):
        listed = checked.get(key, [])
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise InputError(f"{path}: {key} must be a list of mappings", help="compile again")
    return checked


def _inside(folder: Path, relative: Any) -> Path:
    """A path of the manifest, which must not leave the folder."""
    try:
        path = Path(os.path.realpath(folder / str(relative)))
        is_inside = path.is_relative_to(os.path.realpath(folder))
    except ValueError:  # a zero byte, half of a surrogate pair
        is_inside = False
    if not is_inside:
        raise InputError(
            f"{folder}: the manifest must name files inside the folder", got=repr(relative)
        )
    return path


def load(
    out: str | Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    stage: Stage = "graph",
    sequence_group: Any = None,
    trust: bool = False,
) -> nn.Module:
    """The compiled model, with the teacher's call signature and output structure, in evaluation mode.

    out:   a folder `asapc compile` wrote; it may have been moved, and needs no training code.
    model: a live model, or a factory of it, that is patched in place: it keeps its class, hooks and
           layers (asapc.program.live). The artefact's weights are loaded into it, the teacher's or, of a
           refreshed artefact, the trained ones; what it has beyond them stays. A capture per module
           needs it, a capture of the whole model does not: without it a CompiledModel is rebuilt. Where
           the class of an output is not defined in the process, its outputs are a plain dict or tuple.
           A model that is refused is left as it was, its weights and earlier patches included. Where
           every site keeps the teacher's own code nothing is patched, with a warning.
    stage: "graph" is the compiled model, "lossless" and "teacher" what it was compared with.
    sequence_group: a process group of torch.distributed whose processes share every sequence, each its
           queries: all of them call the model with the same tensors, and get the same outputs. Forward
           only, without model= and without a monitor.  See asapc.program.sequence.
    trust: the folder is your own: its programs may call operators that files may not.
    The compiled model has enable_monitor(), disable_monitor() and monitor, see asapc.program.monitor.
    Raises InputError.
    """
    if sequence_group is not None and model is not None:
        raise InputError(
            "sequence_group= runs the program of the whole model", got="model= as well",
            help="drop model=: the artefact has the weights",
        )  # fmt: skip
    patches = model is not None and stage == "graph"  # patches are separate programs
    artifact = read_artifact(out, () if patches else (stage,), trust=trust)
    if model is None:
        if artifact.capture == "whole":
            return _rebuilt(artifact, stage, sequence_group)
        raise InputError(
            f"{out}: was captured per module and needs the model around it",
            help="asapc.load(OUT, model=factory), with the factory the teacher was built by",
        )
    built = model if isinstance(model, nn.Module) else model()
    if patches:
        return _patched(artifact, built)
    if artifact.capture == "whole":
        raise InputError(
            f"{out}: a live model is patched with the compiled stage", got=f"stage={stage!r}",
            help="drop model=, or stage=",
        )  # fmt: skip
    around(artifact, built)
    for program in artifact.programs[stage]:
        parent, _, leaf = program.name.rpartition(".")
        built.get_submodule(parent)._modules[leaf] = program.graph
    return built.eval()


def _both(captured: Tensors, program: Tensors) -> Tensors:
    """What a tensor must be like: sizes that were equal when the model was captured have one name there,
    which the program on disk does not keep."""
    if (captured.kind, len(captured.sizes)) != (program.kind, len(program.sizes)):
        return program
    pairs = zip(captured.sizes, program.sizes, strict=True)
    return replace(captured, sizes=tuple(q if isinstance(q, int) else p for p, q in pairs))


def _rebuilt(artifact: Artifact, stage: Stage, sequence_group: Any = None) -> CompiledModel:
    """The whole model of a stage, from the artefact alone."""
    manifest = artifact.manifest
    graph = artifact.programs[stage][0].graph
    fitted = {name: tensor for name, tensor in graph.named_buffers() if name.startswith("asapc_")}
    renamed = {name: operator_name(name) for name in fitted}
    call = Call.from_json(manifest["forward"], "forward")
    known = [_both(*pair) for pair in zip(call.tensors, known_of(traced_inputs(graph))[0], strict=False)]
    call = replace(call, tensors=tuple(known))
    places = [leaf.index for parameter in call.parameters for leaf in leaves(parameter.captured)]
    try:
        flat = flat_graph(
            graph, lambda name: f"{OPERATORS}.{renamed[name]}" if name in renamed else name
        )
        (outputs,) = flat.output_node().args
        count = len(cast(tuple[Any, ...], outputs))
        if len(places) != len(known) or any(leaf.index >= count for leaf in leaves(call.output)):
            raise ValueError("it takes or gives other tensors than the manifest says")
    except ValueError as error:
        raise InputError(
            f"{artifact.folder}: must hold a program that can be run", got=error, help="compile again"
        ) from error
    for name in fitted:
        del graph._buffers[name]
    lines = [site_line(site) for site in manifest["sites"]] if stage == "graph" else [f"stage: {stage}"]
    graph.add_module(OPERATORS, Operators({renamed[n]: t for n, t in fitted.items()}, lines))
    weights = [p.dtype for p in graph.parameters() if p.is_floating_point()]
    dtype, source = weights[0] if weights else torch.float32, str(manifest["teacher"]["source"])
    if sequence_group is not None:
        from asapc.program.sequence import SequenceCode, token_axes  # torch.distributed is large

        _warn_whole(manifest["sites"] if stage == "graph" else ())
        code: GraphCode = SequenceCode(flat, dtype, sequence_group, token_axes(call))
    else:
        code = GraphCode(flat, dtype)
    sites = _holding(manifest["sites"], stage)
    _put_constants(artifact, graph, sites)
    model = CompiledModel(graph, code, call, source, lines)
    model.forward.constants = constants_of(model, sites)()
    model.forward.questions = tuple(manifest.get("questions", ()))
    if stage == "graph" and sequence_group is None:
        attach(model, [(code, manifest["programs"][0]["calls"][stage])], manifest["sites"])
        shown_by(model, Summary(source, lines, artifact.folder))
    return model


def _holding(sites: Sequence[Mapping[str, Any]], stage: Stage) -> list[Mapping[str, Any]]:
    """The sites of a stage; where the model's own code stays, none of its weights is a constant."""
    own = [stage == "teacher" or (stage, site["operator"]) == ("graph", "teacher") for site in sites]
    pairs = zip(own, sites, strict=True)
    return [{**site, "constants": {}} if is_own else site for is_own, site in pairs]


def _put_constants(artifact: Artifact, graph: GraphModule, sites: Sequence[Mapping[str, Any]]) -> None:
    """Give the module of a program the weights that its sites hold as constants: they are loaded, saved
    and compared as the model's others are."""
    held = {name: kind for site in sites for name, kind in site["constants"].items()}
    held = {name: kind for name, kind in held.items() if name not in tensors_of(graph)}
    stored = read_safetensors(artifact.folder / "model.safetensors") if held else {}
    for name, kind in held.items():
        try:
            owner: nn.Module = graph
            *path, leaf = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if kind == "buffer":
                owner.register_buffer(leaf, stored[f"0.{name}"])
            else:
                tensor = stored[f"0.{name}"]
                owner.register_parameter(leaf, nn.Parameter(tensor, tensor.is_floating_point()))
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{artifact.folder}: model.safetensors must hold the constant {name}", got=reason(error),
                help="compile again",
            ) from error  # fmt: skip


def _warn_whole(sites: Sequence[Mapping[str, Any]]) -> None:
    """What a sequence group does not share out: right, and no faster than one process."""
    from asapc.program.sharded_sites import SITES

    alone = [f"{site['name']} ({site['operator']})" for site in sites if site["operator"] not in SITES]
    if alone:
        warnings.warn(
            f"asapc.load: every process computes these sites whole: {', '.join(alone)}", stacklevel=4
        )


def _patched(artifact: Artifact, model: nn.Module) -> nn.Module:
    """The live model, patched, with the artefact's weights.  Nothing is touched before all of it fits."""
    sites, left = artifact.manifest["sites"], artifact.manifest["live"]["left"]
    patches = read_patches(artifact)
    compiled = [name for patch in patches for name in patch.sites]
    kept = [site["name"] for site in sites if site["operator"] == "teacher"]
    if not compiled and not left and len(kept) < len(sites):
        raise InputError(
            f"{artifact.folder}: was compiled from a program, without a module that could be patched",
            help="drop model=",
        )
    weights = _weights_for(artifact, model)
    made = prepared(model, patches, sites)
    codes = [(ready.forward.code, patch.sites) for ready, patch in zip(made, patches, strict=True)]
    warn_left(left, compiled)
    if len(kept) == len(sites):
        warnings.warn(
            f"asapc.load: nothing is patched: every site keeps the model's own code ({', '.join(kept)})",
            stacklevel=3,
        )
    attach(model, codes, sites)
    with torch.no_grad():
        for live, stored in weights:
            live.copy_(stored)
    install(model, made)
    lines = [site_line(site) for site in sites]
    shown_by(model, Summary(type(model).__name__, lines, artifact.folder))
    return model.eval()


def read_patches(artifact: Artifact) -> list[Patch]:
    """What `live` of the manifest puts into a live model."""
    tensors = read_safetensors(artifact.folder / "model.safetensors")
    patches = []
    for entry in artifact.manifest["live"]["programs"]:
        path = _inside(artifact.folder, entry["file"])
        program = _module(load_program(path, trust=artifact.trusted, sizes=False), path)
        call = Call.from_json(entry["call"], "call")
        children = tuple(Child.from_json(child, "child") for child in entry["children"])
        for module in entry["modules"]:
            values = {}
            for name, stored in module["tensors"].items():
                trained = f"graph.{stored}"
                if stored not in tensors:
                    raise InputError(
                        f"{artifact.folder}: model.safetensors must hold {stored}", help="compile again"
                    )
                values[name] = tensors[trained if trained in tensors else stored]
            patches.append(
                Patch(
                    str(module["name"]),
                    program,
                    call,
                    children,
                    values,
                    tuple(map(str, module["sites"])),
                    _DTYPES[str(entry["dtype"])],
                    tuple(Inside.from_json(one, "inside") for one in module["inside"]),
                    module["own_forward"],
                )
            )
    return patches


def _weights_for(artifact: Artifact, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(the live model's tensor, the artefact's for it); the model's keeps its dtype and device.

    Raises InputError where one of them cannot be copied.
    """
    tensors = read_safetensors(artifact.folder / "model.safetensors")
    weights = dict(under(tensors, _MODEL))
    for index, entry in enumerate(artifact.manifest["programs"]):
        stored = {**under(tensors, f"{index}."), **under(tensors, f"graph.{index}.")}
        prefix = f"{entry['name']}." if entry["name"] else ""
        # Plain tensors, of attributes or of nothing but numbers, are the program's, not the model's.
        weights |= {prefix + name: t for name, t in stored.items() if name not in entry["plain"]}
    theirs = tensors_of(model)
    wrong = [
        name for name, tensor in weights.items()
        if name not in theirs or theirs[name].shape != tensor.shape
        or kind_of(theirs[name].dtype) != kind_of(tensor.dtype)
    ]  # fmt: skip
    if wrong:
        raise InputError(
            f"{artifact.folder}: the model must be the one that was compiled",
            got=f"a model without {', '.join(wrong[:4])} of the same shape",
            help="pass the model, or the factory and arguments, the teacher was built with",
        )
    empty = [name for name in weights if theirs[name].is_meta or theirs[name].is_inference()]
    if empty:
        raise InputError(
            f"{artifact.folder}: weights are loaded into the model, which must have memory for them",
            got=f"{', '.join(empty[:4])} on the meta device or made in inference mode",
            help="build it on a device (model.to_empty(device=...) will do), outside of inference_mode",
        )  # fmt: skip
    return [(theirs[name], tensor) for name, tensor in weights.items()]


def around(artifact: Artifact, model: nn.Module) -> None:
    """Load the artefact's weights into the model around the captured modules."""
    theirs, weights = model.state_dict(), artifact.model_weights
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    programs = next(iter(artifact.programs.values()))
    wrong = [
        *sorted(set(theirs) ^ set(weights)),
        *(name for name in weights if name in theirs and theirs[name].shape != weights[name].shape),
        *(program.name for program in programs if program.name not in modules),
    ]
    if wrong:
        raise InputError(
            f"{artifact.folder}: the model must be the one that was compiled",
            got=f"a model that has other {', '.join(wrong[:4])}",
            help="pass the factory and arguments the teacher was built with",
        )
    model.load_state_dict(weights)
    returns_as(artifact)


def surrounding_model(
    artifact: Artifact, model: str | nn.Module | None, reading: Reading
) -> nn.Module | None:
    """The model around captured modules: of --model or this one, with the artefact's weights."""
    if artifact.capture == "whole":
        if model is not None:
            raise InputError(
                f"{artifact.folder}: holds the whole model", got=f"--model {model}",
                help="drop --model",
            )  # fmt: skip
        return None
    if model is None:
        raise InputError(
            f"{artifact.folder}: was captured per module and needs the model around it",
            help="pass --model MODEL (and --kwargs) as for compile",
        )
    if isinstance(model, nn.Module):
        around(artifact, model)
        return model.eval()
    if reading.weights or Path(model).is_dir():
        built = reading.teacher(model).model
    else:
        built = build_factory(model, reading.kwargs)
    assert built is not None
    around(artifact, built)
    return built.eval()
