"""Analyse: capture, match, lift and replay, before anything is fitted.

A site whose operator does not reproduce the teacher's own attention on real activations is kept as it
is, with the error it would have had.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.export import ExportedProgram

from asapc.calibration.reading import Reading
from asapc.calibration.shards import code_digest
from asapc.device import CPU, running_on
from asapc.errors import BranchError, InputError, SizeError, VerificationError
from asapc.formats.limits import limits
from asapc.inputs.data import Batch
from asapc.inputs.teacher import Teacher
from asapc.inputs.weights import fingerprint
from asapc.ir import Convention, Kind, Program
from asapc.measure.differences import largest_difference, tensor_outputs
from asapc.memory import give_back
from asapc.passes.branches import held_branches
from asapc.passes.capture import Capture, capture, capture_modules
from asapc.passes.cut import HALVES
from asapc.passes.early_stop import check_endings
from asapc.passes.experiment import one_thread
from asapc.passes.gradients import TOLERANCE as GRADIENT_TOLERANCE
from asapc.passes.gradients import held_by, masks_of, no_gradient
from asapc.passes.identify import matched_program
from asapc.passes.lift import lift
from asapc.passes.match import NOT_THE_MODEL, Outcomes, not_the_model
from asapc.passes.regions import Refusal
from asapc.passes.replay import TOLERANCE, Replay, Replayed, replay
from asapc.passes.rewrite import Replacement, rewritten_programs
from asapc.passes.site import Site as MatchedSite
from asapc.program.code import traced_places
from asapc.program.runner import Runner
from asapc.program.state import PRECISION
from asapc.terminal.progress import SILENT, Progress

OUTPUT_TOLERANCE = 1e-3  # the whole model's outputs, relative to max(1, largest entry)


@dataclass(frozen=True)
class Site:
    """A site that replays: its convention, heads, and its largest error by what was tried.

    head_dim: None where it is given its scores.  value_dim: of a head's values, None where it does not
    multiply any, or as many as the call says.  constants, no_gradient: the model's weights that it holds,
    and why its gradient is not the model's, see passes.gradients.
    """

    name: str
    convention: Kind
    heads: int
    head_dim: int | None
    replay_error: float
    replay: Mapping[str, float] = field(default_factory=dict)
    value_dim: int | None = None
    constants: Mapping[str, str] = field(default_factory=dict)
    no_gradient: str | None = None

    @property
    def loop(self) -> Convention:
        """The finite loop of a Sinkhorn site."""
        assert isinstance(self.convention, Convention)
        return self.convention


@dataclass(frozen=True)
class LeftAlone:
    """A region that is not compiled: refused (not a known convention) or kept (does not replay)."""

    name: str
    status: Literal["refused", "kept"]
    reason: str
    replay_error: float | None = None
    convention: Kind | None = None
    heads: int | None = None
    head_dim: int | None = None
    replay: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Part:
    """A captured program, its regions that replay, the program with an operator call for each, and what
    every region is, in order."""

    program: Program
    matched: Sequence[MatchedSite]
    lifted: Program
    outcomes: list[Site | LeftAlone]


@dataclass
class Analysis:
    """A teacher's programs with their lossless rewrites, and what their regions are.

    replayed: what was found at the sites, also at those that do not replay, and of the untouched teacher
              against the lossless rewrite on the batch.
    """

    model: nn.Module | None
    capture: Capture
    parts: list[Part]
    replayed: Replayed
    drop_maps: bool = False

    @property
    def outcomes(self) -> list[Site | LeftAlone]:
        """What every region is, in order, and modules that could not be captured."""
        skipped = [LeftAlone(name, "refused", f"cannot be captured: {why}")
                   for name, why in self.capture.skipped]  # fmt: skip
        return [outcome for part in self.parts for outcome in part.outcomes] + skipped

    @property
    def sites(self) -> list[Site]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Site)]

    @property
    def left_alone(self) -> list[LeftAlone]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, LeftAlone)]

    @property
    def names(self) -> list[str]:
        """Of the sites, in order."""
        return [site.name for site in self.sites]

    @property
    def lifted(self) -> list[Program]:
        """One for each captured program."""
        return [part.lifted for part in self.parts]

    @property
    def untouched(self) -> Runner:
        """Runs the model itself, or the program that it came as."""
        return Runner(self.model, () if self.model else self.capture.untouched)

    def running_on(self, device: torch.device) -> AbstractContextManager[None]:
        """The model and its programs on the device for a while (asapc.device)."""
        programs = [*self.capture.programs, *self.capture.untouched, *self.lifted]
        return running_on(device, [self.model, *(program.graph for program in programs)])

    def rewritten(self, becomes: Mapping[str, Replacement | None]) -> list[Program]:
        """The programs with what each named site becomes, None for the teacher's own code, unless it ends
        early, which no captured graph does; the others are lossless, without maps that are dropped."""
        teachers = {site for site, replacement in becomes.items() if replacement is None}

        def without_teachers(part: Part) -> Program:
            kept = [site for site in part.matched if site.ends or site.name not in teachers]
            return lift(part.program, kept, self.drop_maps)

        lifted = [*map(without_teachers, self.parts)] if teachers else self.lifted
        return rewritten_programs(lifted, {site: x for site, x in becomes.items() if x is not None})


def analyse(
    teacher: Teacher,
    batch: Batch,
    drop_maps: bool = False,
    more: Iterable[Batch] = (),
    progress: Progress = SILENT,
    known: Replayed | None = None,
    device: torch.device = CPU,
    softmax: bool = False,
) -> Analysis:
    """Everything that is known about a teacher before data is streamed through it.

    batch: what it is captured on; more: what its sites are replayed on besides.  known: of an earlier
    analysis, which is not done again where graphs, weights, examples, code and device are the same.
    device: to replay on; everything else is done on the CPU.  softmax: whether softmax layers are sites.
    Raises InputError if the model cannot be run or captured, VerificationError if an ONNX file was not
    understood as onnxruntime does, or if the lossless rewrite does not reproduce the untouched model
    although every site replays.
    """
    subject = teacher.program if teacher.model is None else teacher.model
    assert subject is not None
    batches = [batch, *more]
    with one_thread():
        captured, regions = _identified(subject, batches, progress, softmax)
    if any("get_num_threads" in asked for asked in captured.observed.questions.values()):
        captured, regions = _identified(subject, batches, progress, softmax)
    give_back()  # what a trace and its experiments have freed is left in pieces
    if teacher.onnx is not None:
        from asapc.inputs.onnx.module import OnnxModule
        from asapc.inputs.onnx.verify import check_import

        assert isinstance(teacher.model, OnnxModule)
        check_import(teacher.model, teacher.onnx, batch)
    replayed = _replayed(teacher, captured, regions, batches, progress, known, device)
    parts = [
        _part(teacher.model, program, its_regions, replayed, drop_maps)
        for program, its_regions in zip(captured.programs, regions, strict=True)
    ]
    analysis = Analysis(teacher.model, captured, parts, replayed, drop_maps)
    if analysis.sites:
        with analysis.running_on(device):
            if not drop_maps and replayed.output_error is None:
                error = _whole_replay(analysis, teacher, batch.on(device))
                analysis.replayed = replace(replayed, output_error=error)
            _note_gradients(analysis, batch.on(device))
    return analysis


def _replayed(
    teacher: Teacher, captured: Capture, regions: Sequence[Outcomes], batches: Sequence[Batch],
    progress: Progress, known: Replayed | None, device: torch.device,
) -> Replayed:  # fmt: skip
    """What replay finds, or what is known of it where that is of the same sites."""
    of = _digest(teacher, captured, batches, device)
    matched = [[x for x in its_regions if isinstance(x, MatchedSite)] for its_regions in regions]
    names = {site.name for its_sites in matched for site in its_sites}
    if known is not None and known.of == of and known.sites.keys() == names:
        return known
    with running_on(device, [teacher.model, *(program.graph for program in captured.programs)]):
        there = [example.on(device) for example in batches]
        replayed = Replayed(of, replay(teacher.model, captured.programs, matched, there, progress))
    give_back()
    return replayed


def _part(
    model: nn.Module | None, program: Program, regions: Outcomes, replayed: Replayed, drop_maps: bool
) -> Part:
    outcomes = [
        LeftAlone(x.name, "refused", x.reason) if isinstance(x, Refusal)
        else judged(x, replayed.sites[x.name]) for x in regions
    ]  # fmt: skip
    good = [
        region for region, outcome in zip(regions, outcomes, strict=True)
        if isinstance(region, MatchedSite) and isinstance(outcome, Site)
    ]  # fmt: skip
    why = _ends_otherwise(model, program, regions, good)
    if why is not None:
        good, outcomes = [], [
            LeftAlone(x.name, "refused", f"{NOT_THE_MODEL}: {why}") if isinstance(x, Site) else x
            for x in outcomes
        ]  # fmt: skip
    return Part(program, good, lift(program, good, drop_maps), outcomes)


def _ends_otherwise(
    model: nn.Module | None, program: Program, regions: Outcomes, good: Sequence[MatchedSite]
) -> str | None:
    """Why the loops of a program do not end where those of the model do, None where they do."""
    ends = {site.name: site.ends for site in regions if isinstance(site, MatchedSite) and site.ends}
    if not ends or model is None:
        return None
    if not ends.keys() <= {site.name for site in good}:
        return "a loop that may end early stays as it is"
    return check_endings(model.get_submodule(program.name), program, lift(program, good), ends)


def judged(site: MatchedSite, errors: Replay) -> Site | LeftAlone:
    """What its replay says of a site that was matched."""
    tried, worst = errors.worst
    facts = (site.convention, site.heads, site.head_dim)
    if worst <= TOLERANCE:
        return Site(site.name, *facts, worst, errors.errors, site.value_dim)
    reason = f"does not replay on {tried}: relative error {worst:.2g}"
    if math.isinf(errors.rounding):
        reason = (
            f"its own code gives NaN or infinity on {tried}, such as a softmax of -inf "
            "for an example without active tokens"
        )
    elif errors.rounding > TOLERANCE:
        reason += (
            f"; there its own code differs from itself in float64 by {errors.rounding:.2g}, as when "
            "a mask adds 1e6 to scores, a padded token is set to 1e18, or numbers are halves"
        )
    return LeftAlone(site.name, "kept", reason, worst, *facts, errors.errors)


def _note_gradients(analysis: Analysis, batch: Batch) -> None:
    """Note which weights each site holds, and why its gradients differ from the model's."""
    held: dict[str, dict[str, str]] = {}
    for part in analysis.parts:
        held |= held_by(part.program, part.lifted, part.matched)
    replayed = analysis.replayed
    if replayed.gradient is None:
        model = analysis.model or analysis.capture.untouched[0].graph
        names = {name for its in held.values() for name in its}
        if analysis.capture.kind == "whole":
            names |= masks_of(analysis.parts[0].program, analysis.parts[0].matched)
        by_dtype = any(PRECISION in asked for asked in analysis.capture.observed.questions.values())
        lossless = [lift(part.program, part.matched) for part in analysis.parts]
        gradient = no_gradient(model, lossless, batch, names, by_dtype) or ""
        replayed = analysis.replayed = replace(replayed, gradient=gradient)
    of_sites = {
        name: f"where keys are hidden, its own gradient differs by {errors.gradient:.2g}"
        for name, errors in replayed.sites.items() if not errors.gradient <= GRADIENT_TOLERANCE
    }  # fmt: skip
    for part in analysis.parts:
        part.outcomes = [
            replace(x, constants=held[x.name], no_gradient=replayed.gradient or of_sites.get(x.name))
            if isinstance(x, Site) else x for x in part.outcomes
        ]  # fmt: skip


