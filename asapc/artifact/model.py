"""A model of an artefact: rebuilt from the folder alone, or a live one that is patched in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.graph_module import _assign_attr
from torch.utils import _pytree as pytree

from asapc.artifact.manifest import DTYPES, Stage, consistent, inside
from asapc.artifact.read import HIDDEN, MODEL, Artifact, read_artifact, runnable, weights_of
from asapc.errors import InputError
from asapc.formats.records import read
from asapc.inputs.load import build_factory
from asapc.inputs.reading import Reading
from asapc.program.call import (
    Call,
    Child,
    Tensors,
    Tree,
    kind_of,
    known_of,
    leaves,
    rebuilt,
    types_at_hand,
)
from asapc.program.code import GraphCode, tensors_of, traced_inputs, under
from asapc.program.compiled import CompiledModel, Inside, Layer, site_line
from asapc.program.live import (
    Patch,
    another_model,
    constants_of,
    install,
    prepared,
    warn_left,
    with_operators,
)
from asapc.program.state import OPERATORS
from asapc.program.summary import Summary, shown_by


def load(
    out: str | Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    stage: Stage = "graph",
    sequence_group: Any = None,
    trust: bool = False,
) -> nn.Module:
    """Load a compiled model: the teacher's call signature and output structure, in evaluation mode.

    out:   a folder written by `asapc compile`; it may have been moved, and needs no training code.
    model: a live model, or a factory of one, to patch in place: it keeps its class, hooks and layers
           (asapc.program.live) and gets the artefact's weights, which are the teacher's or, after a
           refresh, the trained ones. Other weights of it stay. Required if the teacher was captured
           module by module; otherwise a CompiledModel is rebuilt without it, whose outputs are a plain
           dict or tuple if the class of an output is not defined in the process. A model that is
           refused is left unchanged, including its weights and earlier patches. If every site keeps the
           teacher's own code, nothing is patched, with a warning.
    stage: "graph" for the compiled model, "lossless" or "teacher" for those it was compared with.
    sequence_group: a process group of torch.distributed whose processes share every sequence: all of
           them call the model with the same tensors and get the same outputs. Forward pass only,
           without model=.  See asapc.program.sequence.
    trust: set if the folder is your own: its programs may then call operators that files may not.
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
            with consistent(artifact.folder):
                return _rebuilt(artifact, stage, sequence_group)
        raise InputError(
            f"{out}: was captured per module and needs the model around it",
            help="use asapc.load(OUT, model=factory) with the factory that built the teacher",
        )
    built = model if isinstance(model, nn.Module) else model()
    if patches:
        return _patched(artifact, built)
    if artifact.capture == "whole":
        raise InputError(
            f"{out}: a live model can only be patched with the compiled stage", got=f"stage={stage!r}",
            help="drop model=, or stage=",
        )  # fmt: skip
    _around(artifact, built)
    for program in artifact.programs[stage]:
        parent, _, leaf = program.name.rpartition(".")
        built.get_submodule(parent)._modules[leaf] = program.graph
    return built.eval()


