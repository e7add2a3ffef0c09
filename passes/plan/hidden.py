"""Hidden: what a loop makes of rows and columns all of whose scores are as low as a mask makes them.

Data that shows no padding says nothing about padding. In float64 such a row is one like others, whatever
is subtracted from it. In float32 no digit is left next to -1e9, and log_softmax, a logsumexp that is
subtracted and duals that are added make three plans of it. So the loop is run in its own dtype as it is,
and the order of its sums is looked for that gives the same (ir.Written); none is a reason to refuse it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import WRITTEN, PlanConvention, Written
from asapc.passes.cut import is_tensor
from asapc.passes.plan.loops import NORMS, PRODUCTS, SOFTMAXES, SUMS
from asapc.passes.plan.probe import Observed, PlanFit, plan_error, plan_of
from asapc.passes.products import BARRIERS
from asapc.passes.sinkhorn.probe import HELD

aten = torch.ops.aten

EXACTLY = (-1e7, -1e9, -math.inf)  # low scores in float64
LOW = (-1e9, -math.inf, -1e4)  # and in the loop's own dtype, where -inf stands for its lowest number
PATTERNS = ("row", "column", "both", "all", "all but one")
# Nothing that goes through one of these is as low as a mask. A table that is looked up may be.
BOUNDED = {
    *(BARRIERS - {aten.embedding.default}), *SOFTMAXES, *SUMS, *NORMS, *PRODUCTS, aten.mm.default,
    aten.sigmoid.default, aten.tanh.default, aten.cdist.default, aten._cdist_forward.default,
    aten.logsumexp.default, aten.scaled_dot_product_attention.default, aten.relu.default,
}  # fmt: skip


class Trials(Protocol):
    """Observations of a loop, see plan.match."""

    rough: float

    def noise(self, size: Sequence[int]) -> Tensor: ...
    def observe(
        self, scores: Tensor, lengths: dict[Any, int], mild: bool = True
    ) -> tuple[Observed, list[Tensor]]: ...


def may_hide(scores: Node) -> bool:
    """Whether scores may be as low as a mask makes them: they are given, looked up, or masked."""
    seen: set[Node] = set()
    stack = [scores]
    while stack:
        node = stack.pop()
        if node in seen or not is_tensor(node) or node.target in BOUNDED or node.op == "get_attr":
            continue
        if node.op == "placeholder" or node.target is aten.embedding.default:
            return True
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return False


def with_hidden(
    trials: Trials, size: Sequence[int], lengths: dict[Any, int], fit: PlanFit, scores: Node, kernel: bool
) -> PlanFit | str:  # fmt: skip
    """The fit that also gives what the loop makes of hidden rows and columns, or what is wrong with it.

    size: [B, H, N, M] of the scores, which hold their exponentials where `kernel`.
    """
    for side, low in itertools.product(PATTERNS[:2], EXACTLY):
        o, _ = trials.observe(_hidden(trials, size, side, low), lengths, mild=False)
        if not bool(o.plan.isfinite().all()):
            continue  # the teacher gives nothing there either
        error = plan_error(fit.convention, [o])
        if not error <= HELD:
            return f"a {side} of scores that are all {low:g} is another; relative error {error:.2g}"
    if kernel or not may_hide(scores):
        return fit
    dtype = scores.meta["val"].dtype
    observed = [
        trials.observe(_hidden(trials, size, pattern, low, dtype), lengths, mild=False)[0]
        for low, pattern in itertools.product(LOW, PATTERNS)
    ]
    tolerance = max(HELD, 4 * torch.finfo(dtype).eps)
    nearest = math.inf
    for convention in _conventions(fit.convention):
        error = 0.0
        for o in observed:
            error = max(error, _error(convention, o))
            if not error <= tolerance:
                break
        else:
            return replace(fit, convention=convention)
        nearest = min(nearest, error)
    kind = str(dtype).removeprefix("torch.")
    return (
        f"where a mask makes all scores of a row or column low, its sums in {kind} leave another plan "
        f"(relative error {nearest:.2g}): hide tokens by marginals, or by log_softmax in every half-step"
    )


def _hidden(
    trials: Trials, size: Sequence[int], pattern: str, low: float, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Random scores [B, H, N, M], of whose last example one row or column, or more, is hidden."""
    scores = (trials.noise(size) / abs(trials.rough)).to(dtype)
    if dtype != torch.float64:
        low = max(low, torch.finfo(dtype).min)
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool)
    hidden[-1] = pattern in ("row", "both")
    hidden[:, -1] |= pattern in ("column", "both")
    if pattern.startswith("all"):
        hidden[:] = True
        hidden[0, 0] = pattern == "all"
    scores[-1] = scores[-1].masked_fill(hidden, math.copysign(low, -trials.rough))
    return scores


def _conventions(found: PlanConvention) -> Iterator[PlanConvention]:
    """The convention without an order of its sums, and with each."""
    yield found
    if found.stabiliser is None:
        forms = WRITTEN if found.damping is None else ("duals", "reversed", "summed")
        for shares, form in itertools.product((False, True), forms):
            yield replace(found, written=Written(form, shares))


def _error(convention: PlanConvention, observed: Observed) -> float:
    """Largest error over all matrices that the teacher has, relative to the largest entry of them."""
    known = observed.plan.isfinite().all(-1).all(-1)
    if not bool(known.any()):
        return 0.0
    theirs, ours = observed.plan[known].double(), plan_of(convention, observed)[known].double()
    error = float((ours - theirs).abs().amax() / theirs.abs().amax().clamp(min=1e-300))
    return math.inf if error != error else error
