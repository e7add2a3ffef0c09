"""The data that travels between stages: conventions, sites, refusals, programs.

Units: scores and duals are divided by epsilon throughout. Only the ratio scale / epsilon of a
teacher can be identified from its behaviour, so the score multiplier carries both and every formula
below is the textbook one at epsilon = 1. A dual times the teacher's own epsilon is in cost units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule

Side = Literal["row", "column"]
Mask = Literal["none", "key"]


@dataclass(frozen=True)
class OutputFactor:
    """Attention = factor * P, where a query row of P weighs 1/N and an active key column 1/M.

    factor = coefficient * N^queries * M^keys * n^active, with N queries, M keys (padding included)
    and n active keys.  The released Sinkformers multiply by M: OutputFactor(keys=1).
    """

    coefficient: float = 1.0
    queries: int = 0
    keys: int = 0
    active: int = 0

    def __str__(self) -> str:
        powers = (("N", self.queries), ("M", self.keys), ("n", self.active))
        names = [name if power == 1 else f"{name}^{power}" for name, power in powers if power]
        if self.coefficient != 1.0 or not names:
            names.insert(0, f"{self.coefficient:g}")
        return "*".join(names)


@dataclass(frozen=True)
class Convention:
    """The exact finite loop a teacher runs: sides, half-steps, scores and mass.

    score_multiplier: scale / epsilon, so that scores are score_multiplier * q k^T + bias.
    half_steps:       T, number of dual updates; the first one is on first_side.
    mask:             "key" if a key mask enters: padded keys get no attention, padded queries
                      keep their mass.
    bias:             an additive [B|1, H|1, N, M] score bias enters.
    early_stop:       the teacher's code stops early on a small residual; replay proves it equal.
    """

    half_steps: int
    first_side: Side
    score_multiplier: float
    output_factor: OutputFactor = field(default_factory=OutputFactor)
    mask: Mask = "none"
    bias: bool = False
    early_stop: bool = False

    @property
    def last_side(self) -> Side:
        if self.half_steps % 2 == 1:
            return self.first_side
        return "column" if self.first_side == "row" else "row"

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `output_factor` is the readable formula, `output_factor_terms` is exact."""
        return {
            "half_steps": self.half_steps,
            "first_side": self.first_side,
            "last_side": self.last_side,
            "score_multiplier": self.score_multiplier,
            "output_factor": str(self.output_factor),
            "output_factor_terms": asdict(self.output_factor),
            "mask": self.mask,
            "bias": self.bias,
            "early_stop": self.early_stop,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Convention:
        """Inverse of to_dict. Raises KeyError or TypeError on a malformed mapping."""
        return cls(
            half_steps=int(data["half_steps"]),
            first_side=data["first_side"],
            score_multiplier=float(data["score_multiplier"]),
            output_factor=OutputFactor(**data["output_factor_terms"]),
            mask=data["mask"],
            bias=bool(data["bias"]),
            early_stop=bool(data["early_stop"]),
        )


@dataclass(frozen=True)
class SiteTensors:
    """What one attention site sees on one batch.

    q: [B, H, N, D]; k: [B, H, M, D]; keep: [B, M] bool (True = active key) or None;
    bias: broadcastable to [B, H, N, M], in units of epsilon, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    keep: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass
class Program:
    """A captured computation: the whole model (name "") or one of its modules (dotted name).

    graph:          functional ATen graph with the original calling convention.
    args, kwargs:   the example call it was captured with.
    dynamic_shapes: as given to torch.export, to capture a rewritten graph again.
    early_stop:     a data-dependent stop was traced through at its full budget.
    """

    name: str
    graph: GraphModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    early_stop: bool = False
