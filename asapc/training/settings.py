"""What a refresh is asked for.  Nothing here needs torch, which takes seconds to import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from asapc.errors import InputError

CERTIFIED = "certified"
TOLERANCE = 1e-3  # of a certified tail, unless another is asked for


@dataclass(frozen=True)
class RefreshSettings:
    """Each field is an option of `asapc refresh`.

    labels, distil: one of the two, cross entropy on the data's labels or KL(teacher || compiled).
    anneal: cool soft sorts from stage to stage, and make them exact at the end.  tail, tolerance: of the
    loops that are left, see training.tails.  parameters: patterns of names, instead of those read off the
    graph.  examples: at most, of each split, None for all.
    """

    labels: bool = False
    distil: bool = False
    anneal: bool = False
    tail: str | None = None
    tolerance: float = TOLERANCE
    epochs: int = 5
    learning_rate: float = 2e-4
    batch_size: int = 32
    parameters: list[str] | None = None
    examples: int | None = None
    seed: int = 0

    @property
    def mode(self) -> Literal["labels", "distil"]:
        return "labels" if self.labels else "distil"

    def check(self) -> None:
        """Raises InputError for an objective, a learning rate or a tail that is none."""
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
