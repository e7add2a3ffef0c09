"""The settings of a refresh.  Nothing here needs torch, which takes seconds to import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from asapc.errors import InputError
from asapc.terminal.hints import option

CERTIFIED = "certified"
TOLERANCE = 1e-3  # of a certified tail, unless another is asked for


@dataclass(frozen=True)
class RefreshSettings:
    """tail, tolerance: of the remaining loops, see training.tails.  parameters: patterns of names,
    instead of those read off the graph.  examples: at most, of each split; None for all."""

    labels: bool = option(False, "Train on the labels in DATA (cross entropy).")
    distil: bool = option(False, "Train on the teacher's predictions (KL, no labels).")
    anneal: bool = option(False, "Turn the soft sorts of ESP layers into exact ones.")
    tail: str | None = option(
        None, "Pass gradients through only the last R half-steps of each exact loop, or through as few "
        "as --tolerance allows. Default: all.", metavar="R|certified",
    )  # fmt: skip
    tolerance: float = option(
        TOLERANCE, "Fraction of a layer's score gradient that a certified tail may omit."
    )
    epochs: int = option(5, "Number of passes over the calibration split.", min=1)
    learning_rate: float = option(2e-4, "Adam's learning rate.")
    batch_size: int = option(32, "Examples per step.", min=1)
    parameters: list[str] | None = option(
        None, "Parameters to train instead of the default; repeatable.", metavar="PATTERN"
    )
    examples: int | None = option(None, "Most examples to train on; held in memory.", min=1)
    seed: int = option(0, "Seed of the order of examples.", min=0, max=2**63 - 1)

    @property
    def mode(self) -> Literal["labels", "distil"]:
        return "labels" if self.labels else "distil"

    def check(self) -> None:
        """Raises InputError for an invalid objective, learning rate or tail."""
        if self.labels == self.distil:
            raise InputError(
                "refresh: exactly one of --labels and --distil must be given",
                got="both" if self.labels else "none",
                help="--labels trains on the labels in DATA, --distil on the teacher's predictions",
            )
        checked_tail(self.tail, self.tolerance)
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InputError(
                "refresh: the learning rate must be positive and finite", got=self.learning_rate
            )


def checked_tail(tail: int | str | None, tolerance: float) -> tuple[int | None, float]:
    """(half-steps at most, tolerance), as the operator takes them.  tail: a number, also as digits."""
    if tail == CERTIFIED:
        if not (0 < tolerance < math.inf):
            raise InputError("the tolerance of a certified tail must be positive", got=tolerance)
        return None, float(tolerance)
    if isinstance(tail, str) and tail.isascii() and tail.isdigit() and len(tail) < 10:
        tail = int(tail)
    if tail is None or (isinstance(tail, int) and not isinstance(tail, bool) and tail >= 0):
        return tail, 0.0
    raise InputError(f"a tail is a number of half-steps or {CERTIFIED!r}", got=repr(tail))
