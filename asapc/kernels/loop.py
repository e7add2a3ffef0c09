"""What a kernel of the finite loop is asked to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asapc.ir import Side


@dataclass(frozen=True)
class Loop:
    """`half_steps` c-transforms on S = score_multiplier q k' + bias, the first on `first_side`.

    output_factor: [coefficient, N power, M power, n power], see operators.sinkhorn.factor_value.
    """

    score_multiplier: float
    half_steps: int
    first_side: Side
    output_factor: Sequence[float]

    @property
    def ends_on_rows(self) -> bool:
        return (self.first_side == "row") == (self.half_steps % 2 == 1)
