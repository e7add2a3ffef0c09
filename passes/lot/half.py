"""Half: one of the two plans of a LOT layer, as a function of its tokens or of its scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.passes.experiment import Experiment
from asapc.passes.products import Canonical, merged_heads


class Half:
    """points [B, H, N, D] -> plan [B, H, N, R], its heads apart also where code merges them.

    scores: whether the points are the scores themselves, so that D = R.
    between: what lies between points and plan; masks: that enter there.
    """

    def __init__(
        self,
        graph: GraphModule,
        points: Canonical,
        plan: Canonical,
        between: set[Node],
        masks: list[Node],
        scores: bool = False,
    ) -> None:
        self.graph, self.points, self.plan, self.scores = graph, points, plan, scores
        self.between, self.masks = between, masks
        self.experiment = Experiment(graph, [points], plan, between, masks)
        self.heads = _heads(points)

    @property
    def width(self) -> int:
        """D."""
        return int(self.points.shape[-1])

    def shape(self, lengths: dict[Any, int]) -> tuple[int, int, int, int]:
        """[B, H, N, D]."""
        *batch, n, d = self.experiment.dims(self.points, lengths)
        return (batch[0] // (self.heads if len(batch) == 1 else 1), self.heads, n, d)

    def observer(
        self, sizes: Sequence[dict[Any, int]], hidden: bool
    ) -> Callable[[Tensor], Tensor | None]:
        """points -> plan with nothing masked, None where it is not finite."""
        by_shape = {self.shape(lengths): lengths for lengths in sizes}

        def observe(points: Tensor) -> Tensor | None:
            lengths = by_shape[tuple(points.shape)]  # type: ignore[index]
            result = self.experiment.run([points], lengths, self.experiment.masks(lengths, hidden))
            finite = bool(result.isfinite().all())
            return result.reshape(*points.shape[:3], -1) if finite else None

        return observe


def _heads(points: Canonical) -> int:
    """H: the second of four axes, what a view merged, or how often the batch goes into the first."""
    shape = points.shape
    if len(shape) == 4:
        return int(shape[1])
    merged = merged_heads(points.node)
    if merged == 1 and isinstance(shape[0], torch.SymInt):
        expression = shape[0].node.expr
        symbols = list(expression.free_symbols)
        if len(symbols) == 1 and expression.subs(symbols[0], 0) == 0:
            merged = int(expression.subs(symbols[0], 1))
    return merged
