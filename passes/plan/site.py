"""Plan's site, and its call of the operator.

before: scores -> [half-steps on rows and columns] -> P or log P
after:  torch.ops.asapc.plan(scores, log_mu, log_nu, ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import PlanConvention, SiteTensors
from asapc.operators.catalogue import OPERATORS
from asapc.operators.plan import settings_of
from asapc.passes.cut import HALVES, Part
from asapc.passes.lifting import Lifting, Swap
from asapc.passes.products import Canonical, rank_of, same
from asapc.passes.site import Site

aten = torch.ops.aten

LEAST_LOG, LARGEST_LOG = -100.0, 300.0  # of plans and kernels, whose sums float64 still holds
MOST_HEADS = 64  # of an axis of a fixed size: tokens are no heads

Call = Callable[..., Any]
"""Of an operator and its arguments: what it gives, or the node of its call."""


@dataclass(frozen=True)
class Layout(Canonical):
    """How a tensor of a graph holds matrices [B, H, N, M], with rows and columns at the end.

    heads: of four axes, where their number is fixed and small; all that stands before rows and columns is
    the batch otherwise.
    """

    heads: int | None = None

    @classmethod
    def of(cls, node: Node, rows: int, columns: int) -> Layout:
        """rows, columns: axes from the end."""
        rank = rank_of(node)
        last = [rank + rows, rank + columns]
        order = (*(axis for axis in range(rank) if axis not in last), *last)
        layout = cls(node, order)
        heads = layout.shape[1] if rank == 4 else 1
        return replace(layout, heads=heads if isinstance(heads, int) and heads <= MOST_HEADS else None)

    @property
    def queries(self) -> Any:
        return self.shape[-2]

    @property
    def keys(self) -> Any:
        return self.shape[-1]

    @property
    def batch(self) -> Any:
        leads = self.shape[:-2]
        size: Any = 1
        for lead in leads[:1] if self.kept else leads:
            size = size * lead
        return size

    @property
    def kept(self) -> bool:
        """Whether it has the operator's four axes, but for their order."""
        return rank_of(self.node) == 4 and self.heads is not None

    def matrices(self, value: Tensor) -> Tensor:
        """[B, H, N, M] of what the node holds."""
        value = self.canonical(value)
        return value if self.kept else value.reshape(-1, 1, *value.shape[-2:])


@dataclass(frozen=True)
class MarginalInput:
    """A node that holds mu or nu, or its logarithm, or a mask of the tokens that have mass.

    drop: the axis that is taken away, of size 1.  heads: whether one for heads is put in.  constant:
    whether it depends on parameters and sizes alone.  power: which the operator takes.  shared: of a
    mask, whether its tokens share a mass of 1, or have 1 each.  hidden: what a boolean one holds at the
    others.  guarded: whether an example without any mass is an error.
    """

    node: Node
    logarithm: bool
    drop: int | None
    heads: bool
    constant: bool
    power: float = 1.0
    hidden: bool | None = None
    shared: bool | None = None
    guarded: bool = True

    @property
    def is_mask(self) -> bool:
        return self.shared is not None

    def read(self, value: Tensor) -> Tensor:
        """The logarithm, broadcastable to [B, H, X]; of examples without any mass, too."""
        unguarded = replace(self, guarded=False)
        result: Tensor = unguarded.written(lambda operator, *args: operator(*args), value, value.dtype)
        return result

    def written(self, call: Call, value: Any, dtype: torch.dtype) -> Any:
        """The logarithm of a tensor, or of a node in a graph, by calls.  dtype: of the loop."""
        if self.drop is not None:
            value = call(aten.squeeze.dim, value, self.drop)
        if self.is_mask:
            kept = call(aten.ne.Scalar, value, bool(self.hidden))
            if self.guarded:
                kept = call(torch.ops.asapc.some_keys.default, kept)
            is_mass = self.hidden is None
            value = call(aten.mul.Tensor, value, kept) if is_mass else call(aten.to.dtype, kept, dtype)
        if self.shared:
            value = call(aten.div.Tensor, value, call(aten.sum.dim_IntList, value, [-1], True))
        if self.heads:
            value = call(aten.unsqueeze.default, value, 1)
        value = value if self.logarithm else _log(call, value)
        return value if self.power == 1.0 else call(aten.mul.Tensor, value, self.power)


