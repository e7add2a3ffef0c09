"""Students: the operators that a site may be distilled into, and all they are given that is not fitted.

That follows from the teacher's convention and the recipe: of a fit that a file holds, only the tensors
are taken, since another operator would pass for the one that was asked for.
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

# What every student of its kind has: a fit that is stored with another is refused, so a change of these
# is one of calibration.stored.FORMAT_VERSION.
HALF_STEPS = 5  # of each plan of a LOT operator
COUPLING: Coupling = "monotone"
TIES: Ties = "shared"

Maker = Callable[..., Distilled]
"""Of the tensors that are fitted, in the order of checked.AXES, the operator."""


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
    """The first of what makes an operator a hybrid one, for messages."""
    key, value = next(iter(beside(settings).items()))
    return f"`{key}: {value}`"


def maker_of(name: str, convention: Convention, settings: Mapping[str, Any], square: bool) -> Maker:
    """What makes the recipe's operator, without what it is to keep beside it.

    square: there are always as many queries as keys, padding included.  Raises InputError where the
    operator cannot have the mass of the teacher's map.
    """
    if beside(settings):  # the others' rows sum to 1, whatever their number
        convention = replace(convention, output_factor=OutputFactor(queries=1))
    if settings["operator"] == "lot":
        return lot_maker(name, convention, square)
    if settings["operator"] == "esp_hard":
        return esp_maker(name, convention, square)
    return loop_maker(convention, settings["half_steps"])


def hybrid_of(
    fitted: Distilled, summary_tokens: int, multiplier: float, depthwise: Tensor | None
) -> Distilled:
    """The hybrid form of what was fitted.  multiplier: of the softmax layer's scores."""
    kept = {"summary_tokens": summary_tokens, "summary_multiplier": multiplier, "depthwise": depthwise}
    return Distilled(HYBRIDS[fitted.operator], {**fitted.settings, **kept}, fitted.share)


def student_of(
    name: str, convention: Convention, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Distilled:
    """The operator that the convention and the settings make of fitted tensors, by their names in a file.

    Raises InputError where a site of this convention cannot become it, or a tensor is none that it has.
    """
    problem = refusal(name, convention, settings)
    if problem is not None:
        raise InputError(problem.rule.removeprefix("recipe: "), got=problem.got)
    operator, kept = settings["operator"], beside(settings)
    stem = f"{name}.{HYBRIDS[operator] if kept else operator}"
    # Whether there are as many queries as keys, which no file says, changes nothing but what is refused.
    make = maker_of(name, convention, settings, True)
    student = make(*(tensors.get(f"{stem}.{key}") for key in AXES[operator]))
    if kept:
        depthwise = tensors.get(f"{stem}.depthwise")
        student = hybrid_of(student, settings["summary_tokens"], convention.score_multiplier, depthwise)
    check_fit(name, student, n=settings[OPERATORS[operator].size], w=settings["depthwise"])
    return student


def lot_maker(name: str, convention: Convention, square: bool) -> Maker:
    """(pivots [H, R, D], pivot_mass [H, R]) -> the operator, of the mass of the teacher's map.

    square: there are always as many queries as keys, padding included.
    """
    factor, multiplier = convention.output_factor, convention.score_multiplier
    if convention.mask == "none":
        powers = [0.0, float(factor.keys + factor.active), float(factor.queries)]
    elif square or factor.keys == 0:
        powers = [0.0, float(factor.active), float(factor.queries + factor.keys)]
    else:
        raise _no_such_mass(name, convention, "lot")
    settings = {
        "key_bias": None, "query_multiplier": multiplier, "key_multiplier": multiplier,
        "query_half_steps": HALF_STEPS, "queries_first": True, "key_half_steps": HALF_STEPS,
        "keys_first": True, "output_factor": [factor.coefficient, *powers],
    }  # fmt: skip
    share = _share(convention)
    return lambda pivots, mass: Distilled(
        "lot", {"pivots": pivots, "pivot_mass": mass, **settings}, share
    )


def esp_maker(name: str, convention: Convention, square: bool) -> Maker:
    """(slices [H, L, D], inverse_temperature [H]) -> the operator; its rows sum to a constant.

    square: there are always as many queries as keys, padding included.
    """
    factor = convention.output_factor
    unmasked = convention.mask == "none"
    of_keys = factor.keys + (factor.active if unmasked else 0)
    constant = (of_keys == 0 or square) and factor.queries + of_keys == 1
    if not constant or (factor.active and not unmasked):
        raise _no_such_mass(name, convention, "esp_hard")
    settings = {
        "squared_cost": False, "mean_cost": True, "output_factor": factor.coefficient,
        "coupling": COUPLING, "ties": TIES,
    }  # fmt: skip
    share = _share(convention)
    return lambda slices, tau: Distilled(
        "esp_hard", {"slices": slices, "inverse_temperature": tau, **settings}, share
    )


def _share(convention: Convention) -> bool:
    return convention.mask == "key" and convention.last_side == "column"


def _no_such_mass(name: str, convention: Convention, operator: str) -> InputError:
    return InputError(
        f"{name}: {operator} must be able to give its rows the teacher's sums",
        got=f"the output factor {convention.output_factor}, of another number of queries than keys"
        if operator == "lot"
        else f"the output factor {convention.output_factor}",
        help="use `operator: asap` for this site",
    )


def loop_maker(convention: Convention, half_steps: int) -> Maker:
    """head_multiplier [H] -> a loop of so many half-steps that ends on the teacher's side."""
    settings = loop_settings(convention) | {"half_steps": half_steps}
    return lambda multiplier: Distilled("fitted_sinkhorn", {"head_multiplier": multiplier, **settings})
