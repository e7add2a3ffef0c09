"""Emit: the rewritten model, written, read back and compared: OUT is complete and right, or as it was."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from asapc.artifact import Artifact, Stage, read_artifact, read_patches, returns_as, write_artifact
from asapc.calibration.stored import fit_facts
from asapc.errors import InputError, VerificationError
from asapc.formats import places
from asapc.formats.atomic import replace_folder
from asapc.inputs.data import Batch
from asapc.inputs.onnx.settings import OnnxSettings
from asapc.inputs.program_operators import unlisted
from asapc.inputs.teacher import Teacher
from asapc.ir import Program
from asapc.measure.differences import largest_difference
from asapc.passes.analyse import Analysis, Site
from asapc.passes.candidates import Choice
from asapc.passes.patches import compiled_modules, with_casts
from asapc.program.call import Call, Undescribable, described, known_of, parameters_of
from asapc.program.code import traced_inputs
from asapc.program.compiled import OwnCodeWarning, not_applied
from asapc.program.live import installed_patches
from asapc.program.runner import Runner, Sizes
from asapc.program.state import answered, holding
from asapc.stages.analyse import forward_signature
from asapc.stages.calibrate import tell_shortages
from asapc.stages.export import write_edited_or_whole, write_verified
from asapc.stages.rewrite import Compilation
from asapc.terminal.progress import Progress

ROUND_TRIP_TOLERANCE = 1e-5  # a program written and read back, relative to its own output


def emit(
    compilation: Compilation, out: str | Path, onnx: OnnxSettings | None, progress: Progress
) -> Artifact:
    """Write the artefact, read it back and compare; returns what was read."""
    c, analysis = compilation, compilation.analysis
    modules: Any = ([], {})
    if c.teacher.onnx is None:
        modules = compiled_modules(analysis, c.chosen.becomes, c.compiled, c.example)
    manifest = _manifest(c, out)
    manifest["warnings"] = tell_shortages(c.calibration.sites, c.chosen.fits, progress)
    with replace_folder(out) as folder:
        with progress.phase("writing"):
            write_artifact(
                folder, manifest, c.recipe, c.programs,
                seen_hashes=[*c.calibration.seen_hashes, *c.chosen.hashes],
                model=analysis.model,
                selection={"fit_seconds": c.calibration.fit_seconds, **c.chosen.trail},
                modules=modules,
            )  # fmt: skip
        _note_unlisted(c.programs, progress)
        with progress.phase("reading it back and comparing"):
            written = verify_written(folder, analysis.model, c.programs, c.example)
            _verify_live(folder, c, modules[1])
        _emit_onnx(folder, c, onnx, progress)
    return replace(written, folder=Path(out))


def _manifest(c: Compilation, out: str | Path) -> dict[str, Any]:
    teacher, analysis = c.teacher, c.analysis
    names = list(forward_signature(teacher).parameters)
    # In words, or the file of an ONNX teacher, which is timed beside what is compiled.
    named = teacher.source if teacher.onnx is None else places.recorded(teacher.source, out)
    manifest: dict[str, Any] = {
        "teacher": {"source": named, "fingerprint": teacher.fingerprint},
        "capture": analysis.capture.kind,
        "call": {"args": names[: len(c.example.args)], "kwargs": sorted(c.example.kwargs)},
        "forward": _forward(c) if c.whole else None,
        "sizes": _sizes(c.compiled),
        "data": places.recorded(c.source.source, out),
        "calibration_order": c.calibration.order,
        "sites": [_manifest_site(site, c.chosen.choices[site.name]) for site in analysis.sites],
        "refused": [
            {"name": left.name, "status": left.status, "reason": left.reason}
            for left in analysis.left_alone
        ],
    }
    if c.chosen.switch is not None:
        manifest["soft_to_hard"] = c.chosen.switch
    if teacher.onnx is not None:
        manifest["onnx"] = _interface(teacher)
    if not c.whole:
        return manifest
    if others := _not_applied(analysis):
        manifest["not_applied"] = others
    if analysis.model is not None:
        if teacher.onnx is None:  # no file says what is to be trained
            manifest |= _trained(analysis.model)
        (program,) = analysis.capture.programs
        flat = Batch(program.args, program.kwargs, None, []).tensors()
        if questions := set().union(*analysis.capture.observed.questions.values()):
            manifest["questions"] = sorted(answered(one, analysis.model, flat) for one in questions)
    return manifest


def _not_applied(analysis: Analysis) -> list[str]:
    """What the teacher does in training mode, and no program of it."""
    others = [*not_applied(program.graph.graph for program in analysis.capture.untouched)]
    parts = dict(analysis.model.named_modules()) if analysis.model is not None else {}
    ran = [parts.get(call.name) for program in analysis.capture.programs for call in program.calls]
    if any(isinstance(part, _DropoutNd) and part.p for part in ran) and "dropout" not in str(others):
        others.append("dropout")  # which a graph does not show where its code writes in place
    hooks = [hook for part in parts.values() for hook in part._forward_pre_hooks.values()]
    if any(type(one).__name__.endswith("SpectralNorm") for one in (*parts.values(), *hooks)):
        others.append("power iterations (spectral_norm)")
    return others


def _trained(model: nn.Module) -> dict[str, Any]:
    """Which weights are trained, which are one weight, and which buffers no state dict has."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    first = {weight: name for name, weight in reversed(weights.items())}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    names = {
        "frozen": [name for name, weight in weights.items() if not weight.requires_grad],
        "parameters": [[name, first[weight]] for name, weight in weights.items()],
        "not_persistent": sorted(buffers.keys() - model.state_dict().keys()),
    }
    return {key: value for key, value in names.items() if value}


