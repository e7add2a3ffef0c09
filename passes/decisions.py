"""Decisions: what a part of a graph does differently where its scores are larger, smaller or 0.

    where(|S| < 0.2, ..), S.clamp(-1e4, 1e4), nan_to_num, relu, maximum: sides of a threshold
    round, floor, // and casts to whole numbers: steps everywhere

No experiment on scores of an ordinary size sees a threshold at 1e4. So a run notes on which side of each
it was, and who tries conventions scales the scores until both sides of each have been seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Interpreter, Node

from asapc.passes.branches import spoken
from asapc.passes.cut import SHAPE_ONLY, Part, ancestors, descendants, is_bool, is_tensor, operator_name
from asapc.passes.products import BARRIERS

aten = torch.ops.aten

BOUNDS = {
    "clamp", "clamp_min", "clamp_max", "clip", "relu", "relu6", "hardtanh", "threshold", "maximum",
    "minimum", "fmax", "fmin", "nan_to_num", "hardshrink", "softshrink", "leaky_relu",
}  # fmt: skip
SIGNS = {  # what differs most where its input changes its sign, softly or not
    "sign", "sgn", "heaviside", "signbit", "sigmoid", "tanh", "erf", "hardsigmoid", "log_sigmoid",
    "softplus", "silu", "gelu", "elu", "atan",
}  # fmt: skip
STEPS = {
    "round", "floor", "ceil", "trunc", "fix", "frac", "floor_divide", "remainder", "fmod", "bucketize",
    "searchsorted",
}  # fmt: skip
FINITE = {"isnan", "isinf", "isfinite"}
SMALL = 1e-2  # what only keeps a division or a logarithm from what is not finite is smaller
MASKED = 1e6  # to ask whether a number hides a token, code compares it with one at least as large
HUGE = 1e7  # beyond it, single precision cannot tell apart scores that differ by 1


class Change(NamedTuple):
    """Of all scores: S -> scale S + shift, where the shift may be another in every row."""

    scale: float = 1.0
    shift: float = 0.0


POWERS = (*range(-30, -3, 9), *range(-3, 8), *range(10, 38, 9))
TRIED = (
    [Change(10.0**power) for power in POWERS],
    [Change(-(10.0**power)) for power in POWERS[::6]],
    [Change(shift=10.0**power) for power in POWERS[3:-4]],
    [Change(shift=-(10.0**power)) for power in POWERS[3:-4:2]],
)  # single precision holds what is between, and beside a larger shift nothing of the scores
HALVINGS = 8  # of what lies between two of them, where a decision changes there
COARSE = 3  # times fewer of both, where each takes long

Sides = frozenset[tuple[Node, int]]
"""Of every decision, the sides that its entries were on: 1 and 0, or above, below and within bounds."""


class Decisions(Interpreter):
    """Runs a cut as it is, and notes on which sides of its thresholds the entries are.

    by: the inputs, by their number, on which the decisions of interest depend.
    """

    def __init__(self, module: GraphModule, by: int = 1) -> None:
        super().__init__(module)
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        sizes = {*SHAPE_ONLY, aten.sym_size.int}  # through which no numbers go
        self._made = {node for node in descendants(inputs[:by]) if node.target not in sizes}
        asked = {
            node for node in self._made if is_bool(node) or operator_name(node) in BOUNDS | SIGNS
            if not self._made.isdisjoint(node.all_input_nodes)
        }  # fmt: skip
        self.nodes = {node for node in asked if not self._hides(node)}
        self._sides: set[tuple[Node, int]] = set()

    def taken(self) -> Sides:
        """The sides of all runs since they were taken last."""
        sides, self._sides = frozenset(self._sides), set()
        return sides

    def one_sided(self, sides: Sides) -> list[Node]:
        """Questions to which only one answer was ever seen, apart from whether something is finite or a
        divisor too small."""
        return [
            node for node in sorted(self.nodes) if is_bool(node) and not self._guards(node)
            and len({side for at, side in sides if at is node}) < 2
        ]  # fmt: skip

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self.nodes:
            compared = self.env[next(x for x in n.all_input_nodes if x in self._made)]
            if operator_name(n) in BOUNDS:
                sides = (value > compared).int() - (value < compared).int()
                sides[compared.isnan() & ~value.isnan()] = 2  # a division by 0 that is made up for
            else:
                sides = compared.sign() if operator_name(n) in SIGNS else value
            self._sides.update((n, int(side)) for side in sides.unique())
        return value

    def _guards(self, node: Node) -> bool:
        """Whether a question is only whether numbers are finite, or a divisor as good as 0."""
        made = [source for source in node.all_input_nodes if source in self._made]
        if operator_name(node) in FINITE or (len(node.args) == 2 and node.args[0] is node.args[1]):
            return True
        if all(is_bool(source) for source in made):
            return all(self._guards(source) for source in made)
        number = _compared_with(node)
        return number is not None and abs(number) <= SMALL

    def _hides(self, node: Node) -> bool:
        """Whether a question is only whether numbers are so large that they hide tokens, as -1e9 does;
        what happens where they do is for the experiments with masks."""
        made = [source for source in node.all_input_nodes if source in self._made]
        if made and all(is_bool(source) for source in made):
            return all(self._hides(source) for source in made)
        number = _compared_with(node)
        return is_bool(node) and number is not None and abs(number) >= MASKED


def makes_up_for(nodes: Iterable[Node]) -> Node | None:
    """The first of these that gives a number where it is given NaN."""
    makers = (node for node in nodes if operator_name(node) in {"nan_to_num", *FINITE} - {"isinf"})
    return min(makers, default=None)


def rounded(part: Part) -> str | None:
    """Where a part rounds what it computes, to whole numbers or to a half, which no operator does."""
    scores = descendants(part.inputs[:1]) & part.inside
    for node in sorted(scores, key=lambda node: node.name):
        if _is_step(node):
            return f"{spoken(node)} rounds scores"
    layers = [
        node for node in ancestors(*part.inputs, until=BARRIERS)
        if is_tensor(node) and (node.target in BARRIERS or node.op in ("placeholder", "get_attr"))
    ]  # fmt: skip
    if any(_is_short(node) for node in layers):
        return None  # a model, or what an autocast makes of one, in half precision throughout
    first = min(filter(_is_short, part.inside), default=None)
    if first is None:
        return None
    name = str(first.meta["val"].dtype).removeprefix("torch.")
    return f"{spoken(first)} rounds to {name} what is computed in single precision"


def both_sides(
    decisions: Decisions,
    look: Callable[[Change], Sides],
    judge: Callable[[Change], float | None],
    coarsely: bool = False,
) -> Iterator[tuple[Node, float | None]]:
    """Every decision of which another side was reached, with the error there; None: always the same side.

    look: the sides after a change; judge: the error there, None where nobody can tell.
    """
    known: Sides = frozenset()
    answers: Sides = frozenset()  # those on scores that are not all the same to single precision
    part = COARSE if coarsely else 1
    for line in TRIED:
        before: tuple[Change, Sides] | None = None
        for change in line[::part]:
            at = change, look(change)
            tried, crossed = [at], frozenset[tuple[Node, int]]()
            if before is not None and before[1] != at[1]:
                crossed = before[1] ^ at[1]
                tried = [*_nearest(look, before, at, HALVINGS // part), at]
            for where, sides in tried:
                changed = sides - known or crossed
                error = judge(where) if changed else None
                if error is not None:
                    known |= sides
                    answers |= sides if max(map(abs, where)) <= HUGE else frozenset()
                    yield min(node for node, _ in changed), error
            before = at
    yield from ((node, None) for node in decisions.one_sided(answers))


def _nearest(
    look: Callable[[Change], Sides],
    below: tuple[Change, Sides],
    above: tuple[Change, Sides],
    halvings: int,
) -> list[tuple[Change, Sides]]:
    """What is seen just before and just behind the place where it first changes."""
    for _ in range(halvings):
        pairs = zip(below[0], above[0], strict=True)
        middle = Change(*(math.copysign((one * other) ** 0.5, other) for one, other in pairs))
        sides = look(middle)
        if sides == below[1]:
            below = middle, sides
        else:
            above = middle, sides
    return [below, above]


def _compared_with(node: Node) -> float | None:
    """The one number among its arguments."""
    numbers = [x for x in node.args[1:] if isinstance(x, int | float)]
    return numbers[0] if len(numbers) == 1 else None


def _is_float(node: Node) -> bool:
    return is_tensor(node) and bool(node.meta["val"].is_floating_point())


def _is_short(node: Node) -> bool:
    """Whether it has fewer digits than single precision."""
    return _is_float(node) and node.meta["val"].dtype.itemsize < torch.float32.itemsize


def _is_step(node: Node) -> bool:
    """Whether numbers become whole ones."""
    sources = [source for source in node.all_input_nodes if is_tensor(source)]
    if not is_tensor(node) or not sources or not sources[0].meta["val"].is_floating_point():
        return False
    modes = {"floor", "trunc"} & {*node.args, *node.kwargs.values()}
    to_whole = node.target in CASTS and not _is_float(node) and not is_bool(node)
    return operator_name(node) in STEPS or bool(modes) or to_whole


CASTS = {aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout}
