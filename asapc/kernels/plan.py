"""What the kernels of operators/plan.py are asked for besides scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.ir import Ending, Stabiliser
from asapc.kernels.loop import SAFE_ROW_RANGE
from asapc.operators import plan as reference
from asapc.operators.sinkhorn import factor_value, widen
from asapc.operators.stabilised import unit_mass

SMALL = 16 * 16  # entries of a matrix up to which many are computed side by side
NAMES = [*signature(reference.plan).parameters][3:]  # of the settings, the last of which have defaults

Pair = tuple[float, float]
"""Of rows and of columns."""

Changes = Iterator[Tensor] | Iterator[float]
"""What a rule compares with its threshold, as of operators.plan.changes."""


@dataclass(frozen=True, eq=False)
class Settings:
    """By name.  One object for the same ones, by which what follows from them is found again."""

    values: Mapping[str, Any]
    stabiliser: Stabiliser | None
    ending: Ending | None


@lru_cache(4096)
def _settings(*values: Any) -> Settings:
    settings = reference.DEFAULTS | dict(zip(NAMES, values, strict=False))
    ending = Ending.of(settings)
    if settings["constant"] is None:
        return Settings(settings, None, ending)
    names = ("form", "kind", "constant", "start", "shares", "start_share")
    return Settings(settings, Stabiliser.of(*(settings[name] for name in names)), ending)


@dataclass(frozen=True)
class Task:
    """The operator's other arguments, as it takes them."""

    log_mu: Tensor | None
    log_nu: Tensor | None
    known: Settings

    @classmethod
    def of(cls, log_mu: Tensor | None, log_nu: Tensor | None, **settings: Any) -> Task:
        return cls.of_values(log_mu, log_nu, [(reference.DEFAULTS | settings)[name] for name in NAMES])

    @classmethod
    def of_values(cls, log_mu: Tensor | None, log_nu: Tensor | None, settings: Sequence[Any]) -> Task:
        """Of settings in their order; a call leaves out the last ones that are as usual."""
        values = [tuple(x) if isinstance(x, list) else x for x in settings]
        return cls(log_mu, log_nu, _settings(*values))

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.known.values

    @property
    def stabiliser(self) -> Stabiliser | None:
        return self.known.stabiliser

    def of_scores(self) -> Task:
        """The same of the logarithm of a kernel."""
        return self.of(self.log_mu, self.log_nu, **{**self.settings, "is_kernel": False})

    def ended(self, scores: Tensor, changes: Callable[[Tensor, Task, Ending], Changes]) -> Task:
        """The same of a loop that never ends early, with the half-steps that this one does on the scores,
        which are waited for.  changes: `changes`, or a backend's."""
        ending = self.known.ending
        if ending is None or scores.numel() == 0:
            return self
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "a CUDA graph holds a fixed number of half-steps", got="a loop that ends by the data",
                help="call the model itself, or give its loop a fixed number of steps",
            )  # fmt: skip
        given = reference.logs_of(widen(scores)) if self.settings["is_kernel"] else scores
        moved = changes(given, self, ending)
        done = reference.half_steps_until(ending, moved, self.settings["half_steps"], self.rows_first)
        changed = {**self.settings, "half_steps": done, "threshold": None}
        return self.of(self.log_mu, self.log_nu, **changed)

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


def changes(scores: Tensor, task: Task, ending: Ending) -> Iterator[Tensor]:
    """By the reference, of scores, not a kernel."""
    settings = task.settings
    given = scores if task.as_written else widen(scores)
    s = reference.scaled(given, settings["score_multiplier"], settings["by_head"])
    if not task.as_written and bool((s.amax(-1) - s.amin(-1)).amax() <= SAFE_ROW_RANGE[torch.float64]):
        s = s.double()  # which tells small changes of large scalings apart
    log_mu, log_nu = (x if x is None else x.to(s.dtype) for x in (task.log_mu, task.log_nu))
    loop = settings["half_steps"], task.rows_first, settings["damping"], settings["form"]
    return reference.changes(ending, s, log_mu, log_nu, *loop)


def is_small(scores: Tensor) -> bool:
    return scores.shape[-2] * scores.shape[-1] <= SMALL