def _emit_onnx(folder: Path, c: Compilation, onnx: OnnxSettings | None, progress: Progress) -> None:
    """model.onnx, if asked for or if the teacher is one: then its file is edited, where that can be."""
    if c.teacher.onnx is not None and c.whole:
        write_edited_or_whole(folder, c, onnx or OnnxSettings(), progress)
    elif onnx is not None:
        write_verified(read_artifact(folder, ("graph",), trust=True), c.source, onnx, progress)
    elif c.teacher.onnx is not None:
        progress.note("no model.onnx: torch.export could trace the teacher by its modules only")


def _interface(teacher: Teacher) -> dict[str, list[str]]:
    """What an ONNX teacher calls its inputs and outputs."""
    from asapc.inputs.onnx.module import OnnxModule

    assert isinstance(teacher.model, OnnxModule)
    inputs = [value.name for value in teacher.model.inputs]
    return {"inputs": inputs, "outputs": list(teacher.model.graph.outputs)}


def _forward(c: Compilation) -> dict[str, Any]:
    """How the compiled model is called and what it returns, for the manifest."""
    program = c.compiled[0]
    try:
        signature = forward_signature(c.teacher)
        parameters = parameters_of(signature, program.args, program.kwargs, [])
        returned = described(_computed(c.output, program), [], output=True)
        call = Call(parameters, returned, *known_of(traced_inputs(program.graph)))
        model = c.analysis.model or c.analysis.capture.untouched[0].graph
        return with_casts(model, {"": call}, c.example)[""].to_json()
    except Undescribable as problem:
        raise InputError(
            "the model takes and returns tensors, constants and containers of them", got=problem,
            help="compile a module around it that takes and returns plain containers",
        ) from None  # fmt: skip


def _computed(output: Any, program: Program) -> Any:
    """What the model returned, with a tensor for all that the program computes, sizes too."""
    returned, spec = pytree.tree_flatten(output)
    (values,) = program.graph.graph.output_node().args
    computed = pytree.tree_leaves(values)
    if len(computed) != len(returned):
        raise Undescribable("outputs that are not what the program has")
    pairs = zip(computed, returned, strict=True)
    leaves = [torch.empty(0) if isinstance(x, Node) else value for x, value in pairs]
    return pytree.tree_unflatten(leaves, spec)