def _both(captured: Tensors, program: Tensors) -> Tensors:
    """What a tensor must be like. Sizes that were equal when the model was captured have one name there,
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
    call = Call.from_json(manifest["forward"], "forward")
    traced = known_of(traced_inputs(graph))[0]
    count = len(call.tensors)
    call = replace(call, tensors=tuple(map(_both, call.tensors, traced)))
    lines = [site_line(site) for site in manifest["sites"]] if stage == "graph" else [f"stage: {stage}"]
    flat, operators = with_operators(graph, fitted, lines)
    (outputs,) = flat.output_node().args
    if count != len(traced) or not call.gives(len(cast(tuple[Any, ...], outputs))):
        raise ValueError("its inputs or outputs differ from those in the manifest")
    for name in fitted:
        del graph._buffers[name]
    graph.add_module(OPERATORS, operators)
    floats = (p.dtype for p in graph.parameters() if p.is_floating_point())
    dtype, source = next(floats, torch.float32), str(manifest["teacher"]["source"])
    if sequence_group is not None:
        from asapc.program.sequence import SequenceCode, token_axes  # torch.distributed is large

        _warn_whole(manifest["sites"] if stage == "graph" else ())
        code: GraphCode = SequenceCode(flat, dtype, sequence_group, token_axes(call))
    else:
        code = GraphCode(flat, dtype)
    sites = [  # without constants where the model's own code stays
        {**site, "constants": {}}
        if stage == "teacher" or (stage, site["operator"]) == ("graph", "teacher") else site
        for site in manifest["sites"]
    ]  # fmt: skip
    _put_constants(artifact, graph, sites)
    plain = manifest["programs"][0]["plain"]
    if plain != sorted(graph.state_dict()):  # of a model whose state dict has weights, and none of these
        graph._non_persistent_buffers_set.update(graph._buffers.keys() & plain)
    model = CompiledModel(graph, code, call, source, lines)
    _name_as_the_teacher(model, manifest.get("parameters", ()))
    for name in dict(model.named_buffers()).keys() & manifest.get("not_persistent", ()):
        _leave_out(model, name)
    model.forward.constants = constants_of(model, sites)()
    model.forward.questions = tuple(manifest.get("questions", ()))
    model.not_applied = tuple(manifest.get("not_applied", model.not_applied))
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name in manifest.get("frozen", ()):
            weight.requires_grad_(False)
    if stage == "graph" and sequence_group is None:
        shown_by(model, Summary(source, lines, artifact.folder.absolute()))
    return model


def _put_constants(artifact: Artifact, graph: GraphModule, sites: Sequence[Mapping[str, Any]]) -> None:
    """Give a program's module the weights that its sites hold as constants, so that they are loaded,
    saved and compared like the model's others."""
    held = {name: kind for site in sites for name, kind in site["constants"].items()}
    for name in held.keys() - tensors_of(graph).keys():
        is_saved = f"0.{name}" in artifact.tensors
        tensor = artifact.tensors[f"0.{name}" if is_saved else HIDDEN + name]
        weight = nn.Parameter(tensor, tensor.is_floating_point())
        _assign_attr(tensor if held[name] == "buffer" else weight, graph, name)
        if not is_saved:
            _leave_out(graph, name)


def _leave_out(model: nn.Module, name: str) -> None:
    """Leave a buffer out of the state dict."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._non_persistent_buffers_set.add(leaf)


def _name_as_the_teacher(model: nn.Module, parameters: Sequence[Sequence[str]]) -> None:
    """Give weights all of their names, and their order, by which optimisers keep state.

    parameters: every name, with the first name of the same weight.
    """
    first = {str(name): str(of) for name, of in parameters}
    weights = model.named_parameters(remove_duplicate=False)
    known = {first.get(name, name): weight for name, weight in weights}
    for name, of in parameters:
        if of not in known:  # the program does not read it
            continue
        *path, leaf = name.split(".")
        owner: Any = model
        for part in path:
            held = owner._modules.pop(part, None)
            owner._modules[part] = Layer() if held is None else held
            owner = owner._modules[part]
        owner._parameters.pop(leaf, None)
        owner._parameters[leaf] = known[of]


def _warn_whole(sites: Sequence[Mapping[str, Any]]) -> None:
    """Warn of sites that a sequence group does not share out: right, but no faster than one process."""
    from asapc.program.sharded_sites import SITES

    alone = [f"{site['name']} ({site['operator']})" for site in sites if site["operator"] not in SITES]
    if alone:
        warnings.warn(
            f"asapc.load: every process computes these sites whole: {', '.join(alone)}", stacklevel=4
        )


def _patched(artifact: Artifact, model: nn.Module) -> nn.Module:
    """Patch the live model and load the artefact's weights.  Nothing is touched before all of it fits."""
    sites, left = artifact.manifest["sites"], artifact.manifest["live"]["left"]
    with consistent(artifact.folder):
        patches = read_patches(artifact)
    compiled = [name for patch in patches for name in patch.sites]
    kept = [site["name"] for site in sites if site["operator"] == "teacher"]
    if not compiled and not left and len(kept) < len(sites):
        raise InputError(
            f"{artifact.folder}: was compiled from a program, without a module that could be patched",
            help="drop model=",
        )
    weights = _weights_for(artifact, model)
    patched = prepared(model, patches, sites)
    warn_left(left, compiled)
    if len(kept) == len(sites):
        warnings.warn(
            f"asapc.load: nothing is patched: every site keeps the model's own code ({', '.join(kept)})",
            stacklevel=3,
        )
    with torch.no_grad():
        for live, stored in weights:
            live.copy_(stored)
    install(model, patched)
    lines = [site_line(site) for site in sites]
    shown_by(model, Summary(type(model).__name__, lines, artifact.folder.absolute()))
    return model.eval()


