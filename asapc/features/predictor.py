"""A fitted prediction of a dual, and what an amortised site is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from asapc.features import Feature
from asapc.features.clouds import Budget, Points, PredictedSide
from asapc.ir import Convention, Side

RecipeSide = Literal["source", "target", "both"]
Aim = Literal["aligned", "last"]


@dataclass(frozen=True)
class DualPredictor:
    """side's dual as centre(X omega) - |x|^2 / 2; see features.predict_dual.

    parameters: one entry per feature; coefficients omega: [1|H, F] float32.
    points: "active" leaves padded queries out of the features, if the key mask shows them; their
    potential is that of a mean point, 0.
    """

    side: PredictedSide
    features: tuple[Feature, ...]
    parameters: tuple[Tensor | None, ...]
    coefficients: Tensor
    budget: Budget
    points: Points = "all"

    def arguments(self, score_multiplier: float, mass: bool = False) -> dict[str, Any]:
        """The arguments of torch.ops.asapc.dual, or dual_and_row_mass, except q, k, keep and bias."""
        leaves_out = self.side == "source" and self.points == "active"
        return {
            "parameters": [parameter for parameter in self.parameters if parameter is not None],
            "coefficients": self.coefficients,
            "features": " ".join(str(feature) for feature in self.features),
            **({} if mass else {"side": "active" if leaves_out else self.side}),
            "score_multiplier": score_multiplier,
            "half_steps": self.budget.half_steps,
            "starts_on_x": self.budget.starts_on_x,
        }


@dataclass(frozen=True)
class TransformPlan:
    """How predicted duals and c-transforms reproduce one teacher.

    c_transforms: half-steps after the prediction; 0 predicts both duals and closes neither.
    rescaled: the c-transform ends on rows, the teacher on columns: rows get their predicted mass.
    half_steps: of the teacher up to the predicted dual, which the fit aims at.
    aim: "aligned", the dual from which the c-transforms are the teacher's own last half-steps; or "last",
    its last dual of that side, f^(T), from which they continue beyond the teacher.
    """

    side: RecipeSide
    c_transforms: int
    half_steps: int
    rescaled: bool = False
    aim: Aim = "aligned"

    def sides(self) -> tuple[PredictedSide, ...]:
        return ("source", "target") if self.side == "both" else (self.side,)

    def budget(self, convention: Convention, side: PredictedSide) -> Budget:
        """The half-steps up to the last one, within self.half_steps, that updates `side`."""
        updated: Side = "row" if side == "source" else "column"
        starts_on_x = convention.first_side == updated
        ends_on_x = (self.half_steps % 2 == 1) == starts_on_x
        return Budget(self.half_steps if ends_on_x else self.half_steps - 1, starts_on_x)


def transform_plan(
    convention: Convention, c_transforms: int, side: RecipeSide, aim: Aim = "aligned"
) -> TransformPlan | None:
    """The plan with the most c-transforms <= `c_transforms` that reproduces this teacher, or None.

    The c-transforms start on the other side and end on the teacher's last one, so their parity is
    given: odd where the predicted side is not the last one, even where it is; and the teacher must
    update the predicted dual before them. The one exception is a single c-transform from the keys' dual
    of a column-ending teacher: it ends on rows, and rescaling them restores the teacher's plan.

    aim: with "last", the exact dual reproduces the teacher only under one c-transform (ASAP-0 on a
    column-ending teacher); more of them continue towards the fixed point, and a single one from the
    queries' dual of a row-ending teacher ends on columns.  Source: ASAP, Section 4.1, Eqs. 16 and 18.
    """
    steps = convention.half_steps
    if side == "both":
        return TransformPlan("both", 0, steps) if c_transforms == 0 and steps >= 2 else None
    if c_transforms < 1:
        return None
    if side == "target" and convention.last_side == "column" and c_transforms == 1:
        return TransformPlan("target", 1, steps, rescaled=True)
    predicted: Side = "row" if side == "source" else "column"
    parity = 0 if convention.last_side == predicted else 1
    if aim == "last" and steps > parity:
        count = c_transforms if c_transforms == 1 else c_transforms - (c_transforms - parity) % 2
        if count != parity:
            return TransformPlan(side, count, steps - parity, aim="last")
    most = min(c_transforms, steps - 1)
    most -= (most - parity) % 2
    return TransformPlan(side, most, steps - most) if most >= 1 else None


@dataclass(frozen=True)
class Amortised:
    """The replacement of the loop at one site: predicted duals, then the plan's c-transforms.

    predictors: one per side of the plan.  intercept: [1|H], the mean of f + g where both duals are
    predicted (a c-transform would find it), else None.
    """

    plan: TransformPlan
    predictors: tuple[DualPredictor, ...]
    intercept: Tensor | None = None

    def settings(self, source: Any, key: Any, loop: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of torch.ops.asapc.asap by name.  source, key: duals.  loop: the site's settings."""
        return {
            "source_dual": source, "target_dual": key, "score_multiplier": loop["score_multiplier"],
            "c_transforms": self.plan.c_transforms, "output_factor": loop["output_factor"],
        }  # fmt: skip