def _digest(teacher: Teacher, captured: Capture, batches: Sequence[Batch], device: torch.device) -> str:
    """Of all that replay depends on: what the graphs compute, on what, where, and this code."""
    reading = Reading(json.dumps([teacher.fingerprint, code_digest(), device.type]))
    digest = hashlib.sha256()
    for batch in batches:
        reading.add(batch)
    digest.update(reading.digest.encode())
    for program in captured.programs:
        text = json.dumps([program.name, program.graph.code, fingerprint(program.constants)])
        digest.update(text.encode(errors="backslashreplace"))
    return digest.hexdigest()


def _identified(
    subject: nn.Module | ExportedProgram, batches: Sequence[Batch], progress: Progress, softmax: bool
) -> tuple[Capture, list[Outcomes]]:
    """The programs, and what was found in each. A model is captured by module, not whole, where a loop
    that may end early stays as it is, where other data takes another branch, and where the code computes
    a number from how many examples there are."""
    batch, *more = batches
    with progress.phase("tracing the model"):
        captured = capture(subject, batch.args, batch.kwargs, more)
        if isinstance(subject, nn.Module):
            captured = _of_one_way(subject, captured, batches)
    captured, regions = _matched(captured, progress, softmax)
    if captured.kind == "module" or not isinstance(subject, nn.Module):
        return captured, regions
    reason = not_the_model(captured.programs[0], regions[0])
    count = None if reason else _only_count(captured.programs[0], batch)
    if count:
        reason = f"the model's code computes a number from the {count} examples of the trace"
    if reason is None:
        return captured, regions
    with progress.phase("tracing its modules"):
        alone = capture_modules(subject, batch, reason, captured.observed)
    if not alone.programs:
        return captured, regions
    of_modules = _matched(alone, progress, softmax)
    sites, sites_apart = (
        sum(isinstance(x, MatchedSite) for its_regions in one for x in its_regions)
        for one in (regions, of_modules[1])
    )
    # A program for one number of examples is of use where that is what it is called with.
    return (captured, regions) if count and sites_apart < sites else of_modules


