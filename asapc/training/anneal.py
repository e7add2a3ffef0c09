"""Annealing: soft sorts are cooled down while a model trains, until exact sorts can replace them.

    t_0 = the site's own temperature,  t_(s+1) = max(gamma t_s, 1e-6)

A soft sort at a low temperature is nearly a permutation, so what was learnt at the end of the schedule
also holds for the permutation.
Source: ESPFormer (exponential schedule); ASAP, Appendix C.5 (what happens without one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from asapc.errors import InputError
from asapc.ir import Program
from asapc.passes.audit import hardened, soft_sites
from asapc.passes.rewrite import Hardened, harden, heat, soft_calls, temperature_of
from asapc.program.calls import operator_calls
from asapc.program.runner import Runner

GAMMA = 0.8  # from stage to stage
LOWEST = 1e-6  # squared units of the projections, as every temperature


def schedule(start: float, gamma: float, steps: int) -> list[float]:
    """The temperature of every training step; stages take equally many steps, and the last is at LOWEST.

    With fewer steps than stages, the first stages are left out. A start below LOWEST stays.
    """
    lowest = min(start, LOWEST)
    stages = math.ceil(math.log(lowest / start) / math.log(gamma) - 1e-9) if lowest < start else 0
    left = [(steps - 1 - step) * (stages + 1) // steps for step in range(steps)]
    return [max(start * gamma ** (stages - remaining), lowest) for remaining in left]


class Annealing:
    """Sets the temperatures of the compiled programs, in place, as training goes on."""

    def __init__(self, programs: Sequence[Program], gamma: float, steps: int) -> None:
        """steps: of the whole training.  Raises InputError where no sort is soft."""
        self.programs, self.gamma = programs, gamma
        self.graphs = [program.graph for program in programs]
        self.starts = [[temperature_of(o) for o in soft_calls(graph)] for graph in self.graphs]
        if not any(self.starts):
            operators = sorted({o.operator.name for g in self.graphs for o in operator_calls(g)})
            raise InputError(
                "refresh: --anneal needs compiled layers that sort softly",
                got=f"the operators {', '.join(operators)}",
                help="compile an ESP model with `operator: lossless`, or leave out --anneal",
            )
        schedules = {start: schedule(start, gamma, steps) for starts in self.starts for start in starts}
        self._plans = [[schedules[start] for start in starts] for starts in self.starts]
        self._now = [list(starts) for starts in self.starts]

    def step(self, number: int) -> None:
        """Cool to the temperatures of a training step, counted from 0."""
        for index, plans in enumerate(self._plans):
            now = [plan[number] for plan in plans]
            if now != self._now[index]:
                heat(self.graphs[index], now)
                self._now[index] = now

    def hard(self, model: nn.Module | None) -> Runner:
        """The model with exact sorts, in copies of the programs that share their weights."""
        return Runner(model, hardened(self.programs, Hardened(), soft_sites(self.programs)))

    def harden(self) -> None:
        """Put exact sorts in place, which the end of the schedule stands for."""
        for graph in self.graphs:
            harden(graph)

    def temperatures(self) -> list[float]:
        """Where the sites started."""
        return [start for starts in self.starts for start in starts]
