"""Analyse: capture, match, lift and replay, before anything is fitted.

A site whose operator does not reproduce the teacher's own attention on real activations is kept as it
is, with the error it would have had.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from asapc.calibration.reading import Reading
from asapc.calibration.shards import code_digest
from asapc.device import CPU, running_on
from asapc.errors import BranchError, InputError, VerificationError
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
from asapc.passes.differences import matched_program
from asapc.passes.early_stop import check_endings
from asapc.passes.experiment import one_thread
from asapc.passes.gradients import TOLERANCE as GRADIENT_TOLERANCE
from asapc.passes.gradients import held_by, masks_of, no_gradient
from asapc.passes.lift import lift
from asapc.passes.match import NOT_THE_MODEL, not_the_model
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
class Analysis:
    """teacher programs and their lossless rewrites, and every region in order.

    lifted: parallel to capture.programs, an operator call for each of `sites`.
    matched: the regions behind `sites`, of each program.
    replayed: what was found at the sites, also at those that do not replay, and of the untouched teacher
              against the lossless rewrite on the batch.
    """

    model: nn.Module | None
    capture: Capture
    lifted: list[Program]
    matched: list[list[MatchedSite]]
    sites: list[Site]
    left_alone: list[LeftAlone]
    regions: list[str]
    replayed: Replayed
    drop_maps: bool = False

    @property
    def names(self) -> list[str]:
        """Of the sites, in order."""
        return [site.name for site in self.sites]

    def running_on(self, device: torch.device) -> AbstractContextManager[None]:
        """The model and its programs on the device for a while (asapc.device)."""
        programs = [*self.capture.programs, *self.capture.untouched, *self.lifted]
        return running_on(device, [self.model, *(program.graph for program in programs)])

    def lifted_without(self, sites: Collection[str]) -> list[Program]:
        """The lifted programs with these sites left as the teacher has them, unless they end early, which
        no captured graph does; attention maps that were dropped elsewhere stay."""
        return [
            lift(program, [x for x in its_sites if x.ends or x.name not in sites], self.drop_maps)
            for program, its_sites in zip(self.capture.programs, self.matched, strict=True)
        ]

    def rewritten(self, becomes: Mapping[str, Replacement | None]) -> list[Program]:
        """The programs with what each named site becomes, None for the teacher's own code; the others
        are lossless."""
        own = [site for site, replacement in becomes.items() if replacement is None]
        lifted = self.lifted_without(own) if own else self.lifted
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
    more = list(more)
    with one_thread():
        captured, outcomes = _identified(subject, batch, more, progress, softmax)
    if any("get_num_threads" in asked for asked in captured.observed.questions.values()):
        captured, outcomes = _identified(subject, batch, more, progress, softmax)
    give_back()  # what a trace and its experiments have freed is left in pieces
    if teacher.onnx is not None:
        from asapc.inputs.onnx.module import OnnxModule
        from asapc.inputs.onnx.verify import check_import

        assert isinstance(teacher.model, OnnxModule)
        check_import(teacher.model, teacher.onnx, batch)
    matched = [[x for x in found if not isinstance(x, Refusal)] for found in outcomes]
    regions = [x.name for found in outcomes for x in found]
    left = [
        LeftAlone(x.name, "refused", x.reason)
        for found in outcomes for x in found if isinstance(x, Refusal)
    ]  # fmt: skip
    sites: list[Site] = []
    good: list[list[MatchedSite]] = []
    of = _digest(teacher, captured, [batch, *more], device)
    names = {site.name for its_sites in matched for site in its_sites}
    if known is None or known.of != of or known.sites.keys() != names:
        graphs = [program.graph for program in captured.programs]
        with running_on(device, [teacher.model, *graphs]):
            batches = [given.on(device) for given in (batch, *more)]
            known = Replayed(of, replay(teacher.model, captured.programs, matched, batches, progress))
        give_back()
    for its_sites in matched:
        good.append([])
        for site in its_sites:
            outcome = judged(site, known.sites[site.name])
            if isinstance(outcome, Site):
                good[-1].append(site)
                sites.append(outcome)
            else:
                left.append(outcome)
    for its_program, its_sites, its_good in zip(captured.programs, matched, good, strict=True):
        why = _ends_otherwise(teacher.model, its_program, its_sites, its_good)
        if why is not None:
            left += [LeftAlone(site.name, "refused", f"{NOT_THE_MODEL}: {why}") for site in its_good]
            sites = [site for site in sites if site.name not in {one.name for one in its_good}]
            its_good.clear()
    regions += [name for name, _ in captured.skipped]
    left += [LeftAlone(name, "refused", f"cannot be captured: {why}") for name, why in captured.skipped]
    lifted = [lift(*its, drop_maps) for its in zip(captured.programs, good, strict=True)]
    found_all = Analysis(teacher.model, captured, lifted, good, sites, left, regions, known, drop_maps)
    if sites and not drop_maps and known.output_error is None:
        with found_all.running_on(device):
            error = _whole_replay(found_all, batch.on(device))
            allowed = OUTPUT_TOLERANCE + own_rounding(teacher.model, batch.on(device))
        if not error <= allowed:
            _check_calls(teacher, batch)
            raise VerificationError(
                "the lossless rewrite reproduces the untouched model's outputs",
                got=f"relative difference {error:.2g}",
                help=captured.observed.advice or "a data-dependent branch or early stop makes the model "
                "differ from the captured graph; lower its stopping threshold, or move that part into "
                "its own module",
            )
        found_all.replayed = replace(known, output_error=error)
    if sites:
        _note_gradients(found_all, batch, device)
    return found_all


def _ends_otherwise(
    model: nn.Module | None, program: Program, matched: Sequence[MatchedSite], good: Sequence[MatchedSite]
) -> str | None:
    """Why the loops of a program do not end where those of the model do, None where they do."""
    ends = {site.name: site.ends for site in matched if site.ends}
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


def _note_gradients(analysis: Analysis, batch: Batch, device: torch.device) -> None:
    """Put into the analysis what its sites hold of weights, and why their gradients are other ones."""
    held: dict[str, dict[str, str]] = {}
    for program, lifted, its_sites in zip(
        analysis.capture.programs, analysis.lifted, analysis.matched, strict=True
    ):
        held |= held_by(program, lifted, its_sites)
    gradient = analysis.replayed.gradient
    if gradient is None:
        whole = replace(analysis, drop_maps=False)
        model = analysis.model or analysis.capture.untouched[0].graph
        lossless = whole.lifted_without(()) if analysis.drop_maps else analysis.lifted
        with analysis.running_on(device):
            names = {name for its in held.values() for name in its}
            if analysis.capture.kind == "whole":
                names |= masks_of(analysis.capture.programs[0], analysis.matched[0])
            questions = analysis.capture.observed.questions.values()
            by_dtype = any(PRECISION in asked for asked in questions)
            gradient = no_gradient(model, lossless, batch.on(device), names, by_dtype) or ""
        analysis.replayed = replace(analysis.replayed, gradient=gradient)
    of_sites = {
        name: f"where keys are hidden, its own gradient differs by {found.gradient:.2g}"
        for name, found in analysis.replayed.sites.items() if not found.gradient <= GRADIENT_TOLERANCE
    }  # fmt: skip
    analysis.sites = [
        replace(site, constants=held[site.name], no_gradient=gradient or of_sites.get(site.name))
        for site in analysis.sites
    ]


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
    subject: nn.Module | ExportedProgram, batch: Batch, more: Sequence[Batch], progress: Progress,
    softmax: bool,
) -> tuple[Capture, list[list[MatchedSite | Refusal]]]:
    """The programs, and what was found in each. A loop that stays as it is, and may end early, is not
    what the program of the whole model holds: its attention is captured by module then. So it is where
    the code branches on data, and other data takes the other way, and where it makes a number of how
    many examples there are."""
    with progress.phase("tracing the model"):
        captured = capture(subject, batch.args, batch.kwargs, more)
        if isinstance(subject, nn.Module):
            captured = _of_one_way(subject, captured, batch, more)
    captured, outcomes = _matched(captured, progress, softmax)
    if captured.kind == "whole" and isinstance(subject, nn.Module):
        reason = not_the_model(captured.programs[0], outcomes[0])
        count = None if reason else _only_count(captured.programs[0], batch)
        if count:
            reason = f"the model's code computes a number from the {count} examples of the trace"
        if reason is not None:
            with progress.phase("tracing its modules"):
                alone = capture_modules(subject, batch.args, batch.kwargs, reason, captured.observed)
            if alone.programs:
                matched = _matched(alone, progress, softmax)
                # A program for one number of examples is of use where that is what it is called with.
                if not count or _sites(matched[1]) >= _sites(outcomes):
                    return matched
    return captured, outcomes


def _sites(outcomes: Sequence[Sequence[MatchedSite | Refusal]]) -> int:
    return sum(not isinstance(outcome, Refusal) for found in outcomes for outcome in found)


def _only_count(program: Program, batch: Batch) -> int:
    """The number of examples that a program of a model is fixed to, 0 where it takes others too."""
    sizes = [size for node in traced_places(program.graph) for size in node.meta["val"].shape[:1]]
    only = (len(batch), len(batch))
    return len(batch) if len(batch) > 1 and any(limits(size) == only for size in sizes) else 0


def _matched(
    captured: Capture, progress: Progress, softmax: bool
) -> tuple[Capture, list[list[MatchedSite | Refusal]]]:
    """What is found in each program, and the programs that it was found in."""
    with progress.phase("matching its layers"):
        asked = [replace(program, softmax=softmax) for program in captured.programs]
        found = [matched_program(program) for program in asked]
    return replace(captured, programs=[program for program, _ in found]), [sites for _, sites in found]


def _of_one_way(model: nn.Module, captured: Capture, batch: Batch, more: Sequence[Batch]) -> Capture:
    """Without programs that more data refuses, since it takes another way through the code."""
    ways = {program.name: _other_way(model, program, more) for program in captured.programs}
    other = next((way for way in ways.values() if way is not None), None)
    if other is None:
        return captured
    if captured.kind == "whole":
        captured = capture_modules(model, batch.args, batch.kwargs, other, captured.observed)
        return _of_one_way(model, captured, batch, more)
    kept = [program for program in captured.programs if ways[program.name] is None]
    left = [(name, way) for name, way in ways.items() if way is not None]
    return replace(captured, programs=kept, skipped=[*captured.skipped, *left])


def _other_way(model: nn.Module, program: Program, more: Sequence[Batch]) -> str | None:
    """The branch that goes both ways on the data, if there is one."""
    if not held_branches(program.graph):
        return None
    run = Runner(model, [program])
    try:
        for batch in more:
            run(batch)
    except BranchError as error:
        return f"goes both ways on the data: {error.asked}"
    return None


def own_rounding(model: nn.Module | None, batch: Batch) -> float:
    """How much further than OUTPUT_TOLERANCE a model in half precision may be from its lossless rewrite:
    twice as far as it is from itself in float32. 0 for one in float32, or without its code."""
    if model is None or not any(x.dtype in HALVES for x in model.parameters()):
        return 0.0
    widened = copy.deepcopy(model).float()
    given = pytree.tree_map_only(
        Tensor, lambda x: x.float() if x.dtype in HALVES else x, (batch.args, batch.kwargs)
    )
    exact = Runner(widened)(replace(batch, args=given[0], kwargs=given[1]))
    return 2 * largest_difference(Runner(model)(batch), exact)


def _check_calls(teacher: Teacher, batch: Batch) -> None:
    """InputError where the model's own outputs are NaN or differ from call to call: nothing can be
    compared with these."""
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


def _whole_replay(analysis: Analysis, batch: Batch) -> float:
    untouched = Runner(analysis.model, () if analysis.model else analysis.capture.untouched)(batch)
    if not tensor_outputs(untouched):
        raise InputError(
            "the model must return floating-point numbers, by which it is compared",
            got="none",
            help="return scores beside what is made of them, such as indices",
        )
    return largest_difference(untouched, Runner(analysis.model, analysis.lifted)(batch))
