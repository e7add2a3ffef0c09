"""Students: the operators that a site may be distilled into, and all settings that are not fitted.

These follow from the teacher's convention and the recipe. Only tensors are read from a stored fit, or
another operator could pass for the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from asapc.calibration.checked import AXES, check_fit
from asapc.errors import InputError
from asapc.inputs.recipe import beside
from asapc.ir import Convention, Coupling, Distilled, OutputFactor, Ties
from asapc.operators.catalogue import HYBRIDS, OPERATORS
from asapc.operators.sinkhorn import loop_settings

# The same for every student of a kind. A stored fit with other values is refused, so whoever changes them
# raises calibration.stored.FORMAT_VERSION.
HALF_STEPS = 5  # of each plan of a LOT operator
COUPLING: Coupling = "monotone"
TIES: Ties = "shared"

Maker = Callable[..., Distilled]
"""Makes the operator from its fitted tensors, in the order of checked.AXES."""


def refusal(name: str, convention: Convention, settings: Mapping[str, Any]) -> InputError | None:
    """Why a site of this convention cannot become what the recipe asks for; None where it can.

    settings: as Recipe.fit_settings.
    """
    if settings["operator"] == "fitted_sinkhorn":
        count = settings["half_steps"]
        if (count - convention.half_steps) % 2:
            parity = "odd" if convention.half_steps % 2 else "even"
            return InputError(
                f"recipe: {name}: half_steps must be {parity}: the loop ends on {convention.last_side}s, "
                "as the layer does",
                got=f"half_steps: {count}",
                help=f"write `half_steps: {count + 1}`, for this site alone under `sites`",
            )
    if beside(settings) and (convention.half_steps, convention.first_side) != (1, "row"):
        return InputError(
            f"recipe: {name}: {asked(settings)} is for softmax layers",
            got=f"a Sinkhorn loop of {convention.half_steps} half-steps",
            help="set it for softmax layers alone, under `sites`",
        )
    return None


def asked(settings: Mapping[str, Any]) -> str:
    """The first setting that makes an operator a hybrid one, for messages."""
    key, value = next(iter(beside(settings).items()))
    return f"`{key}: {value}`"


def maker_of(name: str, convention: Convention, settings: Mapping[str, Any], square: bool) -> Maker:
    """The maker of the recipe's operator, without its hybrid settings.

    square: there are always as many queries as keys, padding included.  Raises InputError where the
    operator cannot have the mass of the teacher's map.
    """
    if beside(settings):  # the others' rows sum to 1, whatever their number
        convention = replace(convention, output_factor=OutputFactor(queries=1))
    operator = settings["operator"]
    share = operator != "fitted_sinkhorn" and (convention.mask, convention.last_side) == ("key", "column")
    if operator == "lot":
        fixed = _lot_settings(convention, square)
    elif operator == "esp_hard":
        fixed = _esp_settings(convention, square)
    else:  # a loop that ends on the teacher's side
        fixed = loop_settings(convention) | {"half_steps": settings["half_steps"]}
    if fixed is None:
        other = ", of another number of queries than keys" if operator == "lot" else ""
        raise InputError(
            f"{name}: {operator} must be able to give its rows the teacher's sums",
            got=f"the output factor {convention.output_factor}{other}",
            help="use `operator: asap` for this site",
        )
    return lambda *fitted: Distilled(
        operator, {**dict(zip(AXES[operator], fitted, strict=True)), **fixed}, share
    )


def hybrid_of(
    fitted: Distilled, summary_tokens: int, multiplier: float, depthwise: Tensor | None
) -> Distilled:
    """The hybrid form of what was fitted.  multiplier: of the softmax layer's scores."""
    kept = {"summary_tokens": summary_tokens, "summary_multiplier": multiplier, "depthwise": depthwise}
    return Distilled(HYBRIDS[fitted.operator], {**fitted.settings, **kept}, fitted.share)


def student_of(
    name: str, convention: Convention, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Distilled:
    """The operator for a convention and settings, with fitted tensors by their names in a file.

    Raises InputError where a site of this convention cannot become it, or a tensor does not fit it.
    """
    problem = refusal(name, convention, settings)
    if problem is not None:
        raise InputError(problem.rule.removeprefix("recipe: "), got=problem.got)
    operator, kept = settings["operator"], beside(settings)
    stem = f"{name}.{HYBRIDS[operator] if kept else operator}"
    # No file says whether there are as many queries as keys, which only matters to refusals.
    make = maker_of(name, convention, settings, True)
    student = make(*(tensors.get(f"{stem}.{key}") for key in AXES[operator]))
    if kept:
        depthwise = tensors.get(f"{stem}.depthwise")
        student = hybrid_of(student, settings["summary_tokens"], convention.score_multiplier, depthwise)
    check_fit(name, student, n=settings[OPERATORS[operator].size], w=settings["depthwise"])
    return student


def _lot_settings(convention: Convention, square: bool) -> dict[str, Any] | None:
    """Of an operator with the mass of the teacher's map; None where it cannot have it."""
    factor, multiplier = convention.output_factor, convention.score_multiplier
    if convention.mask == "none":
        powers = [0.0, float(factor.keys + factor.active), float(factor.queries)]
    elif square or factor.keys == 0:
        powers = [0.0, float(factor.active), float(factor.queries + factor.keys)]
    else:
        return None
    return {
        "key_bias": None, "query_multiplier": multiplier, "key_multiplier": multiplier,
        "query_half_steps": HALF_STEPS, "queries_first": True, "key_half_steps": HALF_STEPS,
        "keys_first": True, "output_factor": [factor.coefficient, *powers],
    }  # fmt: skip


def _esp_settings(convention: Convention, square: bool) -> dict[str, Any] | None:
    """The same; the rows of this operator sum to a constant."""
    factor = convention.output_factor
    unmasked = convention.mask == "none"
    of_keys = factor.keys + (factor.active if unmasked else 0)
    constant = (of_keys == 0 or square) and factor.queries + of_keys == 1
    if not constant or (factor.active and not unmasked):
        return None
    return {
        "squared_cost": False, "mean_cost": True, "output_factor": factor.coefficient,
        "coupling": COUPLING, "ties": TIES,
    }  # fmt: skip
