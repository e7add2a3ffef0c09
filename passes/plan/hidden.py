"""Hidden: what a loop makes of rows and columns all of whose scores are as low as a mask makes them.

Data that shows no padding says nothing about padding. In float64 such a row is one like others, whatever
is subtracted from it. In float32 no digit is left next to -1e9, and log_softmax, a logsumexp that is
subtracted and duals that are added make three plans of it. So the loop is run in its own dtype as it is,
and the order of its sums is looked for that gives the same (ir.Written); none is a reason to refuse it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import WRITTEN, PlanConvention, Written
from asapc.passes.cut import is_tensor, reached
from asapc.passes.experiment import NoFit, first_fit, relative_error
from asapc.passes.plan.loops import NORMS, PRODUCTS, SUMS
from asapc.passes.products import BARRIERS, SOFTMAXES
from asapc.passes.sinkhorn.probe import HELD, Fit, Sample, map_of

aten = torch.ops.aten

EXACTLY = (-1e7, -1e9, -math.inf)  # low scores in float64
LOW = (-1e9, -1e300, -1e4)  # and in the loop's own dtype, whose lowest number may be above these
HIGH = 1e6  # of what hides tokens where code adds it to scores as if they were costs
FINITE = 1e3  # size of a number from which on it is one that hides
PATTERNS = ("a row", "a column", "both", "all", "all but one")
ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor}
# Nothing that goes through one of these is as low as a mask. A table that is looked up may be.
BOUNDED = {
    *(BARRIERS - {aten.embedding.default}), *SOFTMAXES, *SUMS, *NORMS, *PRODUCTS, aten.mm.default,
    aten.sigmoid.default, aten.tanh.default, aten.cdist.default, aten._cdist_forward.default,
    aten.logsumexp.default, aten.scaled_dot_product_attention.default, aten.relu.default,
}  # fmt: skip


def may_hide(scores: Node) -> bool:
    """Whether scores may be as low as a mask makes them: they are given, looked up or masked, or a number
    of that size, or a weight that differs between tokens, is in their sum."""
    return any(map(_may_be_low, summed_in(scores)))


def may_raise(scores: Node) -> bool:
    """Whether scores may be as high as a mask makes costs: such a number is added to them."""
    return any(node.target in ARITHMETIC and _has_large(node) for node in summed_in(scores))


def summed_in(scores: Node) -> set[Node]:
    """What scores are the sum of, or are made of otherwise: as low as one of these, they hide a token."""
    def onward(node: Node) -> list[Node]:
        return node.all_input_nodes if is_tensor(node) and node.target not in BOUNDED else []

    return {node for node in reached([scores], onward) if is_tensor(node)}


def _may_be_low(node: Node) -> bool:
    value = node.meta["val"]
    if node.op == "get_attr" or (node.op == "placeholder" and value.numel() == 1):  # as of a dustbin
        return any(size != 1 for size in value.shape[-2:])
    is_given = node.op == "placeholder" or node.target is aten.embedding.default
    return is_given or _has_large(node) or value.dtype is torch.bool


def _has_large(node: Node) -> bool:
    numbers = int | float if node.target in ARITHMETIC else float  # other ints are places
    return any(isinstance(x, numbers) and FINITE <= abs(x) < math.inf for x in node.args)


def with_hidden(
    draw: Callable[[], Tensor], show: Callable[[Tensor], Sample], fit: Fit[PlanConvention],
    added: Sequence[Node],
) -> Fit[PlanConvention]:  # fmt: skip
    """The fit that also gives what the loop makes of hidden rows and columns.  Raises NoFit.

    draw: random scores [B, H, N, M]; show: what the loop makes of scores, in their dtype.  added: the
    scores, and what is added to them in the loop; empty where a kernel is given.
    """
    tried = [(torch.float64, low, which) for low in EXACTLY for which in PATTERNS[:2]]
    hides = any(map(may_hide, added))
    if hides:
        dtype = added[0].meta["val"].dtype
        tried += [(dtype, max(low, torch.finfo(dtype).min), which) for low in LOW for which in PATTERNS]
        highest = min(HIGH, torch.finfo(dtype).max)
        tried += [(dtype, highest, which) for which in PATTERNS if any(map(may_raise, added))]
    sign = 1.0 if fit.convention.score_multiplier > 0 else -1.0
    observed = [
        (f"{pattern} of scores that are {sign * low:g} in {str(dtype).removeprefix('torch.')}",
         max(HELD, 4 * torch.finfo(dtype).eps), show(_hidden(draw().to(dtype), pattern, sign * low)))
        for dtype, low, pattern in tried
    ]  # fmt: skip

    def held(convention: PlanConvention) -> Fit[PlanConvention]:
        for text, limit, sample in observed:
            error = _error(convention, sample)
            if not error <= limit:
                wrong = f"{text} gives another plan (relative error {error:.2g})"
                raise NoFit(f"{wrong}: hide tokens through their marginals")
        return replace(fit, convention=convention)

    return first_fit(partial(held, convention) for convention in _conventions(fit.convention, hides))


def _hidden(scores: Tensor, pattern: str, low: float) -> Tensor:
    """The scores [B, H, N, M] with a row, a column, or more, of the last example hidden."""
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    hidden[-1] = pattern in ("a row", "both")
    hidden[:, -1] |= pattern in ("a column", "both")
    if pattern.startswith("all"):
        hidden[:] = True
        hidden[0, 0] = pattern == "all"
    scores[-1] = scores[-1].masked_fill(hidden, low)
    return scores


def hidden_in(scores: Node, convention: PlanConvention, values: Tensor) -> list[Tensor]:
    """The values of scores with rows and columns hidden, in their own dtype, where they may hide them."""
    sign = 1.0 if convention.score_multiplier > 0 else -1.0
    dtype, patterns = scores.meta["val"].dtype, PATTERNS[:3] if may_hide(scores) else ()
    return [_hidden(values.to(dtype, copy=True), pattern, sign * LOW[0]) for pattern in patterns]


def _conventions(plain: PlanConvention, hides: bool) -> Iterator[PlanConvention]:
    """The convention without an order of its sums; where scores may hide something, with each."""
    yield plain
    if plain.stabiliser is None and hides:
        forms = WRITTEN if plain.damping is None else ("duals", "reversed", "summed")
        for shares, form in itertools.product((False, True), forms):
            yield replace(plain, written=Written(form, shares))


def _error(convention: PlanConvention, sample: Sample) -> float:
    """Largest error over all matrices that the teacher has, relative to the largest entry of them."""
    known = sample.attention.isfinite().all(-1).all(-1)
    return relative_error(map_of(convention, sample)[known], sample.attention[known])
