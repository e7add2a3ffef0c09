"""Writes an artefact, or writes it again with other weights.  The same inputs give the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from asapc.artifact.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    RECIPE,
    SELECTION,
    STAGES,
    TENSORS,
    Stage,
    files_of,
    inside,
    seal_of,
)
from asapc.artifact.read import HIDDEN, MODEL, SEEN, Artifact
from asapc.formats.json_text import plain
from asapc.formats.places import digest_of
from asapc.inputs.pt2 import load_program, save_program
from asapc.inputs.recipe import Recipe
from asapc.inputs.weights import read_safetensors
from asapc.ir import Program
from asapc.passes.patches import CompiledModule
from asapc.program.call import Undescribable, described, plain_spec
from asapc.program.calls import attribute, name_calls, sites_of
from asapc.program.code import tensors_of
from asapc.program.exported import exported_program


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
    """Write everything into an existing empty folder.

    model: the module around captured modules, whose other weights are written too.  selection: the trail,
    see passes.select, and fit_seconds; it holds times, so it has a file of its own.  modules: those for a
    live model, and the reason for each site that has none.
    """
    tensors: dict[str, Tensor] = {}
    weights = {} if model is None else tensors_of(model)
    held = {name for site in manifest["sites"] for name in site["constants"]}
    entries = []
    for index, teacher in enumerate(programs["teacher"]):
        entry: dict[str, Any] = {"name": teacher.name, "calls": {}, **_output(teacher)}
        start, plain_tensors = f"{teacher.name}." if teacher.name else "", set[str]()
        for stage in STAGES:
            program = programs[stage][index]
            exported, calls = _exported(program), sites_of(program)
            assert name_calls(exported.graph_module, calls), "a program is written call for call"
            for name, tensor in exported.state_dict.items():
                tensors.setdefault(f"{index}.{name}", _stored(tensor))
            hidden = exported.constants.keys() & held  # buffers that no state dict has
            tensors |= {HIDDEN + name: _stored(exported.constants[name]) for name in hidden}
            path = f"{stage}.pt2" if program.name == "" else f"modules/{index}.{stage}.pt2"
            _save(exported, folder / path)
            entry[stage], entry["calls"][stage] = path, calls
            plain_tensors |= {name for name in exported.state_dict if start + name not in weights}
        entries.append({**entry, "plain": sorted(plain_tensors)})
    if model is not None and manifest["capture"] == "module":
        tensors |= {MODEL + name: _stored(tensor) for name, tensor in model.state_dict().items()}
    live = {"programs": _write_modules(folder, modules[0], tensors), "left": dict(modules[1])}
    (folder / RECIPE).write_text(recipe.to_yaml(), encoding="utf-8")
    document = {"format_version": FORMAT_VERSION, **manifest, "programs": entries, "live": live}
    _finish(folder, document, plain(selection), tensors, seen_hashes)


def _output(program: Program) -> dict[str, Any]:
    """What a captured module returns, if plain data can describe it; see model.returns_as."""
    call = next((call for call in program.calls if not call.name), None)
    if not program.name or call is None:
        return {}
    try:
        return {"output": described(call.output, [], output=True).to_json()}
    except Undescribable:
        return {}


def _write_modules(
    folder: Path, modules: Sequence[CompiledModule], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Write one program for all live modules that are alike; their own tensors go into `tensors`."""
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
            _save(_exported(module.program), folder / path)
            entries[key] = {"file": path, **entry, "modules": []}
        constants = {name: f"live.{number}.{name}" for name in module.constants}
        tensors |= {constants[name]: _stored(tensor) for name, tensor in module.constants.items()}
        fitted = {name: f"{index}.{stored}" for name, (index, stored) in module.fitted.items()}
        entries[key]["modules"].append(
            {
                "name": module.program.name,
                "sites": list(module.sites),
                "tensors": {**fitted, **constants},
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
    """Write the artefact with other weights in its compiled programs; the other stages keep theirs.

    artifact: read with all of its stages. weights: by (number of the program, name). edit: changes a
    compiled program's graph in place, except inputs, outputs and shapes. Whatever else the old folder
    holds, such as a report of the old weights, is left behind.
    """
    tensors = read_safetensors(artifact.folder / TENSORS)  # those of `artifact` may have been trained
    for (index, name), tensor in weights.items():
        others = [artifact.programs[stage][index].graph for stage in ("lossless", "teacher")]
        shared = any(name in graph.state_dict() for graph in others)
        tensors[f"graph.{index}.{name}" if shared else f"{index}.{name}"] = _stored(tensor)
    files = {entry[stage]: stage for entry in artifact.manifest["programs"] for stage in STAGES}
    files |= {entry["file"]: "graph" for entry in artifact.manifest["live"]["programs"]}
    for file, stage in files.items():
        source, target = inside(artifact.folder, file), inside(folder, file)
        if edit is None or stage != "graph":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        else:
            exported = load_program(source, trust=artifact.trusted)
            edit(exported.graph_module)
            _save(exported, target)
    shutil.copyfile(artifact.folder / RECIPE, folder / RECIPE)
    _finish(folder, manifest, artifact.selection, tensors, seen_hashes)


def _finish(
    folder: Path,
    document: Mapping[str, Any],
    selection: Mapping[str, Any],
    tensors: dict[str, Tensor],
    seen_hashes: Collection[int],
) -> None:
    signed = [h - (1 << 64) if h >= 1 << 63 else h for h in sorted(set(seen_hashes))]
    save_file({**tensors, SEEN: torch.tensor(signed, dtype=torch.int64)}, folder / TENSORS)
    write_facts(folder, document, selection)
    for written in folder.rglob("*"):
        written.chmod(0o755 if written.is_dir() else 0o644)


def write_facts(folder: Path, manifest: Mapping[str, Any], selection: Mapping[str, Any]) -> None:
    """Write manifest.json with the digests of the files, and selection.json with one of both."""
    files = {file: digest_of(folder / file) for file in files_of(manifest)}
    _write_json(folder / MANIFEST, {**manifest, "files": files})
    _write_json(folder / SELECTION, {"sha256": seal_of(folder, selection), **selection})


def _exported(program: Program) -> ExportedProgram:
    """The program for a file, which names no types: it returns plain containers."""
    exported = exported_program(program)
    signature = exported.module_call_graph[0].signature
    assert signature is not None
    signature.out_spec = plain_spec(signature.out_spec)
    return exported


def _save(exported: ExportedProgram, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_program(exported, path)


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().clone()
