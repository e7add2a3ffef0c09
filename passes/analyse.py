"""Analyse: capture, match, lift and replay, before anything is fitted.

A site whose operator does not reproduce the teacher's own attention on real activations is kept as it
is, with the error it would have had.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from asapc.data import Batch
from asapc.errors import VerificationError
from asapc.formats.load import Teacher
from asapc.ir import AnyConvention, Convention, Program
from asapc.passes.calls import operator_calls, site_function
from asapc.passes.capture import Capture, capture
from asapc.passes.lift import lift
from asapc.passes.match import AnySite, LotSite, Refusal, match
from asapc.passes.verify import largest_difference
from asapc.runner import Runner, Tap

REPLAY_TOLERANCE = 1e-4  # float32 attention maps, relative to the largest entry
OUTPUT_TOLERANCE = 1e-3  # the whole model's outputs, relative to max(1, largest entry)


@dataclass(frozen=True)
class Site:
    """A site that replays: its convention, heads, and the replay error on real activations."""

    name: str
    convention: AnyConvention
    heads: int
    head_dim: int
    replay_error: float

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
    convention: AnyConvention | None = None
    heads: int | None = None
    head_dim: int | None = None


@dataclass
class Analysis:
    """teacher programs and their lossless rewrites, and every region in order.

    lifted: parallel to capture.programs; the i-th entry of `sites` is the i-th operator call.
    matched: the regions behind `sites`, of each program.
    output_error: untouched teacher against the lossless rewrite on the batch (relative).
    """

    model: nn.Module | None
    capture: Capture
    lifted: list[Program]
    matched: list[list[AnySite]]
    sites: list[Site]
    left_alone: list[LeftAlone]
    regions: list[str]
    output_error: float
    drop_maps: bool = False

    def lifted_without(self, sites: Collection[int]) -> list[Program]:
        """The lifted programs with these sites left as the teacher has them; attention maps that were
        dropped elsewhere stay."""
        programs, start = [], 0
        for program, own in zip(self.capture.programs, self.matched, strict=True):
            kept = [site for i, site in enumerate(own, start) if i not in sites]
            programs.append(lift(program, kept, self.drop_maps))
            start += len(own)
        return programs


def analyse(teacher: Teacher, batch: Batch, drop_maps: bool = False) -> Analysis:
    """Everything that is known about a teacher before data is streamed through it.

    Raises InputError if the model cannot be run or captured, VerificationError if an ONNX file was not
    understood as onnxruntime does, or if the lossless rewrite does not reproduce the untouched model
    although every site replays.
    """
    subject: nn.Module | ExportedProgram
    subject = teacher.model if teacher.model is not None else _program(teacher)
    captured = capture(subject, batch.args, batch.kwargs)
    if teacher.onnx is not None:
        from asapc.onnx.check import check_import
        from asapc.onnx.module import OnnxModule

        assert isinstance(teacher.model, OnnxModule)
        check_import(teacher.model, teacher.onnx, batch)
    sites: list[Site] = []
    left: list[LeftAlone] = []
    lifted: list[Program] = []
    regions_of: list[list[AnySite]] = []
    regions: list[str] = []
    for program in captured.programs:
        matched: list[AnySite] = []
        for outcome in match(program):
            regions.append(outcome.name)
            if isinstance(outcome, Refusal):
                left.append(LeftAlone(outcome.name, "refused", outcome.reason))
            else:
                matched.append(outcome)
        errors = _replay(program, matched)
        for site, error in zip(matched, errors, strict=True):
            if error <= REPLAY_TOLERANCE:
                sites.append(Site(site.name, site.convention, site.heads, site.head_dim, error))
            else:
                reason = f"does not replay on the given data: relative error {error:.2g}"
                left.append(
                    LeftAlone(
                        site.name, "kept", reason, error, site.convention, site.heads, site.head_dim
                    )
                )
        good = [s for s, e in zip(matched, errors, strict=True) if e <= REPLAY_TOLERANCE]
        lifted.append(lift(program, good, drop_maps))
        regions_of.append(good)
    for name, why in captured.skipped:
        regions.append(name)
        left.append(LeftAlone(name, "refused", f"cannot be captured by torch.export: {why}"))
    error = 0.0
    if sites and not drop_maps:
        error = _whole_replay(teacher, captured, lifted, batch)
        if not error <= OUTPUT_TOLERANCE:
            raise VerificationError(
                "the lossless rewrite reproduces the untouched model's outputs",
                got=f"relative difference {error:.2g}",
                help="a data-dependent branch or early stop of the model takes another way than the "
                "captured graph; raise its stopping threshold, or export that part as its own module",
            )
    return Analysis(teacher.model, captured, lifted, regions_of, sites, left, regions, error, drop_maps)


def _program(teacher: Teacher) -> ExportedProgram:
    assert teacher.program is not None
    return teacher.program


def _replay(program: Program, sites: Sequence[AnySite]) -> list[float]:
    """Largest error of each operator against the teacher's own code, relative to its largest entry.

    Maps are compared where there are any: a LOT layer has none, so what it gives is compared.
    """
    if not sites:
        return []
    lifted = lift(program, sites)
    calls = operator_calls(lifted.graph)
    flat = pytree.tree_leaves((program.args, program.kwargs))
    whole = Program("", lifted.graph, program.args, program.kwargs, None)
    with torch.no_grad():
        theirs = _values_of(program, [_observed(site) for site in sites], flat)
        ours = _values_of(lifted, [o.call for o in calls], flat)
        _, seen = Tap(None, [whole])(Batch(program.args, program.kwargs, None, []))
        errors = []
        for index, site in enumerate(sites):
            teacher, order = theirs[_observed(site)], _order(site)
            if order is not None:
                teacher = teacher.permute(order)
            if isinstance(site, LotSite):
                own = ours[calls[index].call]
            else:
                own = site_function(lifted.graph, index)(seen[index], None)
            own = own.reshape(teacher.shape)
            scale = float(teacher.abs().max()) if teacher.numel() else 1.0
            difference = float((own.double() - teacher.double()).abs().max()) if own.numel() else 0.0
            error = difference / max(scale, 1e-30)
            errors.append(float("inf") if error != error else error)
    return errors


def _observed(site: AnySite) -> Node:
    return site.outer.node if isinstance(site, LotSite) else site.attention


def _order(site: AnySite) -> tuple[int, ...] | None:
    return site.outer.out_order if isinstance(site, LotSite) else site.value.left_order


def _values_of(program: Program, wanted: Sequence[Node], inputs: Sequence[Any]) -> dict[Node, Tensor]:
    """What the nodes hold on the inputs."""
    values: dict[Node, Tensor] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            if n in wanted:
                values[n] = value
            return value

    Recorder(program.graph).run(*inputs, enable_io_processing=False)
    return values


def _whole_replay(
    teacher: Teacher, captured: Capture, lifted: Sequence[Program], batch: Batch
) -> float:
    if teacher.model is not None:
        own = Runner(teacher.model)(batch)
    else:
        own = Runner(None, captured.programs)(batch)
    return largest_difference(own, Runner(teacher.model, lifted)(batch))
