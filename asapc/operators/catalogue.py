"""Catalogue: what an operator that a site may become is, said once.

Names and order of arguments are those of the reference's signature, which the registered operator has,
too: a graph's calls are built from them by name, and read back by name. What is imported here is little:
a report that is read needs no torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asapc.ir import Kind

SCORES = ("keep", "bias")
POINTS = ("keep", "query_keep")
WINDOWS = ("keep",)
MARGINALS = ("log_mu", "log_nu")


@dataclass(frozen=True)
class Operator:
    """name: of the registered operator and its reference; the map is `<name>_attention`, or `<name>` of
    one that is given scores, which gives nothing else.

    reference:  the module that has both in plain PyTorch.
    operands:   what a site sees besides queries and keys, as in SiteTensors.
    convention: the class of what a teacher computes of which this is the lossless operator; kinds of
                sites are named after it.
    fitted_to:  kinds of sites whose map it approximates once it is calibrated.
    size:       the recipe's key for how large it is.
    applies:    whether it multiplies values itself; the map alone otherwise.
    plain:      why it has no kernels; asapc.kernels.library has them otherwise.
    scored:     whether it is given scores; queries and keys otherwise.
    hybrid_of:  the operator of which this is the hybrid form, see operators.hybrid.
    trained:    tensors among its settings that refresh trains where nothing else is named.
    """

    name: str
    reference: str
    operands: tuple[str, ...]
    convention: str = ""
    fitted_to: tuple[str, ...] = ()
    size: str = ""
    applies: bool = True
    plain: str = ""
    scored: bool = False
    hybrid_of: str = ""
    trained: tuple[str, ...] = ()

    @property
    def points(self) -> tuple[str, ...]:
        """Its first arguments."""
        return ("scores",) if self.scored else ("q", "k")

    @property
    def forms(self) -> tuple[bool, ...]:
        """Of A v (False), and of the map (True)."""
        return (False, True) if self.applies else (True,)

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is registered."""
        return tuple(self.name_of(dense) for dense in self.forms)

    def name_of(self, dense: bool) -> str:
        return f"{self.name}_attention" if dense and not self.scored else self.name

    def overload(self, dense: bool) -> Any:
        """The registered operator. dense: the one that gives the map."""
        import torch

        return getattr(torch.ops.asapc, self.name_of(dense)).default

    def reference_of(self, dense: bool) -> Callable[..., Any]:
        function: Callable[..., Any] = pkgutil.resolve_name(f"{self.reference}:{self.name_of(dense)}")
        return function


OPERATORS: Mapping[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator("sinkhorn", "asapc.operators.sinkhorn", SCORES, convention="asapc.ir:Convention"),
        Operator("stabilised_sinkhorn", "asapc.operators.stabilised", SCORES),
        Operator(
            "banded_sinkhorn", "asapc.operators.banded", WINDOWS,
            convention="asapc.operators.banded:BandedConvention",
        ),
        Operator("asap", "asapc.operators.asap", SCORES, fitted_to=("sinkhorn",)),
        Operator(
            "lot", "asapc.operators.lot", POINTS, convention="asapc.ir:LotConvention",
            fitted_to=("sinkhorn",), size="pivots",
        ),
        Operator(
            "esp_hard", "asapc.operators.esp", POINTS, convention="asapc.ir:EspConvention",
            fitted_to=("sinkhorn", "esp_soft"), size="slices",
        ),
        Operator("esp_soft", "asapc.operators.esp", POINTS, convention="asapc.ir:EspConvention"),
        Operator(
            "plan", "asapc.operators.plan", MARGINALS, convention="asapc.ir:PlanConvention",
            applies=False, scored=True,
        ),
        Operator(
            "esp_released_hard", "asapc.operators.esp", POINTS, fitted_to=("esp_soft",), applies=False
        ),
        Operator(
            "fitted_sinkhorn", "asapc.operators.fitted_sinkhorn", SCORES, fitted_to=("sinkhorn",),
            size="half_steps", trained=("head_multiplier",),
        ),
        Operator(
            "hybrid_lot", "asapc.operators.hybrid", SCORES, size="pivots", hybrid_of="lot",
            trained=("depthwise",),
        ),
        Operator(
            "hybrid_esp_hard", "asapc.operators.hybrid", SCORES, size="slices", hybrid_of="esp_hard",
            trained=("depthwise",),
        ),
        Operator(
            "hybrid_fitted_sinkhorn", "asapc.operators.hybrid", SCORES, size="half_steps",
            hybrid_of="fitted_sinkhorn", trained=("depthwise", "head_multiplier"),
        ),
    )
}  # fmt: skip

OF_GRADIENTS = ("tail", "tolerance")  # an operator's arguments that its result does not depend on
TEACHER = "teacher"  # in place of an operator: the site was left as it is
KINDS = tuple(operator.name for operator in OPERATORS.values() if operator.convention)
# By kind of site, what it may become besides itself; a hardened map alone makes no layer faster.
REPLACEMENTS = {
    kind: tuple(
        operator.name
        for operator in OPERATORS.values()
        if kind in operator.fitted_to and operator.applies
    )
    for kind in KINDS
}
OUTCOMES = tuple(
    name for name in OPERATORS if name in KINDS or any(name in x for x in REPLACEMENTS.values())
)
SIZES = tuple(dict.fromkeys(operator.size for operator in OPERATORS.values() if operator.size))
# By operator, its hybrid form.
HYBRIDS = {operator.hybrid_of: operator.name for operator in OPERATORS.values() if operator.hybrid_of}


def convention_from_json(data: Mapping[str, Any]) -> Kind:
    """Inverse of every convention's to_json. Raises InputError, or KeyError for an unknown operator."""
    operator = OPERATORS[data.get("operator", KINDS[0])]
    kind: type[Kind] = pkgutil.resolve_name(operator.convention)
    return kind.from_json(data, "convention")


def reference_named(name: str) -> Callable[..., Any]:
    """Of a registered operator.  Raises KeyError for any other name."""
    for operator in OPERATORS.values():
        for dense in operator.forms:
            if operator.name_of(dense) == name:
                return operator.reference_of(dense)
    raise KeyError(name)


def ordered(overload: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments by name, as the operator takes them, without defaults of gradients at the end: graphs are
    what they were before there were any.  Raises KeyError for a missing or unknown one."""
    names = [argument.name for argument in overload._schema.arguments]
    if unknown := arguments.keys() - {*names}:
        raise KeyError(f"{overload} has no {', '.join(sorted(unknown))}")
    found = [
        arguments[argument.name] if argument.name in arguments or not argument.has_default_value()
        else argument.default_value
        for argument in overload._schema.arguments
    ]  # fmt: skip
    if names[-len(OF_GRADIENTS) :] == [*OF_GRADIENTS] and found[-len(OF_GRADIENTS) :] == [None, 0.0]:
        del found[-len(OF_GRADIENTS) :]
    return tuple(found)


def by_name(overload: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What ordered() was given, with the defaults of what is left out."""
    schema = overload._schema.arguments
    given = dict(zip((argument.name for argument in schema), arguments, strict=False))
    left_out = {argument.name: argument.default_value for argument in schema[len(arguments) :]}
    return given | left_out
