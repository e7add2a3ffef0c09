"""Catalogue: what an operator that a site may become is, said once.

Names and order of arguments are those of the reference's signature, which the registered operator has,
too: a graph's calls are built from them by name, and read back by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from asapc.ir import Convention
from asapc.operators import asap, esp, lot, sinkhorn, stabilised

SCORES = ("keep", "bias")
POINTS = ("keep", "query_keep")


@dataclass(frozen=True)
class Operator:
    """name: of the registered operator and its reference; the map is `<name>_attention`.

    reference: the module that has both in plain PyTorch.
    operands:  what a site sees besides queries and keys, as in SiteTensors.
    exact_for: kinds of convention whose map it computes.
    fitted_to: kinds of convention whose map it approximates once it is calibrated.
    size:      the recipe's key for how large it is.
    applies:   whether it multiplies values itself; the map alone otherwise.
    """

    name: str
    reference: ModuleType
    operands: tuple[str, str]
    exact_for: tuple[str, ...] = ()
    fitted_to: tuple[str, ...] = ()
    size: str = ""
    applies: bool = True

    def name_of(self, dense: bool) -> str:
        return f"{self.name}_attention" if dense else self.name

    def overload(self, dense: bool) -> Any:
        """The registered operator. dense: the one that gives the map."""
        return getattr(torch.ops.asapc, self.name_of(dense)).default

    def reference_of(self, dense: bool) -> Callable[..., Tensor]:
        function: Callable[..., Tensor] = getattr(self.reference, self.name_of(dense))
        return function


OPERATORS: Mapping[str, Operator] = {
    own.name: own
    for own in (
        Operator("sinkhorn", sinkhorn, SCORES, exact_for=("sinkhorn",)),
        Operator("stabilised_sinkhorn", stabilised, SCORES, exact_for=("sinkhorn",)),
        Operator("asap", asap, SCORES, fitted_to=("sinkhorn",)),
        Operator("lot", lot, POINTS, exact_for=("lot",), fitted_to=("sinkhorn",), size="pivots"),
        Operator(
            "esp_hard", esp, POINTS,
            exact_for=("esp_hard",), fitted_to=("sinkhorn", "esp_soft"), size="slices",
        ),
        Operator("esp_soft", esp, POINTS, exact_for=("esp_soft",)),
        Operator("esp_released_hard", esp, POINTS, fitted_to=("esp_soft",), applies=False),
    )
}  # fmt: skip


def loop_of(convention: Convention) -> tuple[Operator, dict[str, Any]]:
    """The operator of a finite loop, and its settings by name."""
    settings = {
        "score_multiplier": convention.score_multiplier, "half_steps": convention.half_steps,
        "rows_first": convention.first_side == "row",
        "output_factor": sinkhorn.factor_terms(convention.output_factor),
    }  # fmt: skip
    if convention.stabiliser is None:
        return OPERATORS["sinkhorn"], settings
    return OPERATORS["stabilised_sinkhorn"], settings | asdict(convention.stabiliser)


def ordered(overload: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments by name, as the operator takes them.  Raises KeyError for a missing or unknown one."""
    names = [argument.name for argument in overload._schema.arguments]
    if unknown := arguments.keys() - {*names}:
        raise KeyError(f"{overload} has no {', '.join(sorted(unknown))}")
    return tuple(
        arguments[argument.name] if argument.name in arguments or not argument.has_default_value()
        else argument.default_value
        for argument in overload._schema.arguments
    )  # fmt: skip


def by_name(overload: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What ordered() was given, with the defaults of what is left out."""
    schema = overload._schema.arguments
    given = dict(zip((argument.name for argument in schema), arguments, strict=False))
    left_out = {argument.name: argument.default_value for argument in schema[len(arguments) :]}
    return given | left_out
