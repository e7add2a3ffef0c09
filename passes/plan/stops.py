"""Stops: what an early stop in a loop on given scores would change, see passes.early_stop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import Program, Stop
from asapc.passes.early_stop import FAR, SPREADS, Trial, residuals_of, what_a_stop_changes
from asapc.passes.sinkhorn.probe import Sample

FEW_SPREADS = SPREADS[::3]  # where there is much to compute
MUCH = 1 << 14  # scores

Draw = Callable[[Tensor, dict[Any, int]], tuple[Sequence[Tensor], Sample]]
"""From scores [B, H, N, M] and sizes: what is fed to the region's inputs, and what comes out."""


@dataclass(frozen=True)
class _Trial(Trial):
    """With what goes into the loop besides scores."""

    observed: Sample | None = None


def changed_by_stops(
    program: Program,
    stops: Sequence[Stop],
    inputs: Sequence[Node],
    inside: Sequence[Node],
    half_steps: int,
    plan: Callable[[Sample, int], Tensor],
    draw: Draw,
    sizes: Sequence[tuple[dict[Any, int], tuple[int, ...]]],
) -> str | None:
    """Why the plan may be another than that of the full budget; None where no stop changes it.

    inputs: of the region, the scores first.  inside: it, in order.  plan: after so many half-steps.
    sizes: few examples, and many, with the size of the scores.
    """
    residuals = residuals_of(program, stops, inputs)
    generator = torch.Generator().manual_seed(4)

    def trials(at: dict[Any, int], size: tuple[int, ...], only: slice) -> Iterator[Trial]:
        noise = torch.randn(size, generator=generator, dtype=torch.float64)
        scores = torch.zeros_like(noise)
        scores[only] = noise[only]
        # In a far larger batch one sharp example does less to a mean, or to its square.
        smaller = 1.0 if only == slice(None) else FAR**2
        for spread in FEW_SPREADS if noise.numel() > MUCH else SPREADS:
            tensors, found = draw(scores * spread, at)
            yield _Trial(tensors, at, found.scores, None, smaller, found)

    def stopped(trial: Trial, half_steps: int) -> Tensor:
        assert isinstance(trial, _Trial) and trial.observed is not None
        return plan(trial.observed, half_steps)

    some = [trials(*sizes[0], slice(None))]
    for at, size in sizes[1:]:
        some += [trials(at, size, one) for one in (slice(0, 1), slice(-1, None))]
    return what_a_stop_changes(
        stops, residuals, inside, half_steps, stopped, itertools.chain(*some)
    )