def _only_count(program: Program, batch: Batch) -> int:
    """The number of examples that a program of a model is fixed to, 0 where it takes others too."""
    sizes = [size for node in traced_places(program.graph) for size in node.meta["val"].shape[:1]]
    only = (len(batch), len(batch))
    return len(batch) if len(batch) > 1 and any(limits(size) == only for size in sizes) else 0


def _matched(captured: Capture, progress: Progress, softmax: bool) -> tuple[Capture, list[Outcomes]]:
    """What is found in each program, and the programs that it was found in."""
    with progress.phase("matching its layers"):
        asked = [replace(program, softmax=softmax) for program in captured.programs]
        programs, regions = zip(*map(matched_program, asked), strict=True) if asked else ((), ())
    return replace(captured, programs=[*programs]), [*regions]


def _of_one_way(model: nn.Module, captured: Capture, batches: Sequence[Batch]) -> Capture:
    """Leave out programs that do not hold for more data, of other sizes or on another branch."""
    ways = {program.name: _other_way(model, program, batches) for program in captured.programs}
    other = next((way for way in ways.values() if way is not None), None)
    if other is None:
        return captured
    if captured.kind == "whole":
        captured = capture_modules(model, batches[0], other, captured.observed)
        if not captured.programs and not captured.skipped:
            captured.skipped.append((type(model).__name__, other))
        return _of_one_way(model, captured, batches)
    kept = [program for program in captured.programs if ways[program.name] is None]
    left = [(name, way) for name, way in ways.items() if way is not None]
    return replace(captured, programs=kept, skipped=[*captured.skipped, *left])


