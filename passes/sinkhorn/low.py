"""Low numbers: what a loop makes of those that hide keys, such as -1e9.

Empty, an example in which a mask hides every key:

before: a region whose loop and key mask are known
after:  products.Empty, or NoFit: why no operator can stand for it

Code hides keys by finite numbers, and where all scores are as low, what it gives is decided by rounding:
log M is lost beside -1e9 in float32. So the region runs in its own precision, too.

Hard biases, whose low numbers come where the data held a soft bias:

before: a score bias whose coefficient is known
after:  the same, with a check at run time where the operator follows small numbers alone; or NoFit: why
        the loop needs its scores as the code makes them

Beside -1e9 a float32 dual loses its other terms, and a loop that subtracts sums from scores loses others.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import Convention, OutputFactor, SiteTensors
from asapc.operators.masks import HIDDEN_SCORE, MASKED_BELOW
from asapc.operators.sinkhorn import loop_of
from asapc.passes.branches import spoken
from asapc.passes.cut import ancestors, depends_on_data
from asapc.passes.experiment import NoFit, outcome, relative_error
from asapc.passes.masks import varies
from asapc.passes.products import Empty
from asapc.passes.sinkhorn.probe import attention_of, factor_of
from asapc.passes.sinkhorn.site import ScoreBias
from asapc.program.calls import apply_operator

SPREADS = (0.1, 3.0, 30.0)  # standard deviations of the scores, in units of epsilon
ALIKE = 1e-4  # relative difference of maps in float32
ROUNDED = 2e-3  # the same where scores stand beside -1e4
LAST_PLACE = 64.0  # of the low number beside which scores are lost, as of -1e9 in float32
REFUSED = Empty(OutputFactor(math.nan), refused=True)
FACTORS = tuple(2.0 ** (power / 4) for power in range(-24, 45))  # of those scores
LOWEST = (HIDDEN_SCORE, float(torch.finfo(torch.float32).min))
ALIKE_WITH_BIAS = 1e-3  # relative difference of maps in float32
SPREAD, SHARP = 3.0, 30.0  # of the scores, in units of epsilon


@dataclass(frozen=True)
class _Map:
    """One map [B, H, N, M] of an example without keys, of equal scores, and of the scores if all were
    active; the latter two as the convention has them."""

    theirs: Tensor
    equal: Tensor
    open: Tensor


@dataclass(frozen=True)
class EmptyExamples:
    """A region with every key hidden by one of its inputs.

    experiment: passes.sinkhorn.match.RegionExperiment.  index: of the input.
    """

    experiment: Any
    convention: Convention
    index: int

    def of_mask(self) -> Empty:
        """Of a boolean mask, whose number is in the region's code."""
        return self._rounded(HIDDEN_SCORE) or self._unknown()

    def _is_shown(self) -> bool:
        """Whether the example call has such an example."""
        shown = self.experiment.region.inputs[self.index].meta.get("example")
        active = bool(self.experiment.neutral[self.index].flatten()[0])
        return shown is not None and bool((shown != active).all(-1).any())

    def of_scores(self, hides: float) -> Empty:
        """Of a mask that is added to scores, which may hide keys by any number up to `hides`."""
        near = self._of(self._maps(self.experiment, hides))
        far = self._rounded(float(torch.finfo(torch.float32).min))
        infinite = self._of(self._maps(self.experiment.rounded, -math.inf))
        if near is None or far is None or infinite is None or far.open or infinite.open:
            return self._unknown()
        if near == far:
            return Empty(far.share, infinite=infinite.share)
        if not near.open or far.share.coefficient == 0.0:
            return self._unknown()
        return Empty(far.share, True, self._reach(), infinite.share)

    def _unknown(self) -> Empty:
        """Such an example is an error when it comes.  Raises NoFit if the example call has one."""
        if self._is_shown():
            node = spoken(self.experiment.region.inputs[self.index])
            raise NoFit(f"what an example gives in which {node} hides every key is not known")
        return REFUSED

    def beside(self, others: Sequence[int], of_keys: bool) -> Empty:
        """Of one of two masks, or of one of queries alone: nothing, as operators have it of queries that
        are all hidden, also where the code gives what is no number.

        others: the other mask, which hides nothing, some tokens or, beside one of keys, all of them.
        """
        experiment, sizes = self.experiment, [x.shape[-1] for x in self.experiment.neutral]
        tokens = [torch.arange(sizes[index]) for index in others]
        options = [(x >= 0, x % 3 != 1, *([x < 0] if of_keys else [])) for x in tokens]
        boolean = experiment.neutral[self.index].dtype == torch.bool
        lows = (HIDDEN_SCORE,) if boolean else (MASKED_BELOW, HIDDEN_SCORE, -math.inf)
        nothing = torch.zeros(sizes[self.index], dtype=torch.bool)
        for spread, low, active in itertools.product(SPREADS, lows, itertools.product(*options)):
            hidden = {self.index: nothing, **dict(zip(others, active, strict=True))}
            s = experiment.scores(spread)
            theirs = experiment.rounded.attention(s, experiment.hiding(hidden, low))
            if bool(theirs.nan_to_num(0.0, 0.0, 0.0).any()):
                return self._unknown()
        none = OutputFactor(0.0)
        return Empty(none, infinite=none) if of_keys else Empty()

    def _hidden(self, at: dict[Any, int], score: float) -> list[Tensor]:
        nothing = torch.zeros(self.experiment.size(at)[-1], dtype=torch.bool)
        inputs: list[Tensor] = self.experiment.hiding({self.index: nothing}, score, at)
        return inputs

    def _rounded(self, score: float) -> Empty | None:
        """What it gives in its own precision; as in float64 where that is nothing but rounding."""
        maps = self._maps(self.experiment.rounded, score)
        if self.experiment.rounded is self.experiment:
            return self._of(maps)
        exact = self._of(self._maps(self.experiment, score))
        if exact is not None and all(_holds(exact, one, ROUNDED) for one in maps):
            return exact
        return self._of(maps)

    def _maps(self, experiment: Any, score: float) -> list[_Map]:
        """At scores at which it is finite with every key shown: exp(S) is not, at sharp ones."""
        observed = []
        for at, spread in itertools.product(self.experiment.sizes, SPREADS):
            s = self.experiment.scores(spread, at)
            if bool(experiment.attention(s, self.experiment.resized(at), at).isfinite().all()):
                theirs = experiment.attention(s, self._hidden(at, score), at)
                equal, opened = (attention_of(self.convention, x, None) for x in (torch.zeros_like(s), s))
                observed.append(_Map(theirs, equal, opened))
        return observed

    def _of(self, maps: Sequence[_Map]) -> Empty | None:
        """The simplest that holds, None if nothing does."""
        mild = [x for x in maps if bool(x.theirs.isfinite().all())]
        if not mild:
            nothing = all(bool(x.theirs.isnan().all()) for x in maps)
            return Empty(OutputFactor(math.nan)) if nothing else None
        share = outcome(lambda: factor_of([_ratio(x) for x in mild]))
        options = [Empty(), Empty(OutputFactor(0.0)), Empty(open=True)]
        if isinstance(share, OutputFactor):
            options.insert(2, Empty(share))
        return next((x for x in options if all(_holds(x, one, ALIKE) for one in maps)), None)

    def _reach(self) -> float:
        """How many last places of a low number the largest products q k are that are lost beside it."""
        at = self.experiment.few
        inputs = self._hidden(at, -LAST_PLACE / torch.finfo(self.experiment.rounded.cut.precision).eps)
        s = torch.zeros(self.experiment.rounded.size(at), dtype=torch.float64)
        s[..., 0, 0], s[..., -1, -1] = 1.0, -1.0
        lost = 0.0
        for factor in FACTORS:
            theirs = self.experiment.rounded.attention(s * factor, inputs, at)
            if not relative_error(theirs, theirs.flatten()[0].expand_as(theirs)) <= ALIKE:
                break
            lost = factor
        return lost / LAST_PLACE


def _ratio(one: _Map) -> tuple[int, int, float, float]:
    queries, keys = one.theirs.shape[-2:]
    return queries, keys, float(keys), float(one.theirs.flatten()[0] / one.equal.flatten()[0])


def _holds(empty: Empty, one: _Map, tolerance: float) -> bool:
    """Whether a map is what is said."""
    share = empty.share.value(*one.theirs.shape[-2:])
    return relative_error(one.theirs, one.open if empty.open else one.equal * share) <= tolerance


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
    for (hidden, spread), low in itertools.product(patterns, LOWEST):
        s = experiment.scores(spread).to(experiment.rounded.cut.precision)
        value = torch.where(hidden, low, neutral)
        added = experiment.added(value * bias.coefficient).to(s.dtype)
        operands = replace(SiteTensors.of_scores(s), bias=added, scored=False)
        ours = apply_operator(loop, operands, None, settings)
        theirs = experiment.rounded.attention(s, experiment.replaced(index, value))
        if not relative_error(ours, theirs) <= ALIKE_WITH_BIAS:
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