@dataclass(frozen=True)
class PlanSite(Site):
    """A loop on scores that are given.

    biases: what is added to the scores, and how often.  kernel: whether the start holds exp(scores).
    slack: the score of a row and a column that are never normalised, see passes.plan.match.  ends: of a
    loop that ends early, see early_stop.ending_of.
    """

    convention: PlanConvention
    start: Layout
    end: Layout
    inside: frozenset[Node]
    log_mu: MarginalInput | None
    log_nu: MarginalInput | None
    biases: tuple[tuple[Node, float], ...]
    kernel: bool = False
    slack: Node | None = None
    ends: tuple[tuple[int, int], ...] = ()

    @property
    def whole(self) -> PlanSite:
        return replace(self, convention=replace(self.convention, ending=None))

    def scaled(self, given: Tensor, scale: float, shift: float = 0.0) -> Tensor:
        return given**scale * math.exp(shift) if self.kernel else given * scale + shift

    @property
    def largest_shift(self) -> float:
        return LARGEST_LOG if self.kernel else math.inf

    def weighed(self, output: Tensor) -> Tensor:
        """Logarithms below LEAST_LOG count as that: such an entry is nothing, whatever it is."""
        return output.clamp(min=LEAST_LOG) if self.convention.log else output

    def moved(self, seen: SiteTensors, scale: float, shift: float) -> Tensor:
        if self.takes_kernel:
            return self.scaled(seen.q, scale, shift)
        below = 0.0 if self.slack is None else self._level(seen) / self.convention.score_multiplier
        return (seen.q + below) * scale + shift - below

    @property
    def takes_kernel(self) -> bool:
        """Whether its call is given the kernel as it is."""
        return self.kernel and not self.biases and self.slack is None

    def completed(self, result: Tensor, seen: SiteTensors) -> Tensor:
        if self.slack is None:
            return result
        level = self._level(seen)[..., None]
        return result + level if self.convention.log else result * level.exp()

    def _level(self, seen: SiteTensors) -> Tensor:
        assert seen.log_mu is not None
        return -seen.log_mu

    @property
    def at(self) -> Node:
        return self.end.node

    @property
    def stops_on(self) -> tuple[Node, ...]:
        return (self.start.node,)

    def part(self) -> Part:
        marginals = [x.node for x in (self.log_mu, self.log_nu) if x is not None and not x.constant]
        others = [*(node for node, _ in self.biases), *([] if self.slack is None else [self.slack])]
        inputs = (self.start.node, *dict.fromkeys(marginals), *others)
        return Part(
            inputs, self.end.node, self.inside, self.end.order, self.start.batch,
            self.start.queries, self.start.keys,
        )  # fmt: skip

    def lift(self, lifting: Lifting) -> list[Swap]:
        start, end = self.start, self.end
        with lifting.before(end.node):
            scores = lifting.nodes[start.node]
            if self.kernel and not self.takes_kernel:
                scores = _log(lifting.call, scores)
            for node, coefficient in self.biases:
                bias = lifting.nodes[node]
                if coefficient != 1.0:
                    bias = lifting.call(aten.mul.Tensor, bias, coefficient)
                scores = lifting.call(aten.add.Tensor, scores, bias)
            scores = lifting.turned(scores, start.order)
            held = start.node.meta["val"].dtype
            dtype = torch.float32 if held in HALVES else held
            if not start.kept:
                scores = _flattened(lifting, scores, rank_of(start.node))
            marginals = {
                name: None if x is None else x.written(lifting.call, lifting.nodes[x.node], dtype)
                for name, x in (("log_mu", self.log_mu), ("log_nu", self.log_nu))
            }
            if self.slack is not None:
                level = lifting.call(aten.reshape.default, lifting.nodes[self.slack], [1, 1, 1, 1])
                shift = lifting.call(aten.div.Tensor, level, self.convention.score_multiplier)
                scores = lifting.call(aten.sub.Tensor, scores, shift)
                masses = lifting.call(aten.neg.default, lifting.call(aten.squeeze.dim, level, 0))
                marginals = {"log_mu": masses, "log_nu": masses}
            rest = {**marginals, **settings_of(self.convention), "is_kernel": self.takes_kernel}
            call = lifting.put(OPERATORS["plan"], scores, None, None, rest)
            result: Node = call
            if self.slack is not None and self.convention.log:
                result = lifting.call(aten.add.Tensor, call, level)
            elif self.slack is not None:
                result = lifting.call(aten.mul.Tensor, call, lifting.call(aten.exp.default, level))
            if not (start.kept and end.kept):
                result = _shaped(lifting, result, end, start)
            result = lifting.turned_back(result, end.order)
        return [(lifting.nodes[end.node], result, lambda user: True)]


def _log(call: Call, value: Any) -> Any:
    """log(value), with the gradient of operators.plan.logs_of."""
    zero = call(aten.eq.Scalar, value, 0)
    logs = call(aten.log.default, call(aten.masked_fill.Scalar, value, zero, 1))
    return call(aten.masked_fill.Scalar, logs, zero, -math.inf)


def _flattened(lifting: Lifting, scores: Node, rank: int) -> Node:
    """[B, 1, N, M] of [..., N, M]."""
    if rank == 2:
        return lifting.call(aten.unsqueeze.default, lifting.call(aten.unsqueeze.default, scores, 0), 0)
    if rank > 3:
        scores = lifting.call(aten.flatten.using_ints, scores, 0, rank - 3)
    return lifting.call(aten.unsqueeze.default, scores, 1)


def sizes_of(end: Canonical, start: Canonical) -> list[tuple[int, bool]] | None:
    """The sizes of the end in canonical order: (number or axis of the start, whether it is an axis).
    One may be left to be what remains, -1; None where more are."""
    entering = start.node.meta["val"].shape
    sizes: list[tuple[int, bool]] = []
    for size in end.shape:
        place = next((axis for axis, other in enumerate(entering) if same(size, other)), None)
        if isinstance(size, int):
            sizes.append((size, False))
        else:
            sizes.append((-1, False) if place is None else (place, True))
    return None if sizes.count((-1, False)) > 1 else sizes


def _shaped(lifting: Lifting, result: Node, end: Canonical, start: Canonical) -> Node:
    """[B, H, N, M] in the sizes of the end, in canonical order."""
    sizes = sizes_of(end, start)
    assert sizes is not None, "not a site"
    scores = lifting.nodes[start.node]
    shape = [
        lifting.call(aten.sym_size.int, scores, size) if is_axis else size for size, is_axis in sizes
    ]
    return lifting.call(aten.reshape.default, result, shape)