def _other_way(model: nn.Module, program: Program, batches: Sequence[Batch]) -> str | None:
    """The branch that goes both ways on the data, or the sizes that the program does not hold for, if
    there are any."""
    batch, *more = batches
    if not held_branches(program.graph) and all(one.sizes() == batch.sizes() for one in more):
        return None
    run = Runner(model, [program])
    try:
        for batch in more:
            run(batch)
    except BranchError as error:
        return f"goes both ways on the data: {error.asked}"
    except SizeError as error:
        apart = "attention in a module of its own may hold for all"
        return f"holds for one of the data's sizes alone ({apart}): {error.got}"
    return None


def own_rounding(model: nn.Module | None, batch: Batch) -> float:
    """How much further than OUTPUT_TOLERANCE a model in half precision may be from its lossless rewrite:
    twice as far as it is from itself in float32 or, if its code casts to half precision, with weights of
    half precision that are an epsilon larger. 0 for one in float32, or without its code."""
    if model is None or not any(x.dtype in HALVES for x in model.parameters()):
        return 0.0
    try:
        widened = batch.mapped(lambda x: x.float() if x.dtype in HALVES else x)
        other = Runner(copy.deepcopy(model).float())(widened)
    except InputError:
        nudged = copy.deepcopy(model)
        for weight in nudged.parameters():
            weight.data.mul_(1 + torch.finfo(weight.dtype).eps if weight.dtype in HALVES else 1)
        other = Runner(nudged)(batch)
    return 2 * largest_difference(Runner(model)(batch), other)