def read_patches(artifact: Artifact) -> list[Patch]:
    """The patches that `live` of the manifest puts into a live model."""
    tensors = artifact.tensors
    patches = []
    for entry in artifact.manifest["live"]["programs"]:
        program = runnable(inside(artifact.folder, entry["file"]), artifact.trusted)
        call = Call.from_json(entry["call"], "call")
        children = tuple(Child.from_json(child, "child") for child in entry["children"])
        for module in entry["modules"]:
            values = {
                name: tensors.get(f"graph.{stored}", tensors[stored])
                for name, stored in module["tensors"].items()
            }
            insides = tuple(Inside.from_json(one, "inside") for one in module["inside"])
            patches.append(Patch(
                module["name"], program, call, children, values, tuple(module["sites"]),
                DTYPES[entry["dtype"]], insides, module["own_forward"],
            ))  # fmt: skip
    return patches


def _weights_for(artifact: Artifact, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Pairs (the live model's tensor, the artefact's); the model's keeps its dtype and device.

    Raises InputError if one of them cannot be copied.
    """
    weights = under(artifact.tensors, MODEL)
    for index, entry in enumerate(artifact.manifest["programs"]):
        stored = weights_of(artifact.tensors, index, "graph")
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
        raise another_model(
            f"a model without {', '.join(wrong[:4])} of the same shape", str(artifact.folder)
        )
    empty = [name for name in weights if theirs[name].is_meta or theirs[name].is_inference()]
    if empty:
        raise InputError(
            f"{artifact.folder}: the model must have memory for the weights that are loaded into it",
            got=f"{', '.join(empty[:4])} on the meta device or made in inference mode",
            help="build it on a device (as with model.to_empty(device=...)), outside inference_mode",
        )  # fmt: skip
    return [(theirs[name], tensor) for name, tensor in weights.items()]


def _around(artifact: Artifact, model: nn.Module) -> None:
    """Load the artefact's weights into the model around the captured modules."""
    theirs, weights = model.state_dict(), under(artifact.tensors, MODEL)
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    programs = next(iter(artifact.programs.values()))
    wrong = [
        *sorted(set(theirs) ^ set(weights)),
        *(name for name in weights if name in theirs and theirs[name].shape != weights[name].shape),
        *(program.name for program in programs if program.name not in modules),
    ]
    if wrong:
        raise another_model(f"a model that has other {', '.join(wrong[:4])}", str(artifact.folder))
    model.load_state_dict(weights)
    returns_as(artifact)


def surrounding_model(
    artifact: Artifact, model: str | nn.Module | None, reading: Reading
) -> nn.Module | None:
    """The model around captured modules, from --model or this one, with the artefact's weights."""
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
    built: nn.Module | None
    if isinstance(model, nn.Module):
        built = model
    elif reading.weights or Path(model).is_dir():
        built = reading.teacher(model).model
    else:
        built = build_factory(model, reading.kwargs)
    assert built is not None
    _around(artifact, built)
    return built.eval()


def returns_as(artifact: Artifact) -> None:
    """Let the programs of modules return the modules' own types, if the process has them.

    The code around a captured module may access its output by name.
    """
    for programs in artifact.programs.values():
        for program, entry in zip(programs, artifact.manifest["programs"], strict=True):
            codegen = program.graph.graph._codegen
            if "output" not in entry or not isinstance(codegen, _PyTreeCodeGen):
                continue
            tree = read(Tree, entry["output"], "output")
            shape = rebuilt(tree, [0] * sum(1 for _ in leaves(tree)), types_at_hand(tree))
            spec = pytree.tree_structure(shape)
            before = codegen.pytree_info.out_spec
            if before is not None and before.num_leaves == spec.num_leaves:
                codegen.pytree_info = codegen.pytree_info._replace(out_spec=spec)
                program.graph.recompile()