def _sizes(programs: Sequence[Program]) -> str:
    """The sizes that the programs hold for, in words; of a module only where a size has limits."""
    texts = []
    for program in programs:
        sizes = Sizes.of(program)
        if sizes.limits or not program.name:
            texts.append(f"{program.name}: {sizes}" if program.name else str(sizes))
    return "; ".join(texts)


def _manifest_site(site: Site, choice: Choice) -> dict[str, Any]:
    return {
        "name": site.name,
        "operator": choice.operator,
        "reason": choice.reason,
        "heads": site.heads,
        "head_dim": site.head_dim,
        "convention": site.convention.to_json(),
        "replay_error": site.replay_error,
        "replay": dict(site.replay),
        "constants": dict(site.constants),
        "no_gradient": site.no_gradient,
        "selection_attention_rel_l2": choice.attention_rel_l2,
        **fit_facts(choice.fit),
    }


def _note_unlisted(programs: Mapping[Stage, Sequence[Program]], progress: Progress) -> None:
    names = {name for parts in programs.values() for program in parts for name in unlisted(program.graph)}
    if names:
        progress.note(
            f"the programs call {', '.join(sorted(names))}, which files may not call by default: "
            "load them with --trust (in Python asapc.load(OUT, trust=True))"
        )


def verify_written(
    folder: Path, model: nn.Module | None, programs: Mapping[Stage, Sequence[Program]], example: Batch
) -> Artifact:
    """What was written, which computes what was verified."""
    written = read_artifact(folder, list(programs), trust=True)
    returns_as(written)
    for stage, parts in programs.items():
        before = Runner(model, parts)(example)
        after = Runner(model, written.programs[stage])(example)
        error = largest_difference(before, after)
        if not error <= ROUND_TRIP_TOLERANCE:
            raise VerificationError(
                f"{stage}: the written program computes what was verified",
                got=f"relative difference {error:.2g}",
                help="this is a defect of asapc: please report the model",
            )
    return written


def _verify_live(folder: Path, c: Compilation, left: Collection[str]) -> None:
    """A live model with what was written for it computes what was verified.

    left: sites that stay the model's own code in it, and in the program that it is then held against.
    """
    model, written = c.analysis.model, read_artifact(folder, (), trust=True)
    patches = read_patches(written)
    if model is None or not patches:
        return
    output = c.output
    if left:
        becomes = c.chosen.becomes | dict.fromkeys(left)
        output = Runner(model, c.analysis.rewritten(becomes))(c.example)
    installed = installed_patches(model, patches, written.manifest["sites"])
    with holding(c.analysis.capture.observed.caches), installed, warnings.catch_warnings():
        warnings.simplefilter("error", OwnCodeWarning)
        try:
            run = Runner(model)
            errors = [largest_difference(output, run(c.example)) for _ in range(2)]  # it may keep state
        except OwnCodeWarning as warning:
            raise VerificationError(
                "live: the patched model runs what was compiled", got=warning,
                help="return what other layers read, and set nothing between the examples",
            ) from None  # fmt: skip
        except (AttributeError, InputError) as missing:
            inside = [one for patch in patches for one in patch.inside]
            kept = sorted({str(steps[-1][1]) for one in inside for steps in one.keeps})
            kept = [name for name in kept if repr(name) in str(missing)]
            if not kept:
                raise
            raise VerificationError(
                f"layers must return what the model reads from them: {', '.join(kept)} is only stored",
                got=missing.__cause__ or missing,
                help="return it from forward, or read it after the model's own code has run",
            ) from None  # fmt: skip
    if not all(error <= ROUND_TRIP_TOLERANCE for error in errors):
        advice = c.analysis.capture.observed.advice
        raise VerificationError(
            "live: the patched model computes what was verified",
            got=f"relative difference {max(errors):.2g}",
            help=advice or "this is a defect of asapc: please report the model",
        )