def _check_calls(teacher: Teacher, batch: Batch) -> None:
    """InputError where the model's own outputs are NaN, differ from call to call, or are not those of its
    code: nothing can be compared with these."""
    if teacher.model is None:
        return
    run = Runner(teacher.model)
    outputs, again = tensor_outputs(run(batch)), tensor_outputs(run(batch))
    if any(bool(output.isnan().any()) for output in outputs):
        raise InputError(
            f"{teacher.source}: the model's own outputs must be numbers on the data",
            got="NaN",
            help="leave out examples without active tokens, and inputs that are not finite",
        )
    apart = largest_difference(outputs, again)
    if not apart <= OUTPUT_TOLERANCE:
        raise InputError(
            f"{teacher.source}: the model must compute the same from the same inputs",
            got=f"two calls that differ by {apart:.2g}",
            help="it draws random numbers in evaluation mode, too: switch them off, or pass them as an "
            "argument",
        )
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        apart = largest_difference(outputs, run(batch))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    if not apart <= OUTPUT_TOLERANCE:
        raise InputError(
            f"{teacher.source}: the model must run its own code in evaluation mode",
            got=f"torch's fast path of nn.TransformerEncoderLayer, {apart:.2g} from that",
            help="it takes softmax where a subclass has another attention, and gives zeros where tokens "
            "are hidden: call torch.backends.mha.set_fastpath_enabled(False) where the model is defined",
        )


def _whole_replay(analysis: Analysis, teacher: Teacher, batch: Batch) -> float:
    """How far the lossless rewrite is from the untouched model.  Raises VerificationError where that is
    too far, InputError where the model has no outputs that can be compared."""
    untouched = analysis.untouched(batch)
    if not tensor_outputs(untouched):
        raise InputError(
            "the model must return floating-point numbers, by which it is compared",
            got="none",
            help="return scores beside what is made of them, such as indices",
        )
    error = largest_difference(untouched, Runner(analysis.model, analysis.lifted)(batch))
    if not error <= OUTPUT_TOLERANCE + own_rounding(teacher.model, batch):
        _check_calls(teacher, batch)
        raise VerificationError(
            "the lossless rewrite reproduces the untouched model's outputs",
            got=f"relative difference {error:.2g}",
            help=analysis.capture.observed.advice or "a data-dependent branch or early stop makes the "
            "model differ from the captured graph; lower its stopping threshold, or move that part into "
            "its own module",
        )
    return error
