"""Site: what a family finds in a program, and what the passes ask of it.

A family is a function in MATCHERS (asapc.passes.families) that is shown where attention may be and says
what it found there: a Site of its own, which knows its operator call, or why it is none.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from asapc.ir import Kind, Program, SiteTensors, Stop
from asapc.passes.cut import Part
from asapc.passes.lifting import Lifting, Swap
from asapc.passes.plan.loops import Loop
from asapc.passes.products import Product
from asapc.passes.regions import Region


@dataclass(frozen=True)
class Place:
    """Where values are multiplied by what may be attention.

    regions: from one product of scores to this product or an earlier one; none where scores are not
    products.  stops: of the loop on those scores.
    """

    value: Product
    regions: tuple[Region, ...] = ()
    stops: tuple[Stop, ...] = ()

    @property
    def at(self) -> Node:
        """Its place in the graph: of the scores where there are any."""
        return self.regions[0].score.node if self.regions else self.value.node


@dataclass(frozen=True)
class Site(ABC):
    """A region that computes a known convention, with everything a rewrite needs.

    head_dim: None where a site is given its scores.
    probe_error: the largest relative error of the convention in the experiments.
    """

    name: str
    convention: Kind
    heads: int
    head_dim: int | None
    probe_error: float

    takes_values = False  # whether its part ends with A v; with A otherwise

    @property
    @abstractmethod
    def at(self) -> Node:
        """Its place in the graph."""

    @property
    def value_dim(self) -> int | None:
        """Of a head's values, where it multiplies any."""
        return None

    @property
    def stops_on(self) -> Collection[Node]:
        """What the loops whose early stops were tried work on: their scores; empty where none were."""
        return ()

    @property
    def ends(self) -> Sequence[tuple[int, int]]:
        """Some stops by which its loop ends early, with the half-steps done then; none that changes
        nothing."""
        return ()

    @property
    def whole(self) -> Site:
        """The same of a loop that never ends early, as a captured graph has it."""
        return self

    @property
    def largest_shift(self) -> float:
        """What its scores may be shifted by at most."""
        return math.inf

    def scaled(self, given: Tensor, scale: float, shift: float = 0.0) -> Tensor:
        """The first input of its part where the scores are scaled and then shifted."""
        return given * scale + shift

    def moved(self, seen: SiteTensors, scale: float, shift: float) -> Tensor:
        """The first input of its call where that of its part is scaled and shifted so."""
        return seen.q * scale + shift

    def weighed(self, output: Tensor) -> Tensor:
        """What its part gives, as errors of it are measured."""
        return output

    @property
    def takes_empty(self) -> bool:
        """Whether an example without an active key has a result; it is an error otherwise."""
        return True

    def opened(self, keep: Tensor) -> Tensor:
        """The keys [B, M] that the site's operator is told are active, of those that a mask keeps."""
        return keep

    def completed(self, result: Tensor, seen: SiteTensors) -> Tensor:
        """What its call gives, with what lift puts behind the call."""
        return result

    @abstractmethod
    def part(self) -> Part:
        """What of the graph it stands for."""

    @abstractmethod
    def lift(self, lifting: Lifting) -> list[Swap]:
        """Puts its operator's call into a graph, and says what the call is to replace."""


@dataclass(frozen=True)
class Unidentified:
    """No known convention: why, and at which node.

    inside: what belongs to a region of the family's kind; empty where only the place is known, and
    another family may have more to say.
    """

    reason: str
    inside: frozenset[Node] = frozenset()
    node: Node | None = None


Found = tuple[Node, Site | Unidentified]
"""Of the product with the values, or of the first sum of a loop."""

class Unexplained(tuple[Place, ...]):
    """Where no family before has found a site: products with values in sequence, and loops of rows and
    columns wherever they stand."""

    loops: Sequence[Loop] = ()


Find = Callable[[Program, Unexplained], Iterator[Found]]
"""What a family says of a program, of all of it that is left to be explained."""
