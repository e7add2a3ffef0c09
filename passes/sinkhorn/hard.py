"""Hard biases: what a loop makes of numbers such as -1e9 that come where its data held a soft bias.

before: a score bias whose coefficient is known
after:  the same, with a check at run time where the operator follows small numbers alone; or NoFit: why
        the loop needs its scores as the code makes them

Beside -1e9 a float32 dual loses its other terms, and a loop that subtracts sums from scores loses others.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import Convention, SiteTensors
from asapc.operators.masks import HIDDEN_SCORE, MASKED_BELOW
from asapc.operators.sinkhorn import loop_of
from asapc.passes.branches import spoken
from asapc.passes.cut import ancestors, depends_on_data
from asapc.passes.experiment import NoFit, relative_error
from asapc.passes.masks import varies
from asapc.passes.sinkhorn.site import ScoreBias
from asapc.program.calls import apply_operator

VALUES = (HIDDEN_SCORE, float(torch.finfo(torch.float32).min))
ALIKE = 1e-3  # relative difference of maps in float32
SPREAD, SHARP = 3.0, 30.0  # of the scores, in units of epsilon


def with_low_numbers(experiment: Any, convention: Convention, bias: ScoreBias) -> ScoreBias:
    """The bias, with its check where it needs one.

    experiment: passes.sinkhorn.match.RegionExperiment.
    """
    example = bias.node.meta["example"]
    tables, is_data = _tables(bias.node), depends_on_data(bias.node)
    # A table may have a number that hides keys, which the data did not ask for.
    hard = any(bool(((x <= MASKED_BELOW) | (x >= -MASKED_BELOW)).any()) for x in (example, *tables))
    if not is_data and not hard and not tables:
        return bias
    index = experiment.region.inputs.index(bias.node)
    if _follows(experiment, convention, bias, index):
        return replace(bias, all_or_nan=_is_nan_without_keys(experiment, index))
    if (bool(example.any()) or not is_data) and not hard:
        return replace(bias, small=True)
    raise NoFit(
        f"{spoken(bias.node)} may hide keys by low numbers, which only the scores it is added to show"
    )


def _tables(bias: Node) -> list[Tensor]:
    """Weights and constants that it is computed from."""
    module = bias.graph.owning_module
    tensors = [operator.attrgetter(str(node.target))(module) for node in ancestors(bias)
               if node.op == "get_attr"]  # fmt: skip
    return [x for x in tensors if isinstance(x, Tensor)]


def _follows(experiment: Any, convention: Convention, bias: ScoreBias, index: int) -> bool:
    """Whether the operator makes of low numbers what the code does in its own precision."""
    neutral: Tensor = experiment.neutral[index]
    loop, settings = loop_of(convention)
    patterns = _patterns(neutral, varies(bias.node, -2))
    for (hidden, spread), low in itertools.product(patterns, VALUES):
        s = experiment.scores(spread).to(experiment.rounded.cut.precision)
        value = torch.where(hidden, low, neutral)
        added = experiment.added(value * bias.coefficient).to(s.dtype)
        operands = replace(SiteTensors.of_scores(s), bias=added, scored=False)
        ours = apply_operator(loop, operands, None, settings)
        theirs = experiment.rounded.attention(s, experiment.replaced(index, value))
        if not relative_error(ours, theirs) <= ALIKE:
            return False
    return True


def _is_nan_without_keys(experiment: Any, index: int) -> bool:
    """Whether the code gives NaN where the bias is -inf everywhere, as no operator does."""
    nothing = torch.full_like(experiment.neutral[index], -math.inf)
    inputs = experiment.replaced(index, nothing)
    return bool(experiment.rounded.attention(experiment.scores(), inputs).isnan().all())


def _patterns(neutral: Tensor, by_query: bool) -> Iterator[tuple[Tensor, float]]:
    """Where low numbers are, and the spread of the scores: at some keys, at all but one, at all, and at
    some keys of some queries."""
    keys = torch.arange(neutral.shape[-1])
    yield (keys % 3 == 1).expand(neutral.shape), SPREAD
    yield (keys != len(keys) // 2).expand(neutral.shape), SPREAD
    yield (keys >= 0).expand(neutral.shape), SHARP
    if by_query:
        queries = torch.arange(neutral.shape[-2])[:, None]
        yield ((keys + 2 * queries) % 5 < 2).expand(neutral.shape), SPREAD
