"""Half: one of the two plans of a LOT layer, as a function of its tokens or of its scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.passes.cut import line_of
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

    def observe(self, points: Tensor, lengths: dict[Any, int], hidden: bool) -> Tensor | None:
        """The plan with nothing masked, None where it is not finite."""
        plan = self.experiment.observe([points], lengths, hidden)
        return None if plan is None else plan.reshape(*points.shape[:3], -1)


def _heads(points: Canonical) -> int:
    """H: the second of four axes, what a view merged, or how often the batch goes into the first."""
    shape = points.shape
    if len(shape) == 4:
        return int(shape[1])
    merged, line = merged_heads(points.node), line_of(shape[0])
    return line.factor if merged == 1 and line is not None and not line.more else merged
