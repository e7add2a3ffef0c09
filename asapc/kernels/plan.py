"""What the kernels of operators/plan.py are asked for besides scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from asapc.ir import Stabiliser
from asapc.operators import plan as reference
from asapc.operators.sinkhorn import factor_value
from asapc.operators.stabilised import unit_mass

SMALL = 16 * 16  # entries of a matrix up to which many are computed side by side

Pair = tuple[float, float]
"""Of rows and of columns."""


@dataclass(frozen=True)
class Task:
    """The operator's other arguments, as it takes them."""

    log_mu: Tensor | None
    log_nu: Tensor | None
    settings: dict[str, Any]
    stabiliser: Stabiliser | None

    @classmethod
    def of(cls, log_mu: Tensor | None, log_nu: Tensor | None, **settings: Any) -> Task:
        settings = reference.DEFAULTS | settings  # those that a call leaves out are not handed on
        if settings["constant"] is None:
            return cls(log_mu, log_nu, settings, None)
        names = ("form", "kind", "constant", "start", "shares", "start_share")
        return cls(log_mu, log_nu, settings, Stabiliser.of(*(settings[name] for name in names)))

    def of_scores(self) -> Task:
        """The same of the logarithm of a kernel."""
        return replace(self, settings=self.settings | {"is_kernel": False})

    def plain(self, scores: Tensor) -> Tensor:
        return reference.plan(scores, self.log_mu, self.log_nu, **self.settings)

    @property
    def as_written(self) -> bool:
        """Whether the order of a teacher's sums is known, see ir.Written."""
        return self.stabiliser is None and self.settings["form"] != reference.DEFAULTS["form"]

    @property
    def has_masses(self) -> bool:
        """Whether the masses of a side are given."""
        return self.log_mu is not None or self.log_nu is not None

    @property
    def damping(self) -> Pair:
        rows, columns = self.settings["damping"] or (1.0, 1.0)
        return rows, columns

    @property
    def rows_first(self) -> bool:
        return bool(self.settings["rows_first"])

    @property
    def ends_on_rows(self) -> bool:
        return self.rows_first == (self.settings["half_steps"] % 2 == 1)

    def factor(self, queries: int, keys: int) -> float:
        """What the plan that the loop ends with is multiplied by."""
        factor = float(factor_value(self.settings["output_factor"], queries, keys, None))
        if self.stabiliser is not None:
            factor *= unit_mass(
                self.stabiliser, self.settings["half_steps"], self.rows_first, queries, keys,
                self.has_masses,
            )
        return factor


def is_small(scores: Tensor) -> bool:
    return scores.shape[-2] * scores.shape[-1] <= SMALL
