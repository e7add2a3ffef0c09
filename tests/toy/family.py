"""Softmax: attention by a softmax of a product, without masks.

before: q k' -> softmax -> A -> A v
after:  torch.ops.asapc.softmax(q, k, v, None, None, score_multiplier)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from asapc.ir import Program
from asapc.operators.catalogue import OPERATORS
from asapc.operators.softmax import SoftmaxConvention
from asapc.passes.cut import Part
from asapc.passes.experiment import EXACT, Experiment, NoFit, outcome, snapped
from asapc.passes.lifting import Lifting, Swap
from asapc.passes.products import site_name
from asapc.passes.regions import Region
from asapc.passes.site import Found, Place, Site, Unidentified


@dataclass(frozen=True)
class SoftmaxSite(Site):
    convention: SoftmaxConvention
    region: Region

    @property
    def at(self) -> Node:
        return self.region.score.node

    def part(self) -> Part:
        score, value = self.region.score, self.region.value
        batch, *_, queries, keys = score.result.shape
        return Part(
            (score.left, score.right), value.left, frozenset((score.node, *self.region.inside)),
            value.map.order, batch, queries, keys,
        )  # fmt: skip

    def lift(self, lifting: Lifting) -> list[Swap]:
        score, value = self.region.score, self.region.value
        with lifting.before_map(value):
            q, k = lifting.operand(score.map), lifting.operand(score.keys)
            settings = {"score_multiplier": self.convention.score_multiplier}
            rest = {"keep": None, "bias": None, **settings}
            return lifting.put_map(OPERATORS["softmax"], q, k, rest, value)


def find_softmax(program: Program, places: Sequence[Place]) -> Iterator[Found]:
    for place in places:
        if place.regions and not place.regions[0].inputs:
            found = outcome(lambda place=place: _probed(program, place.regions[0]))
            yield place.value.node, Unidentified(str(found)) if isinstance(found, NoFit) else found


def _probed(program: Program, region: Region) -> SoftmaxSite:
    """log A of a softmax is the scores, up to a number for each row."""
    score, value = region.score, region.value
    experiment = Experiment(program.graph, [score.result], value.map, region.inside)
    experiment.leads, experiment.tokens = score.result.shape[:-2], score.result.shape[-2:]
    lengths, *_ = experiment.small()
    shape = experiment.dims(score.result, lengths)
    scores = torch.randn(shape, generator=experiment.generator, dtype=torch.float64)
    attention = experiment.run([scores], lengths)
    logs, centred = (x - x.mean(-1, keepdim=True) for x in (attention.log(), scores))
    multiplier = snapped(float((logs * centred).sum() / centred.square().sum()))
    error = float((torch.softmax(multiplier * scores, -1) - attention).abs().max())
    if not error <= EXACT:
        raise NoFit("not a softmax of its scores")
    q = score.map.shape
    return SoftmaxSite(
        site_name(program, value.node), SoftmaxConvention(multiplier), int(q[1]), int(q[-1]), error,
        region,
    )  # fmt: skip
