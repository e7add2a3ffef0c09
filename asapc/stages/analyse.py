"""Analyse: a teacher on its first examples, and what was found in it (asapc.passes.analyse)."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from asapc.artifact import signature_of
from asapc.device import CPU
from asapc.errors import InputError, NoSiteError, nothing_found
from asapc.inputs.data import Batch, DataSource, open_data, own
from asapc.inputs.load import example_inputs
from asapc.inputs.teacher import Teacher
from asapc.passes.analyse import Analysis, LeftAlone, Site, analyse
from asapc.passes.replay import Replayed
from asapc.terminal.progress import Progress

EXAMPLE_BATCH = 4  # examples a model is captured and replayed on
REPLAYED_BATCHES = 3
SEARCHED_BATCHES = 32  # for examples of other sizes


def inspection(teacher: Teacher, analysis: Analysis) -> dict[str, Any]:
    """What `asapc inspect` shows: every site and every layer that is left alone, in the graph's order."""
    return {
        "model": teacher.source, "capture": analysis.capture.kind,
        "capture_reason": analysis.capture.reason,
        "sites": [_entry(outcome) for outcome in analysis.outcomes],
    }  # fmt: skip


def _entry(site: Site | LeftAlone) -> dict[str, Any]:
    status, reason = (site.status, site.reason) if isinstance(site, LeftAlone) else ("matched", "")
    return {
        "name": site.name,
        "status": status,
        "reason": reason,
        "heads": site.heads,
        "head_dim": site.head_dim,
        "replay_error": site.replay_error,
        "replay": dict(site.replay),
        "convention": site.convention.to_json() if site.convention else None,
    }


def analyse_example(
    teacher: Teacher, data: str | None, progress: Progress, device: torch.device = CPU
) -> Analysis:
    """Analyse a teacher on the first examples of its data, or on made-up ones where it is built in."""
    example, *more = _examples_of(teacher, data)
    return analyse(teacher, example, more=more, progress=progress, device=device)


def analyse_teacher(
    teacher: Teacher,
    source: DataSource,
    progress: Progress,
    drop_maps: bool = False,
    replayed: Mapping[str, Any] | None = None,
    device: torch.device = CPU,
    softmax: bool = False,
) -> tuple[Analysis, Batch]:
    """Analyse a teacher on its data; also gives the example batch that it was captured on.

    replayed: what a calibration knows of replay, which is not done again where all is as it was.
    softmax: whether softmax layers are sites, too.
    """
    example, *more = first_batches(source)
    known = None if replayed is None else Replayed.from_json(replayed)
    analysis = analyse(teacher, example, drop_maps, more, progress, known, device, softmax)
    return analysis, example


Analyse = Callable[..., tuple[Analysis, Batch]]


def analysed_once() -> Analyse:
    """analyse_teacher, for stages that one call runs on the same teacher, data and drop_maps: the first
    to need the analysis makes it."""
    known: list[tuple[Analysis, Batch]] = []

    def once(*args: Any, **named: Any) -> tuple[Analysis, Batch]:
        if not known:
            known.append(analyse_teacher(*args, **named))
        return known[0]

    return once


def require_sites(analysis: Analysis, progress: Progress) -> None:
    """Tell which layers are left alone.  Raises NoSiteError where that is all of them."""
    if not analysis.outcomes:
        raise nothing_found()
    if not analysis.sites:
        reasons = "; ".join(f"{left.name}: {left.reason}" for left in analysis.left_alone[:4])
        help = "`asapc inspect` gives the reason for each layer; docs/recognition.md shows what to write"
        if not any(program.softmax for program in analysis.capture.programs):
            help += "; to replace softmax layers, write `from: softmax` in the recipe"
        raise NoSiteError("no attention layer of the model can be compiled", got=reasons, help=help)
    for left in analysis.left_alone:
        progress.note(f"{left.name} {left.status}: {left.reason}")


def forward_signature(teacher: Teacher) -> inspect.Signature:
    """Of the teacher's forward, or of the call that an exported program was traced with.

    Raises InputError for a model that torch.jit has made.
    """
    if isinstance(teacher.model, torch.jit.ScriptModule):
        raise InputError(
            "a model must be Python code, which is traced anew",
            got="one that torch.jit has scripted or traced", help="compile the model it was made from",
        )  # fmt: skip
    if teacher.model is not None:
        return inspect.signature(teacher.model.forward)
    assert teacher.program is not None
    spec = teacher.program.call_spec.in_spec
    _, keywords = pytree.tree_unflatten([None] * spec.num_leaves, spec)
    positional = [n for n in teacher.program.graph_signature.user_inputs if n not in keywords]
    return signature_of({"args": positional, "kwargs": list(keywords)})


def _examples_of(teacher: Teacher, data: str | None) -> list[Batch]:
    if data is not None:
        return first_batches(open_data(data, forward_signature(teacher)))
    built_in = example_inputs(teacher)
    if built_in is None:
        raise InputError(
            "inspect: a model that is not built in needs a batch of data",
            help="pass --data DATA with arrays named after the arguments of forward",
        )
    return [Batch((), dict(built_in), None, [0] * EXAMPLE_BATCH)]


def first_batches(source: DataSource) -> list[Batch]:
    """What a model is captured on, and what its sites are replayed on besides, examples of other sizes
    among that if they come early in the data."""
    batches: list[Batch] = []
    for batch in itertools.islice(source.batches(EXAMPLE_BATCH), SEARCHED_BATCHES):
        if len(batches) < REPLAYED_BATCHES:
            batches.append(own(batch))
        elif any(one.sizes() != batches[0].sizes() for one in batches):
            break
        elif batch.sizes() != batches[0].sizes():
            batches[-1] = own(batch)
    if not batches:
        raise InputError(f"{source.source}: the data must hold examples", got="none")
    return batches
