"""What a fit read from a file must be before anything runs with it: others may have written the file.

Every tensor has the dtype and the shape that its feature or operator gives it, and finite numbers; every
setting of a distilled operator is one that it takes.  Raises InputError: the rule, and what arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Len
from pydantic import AllowInfNan, Strict
from torch import Tensor

from asapc.errors import InputError
from asapc.features import MAX_COUNT, total_width
from asapc.features.predictor import Amortised
from asapc.inputs.settings import Place, Switch, checked, integer
from asapc.ir import Coupling, Distilled, Ties
from asapc.operators.catalogue import OPERATORS

Shape = Sequence[int | None]  # None: any number from 1 on

MOST_HALF_STEPS = 10_000
_Finite = Annotated[float, Strict(), AllowInfNan(False)]  # of JSON, where text is no number
_HalfSteps = integer(1, MOST_HALF_STEPS)
# What a distilled operator takes besides its tensors.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "lot": {
        "key_bias": Literal[None], "query_multiplier": _Finite, "key_multiplier": _Finite,
        "query_half_steps": _HalfSteps, "key_half_steps": _HalfSteps,
        "queries_first": Switch, "keys_first": Switch,
        "output_factor": Annotated[list[_Finite], Len(4, 4)],
    },
    "esp_hard": {
        "squared_cost": Switch, "mean_cost": Switch, "output_factor": _Finite,
        "coupling": Coupling, "ties": Ties,
    },
    "fitted_sinkhorn": {
        "score_multiplier": _Finite, "half_steps": _HalfSteps, "rows_first": Switch,
        "output_factor": Annotated[list[_Finite], Len(4, 4)],
    },
}  # fmt: skip
_OF_HYBRIDS: Mapping[str, Any] = {
    "summary_tokens": integer(0, MAX_COUNT), "summary_multiplier": _Finite,
}  # fmt: skip
# Its tensors and their axes: H heads, D of a head, E of its values, n pivots or slices, as many in all of
# them, w the width of a convolution.
AXES: Mapping[str, Mapping[str, str]] = {
    "lot": {"pivots": "HnD", "pivot_mass": "Hn"},
    "esp_hard": {"slices": "HnD", "inverse_temperature": "H"},
    "fitted_sinkhorn": {"head_multiplier": "H"},
}
_DEPTHWISE = {"depthwise": "HEw"}  # of a hybrid operator that has one
_DTYPES = {"inverse_temperature": torch.float64}
_NOT_NEGATIVE = ("pivot_mass", "inverse_temperature", "head_multiplier")


def tensor_of(
    tensors: Mapping[str, Tensor], name: str, shape: Shape, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The tensor of that name, which is there and what it must be."""
    tensor = tensors.get(name)
    if tensor is None:
        raise InputError(f"{name} must be there", got="no such tensor")
    check_tensor(name, tensor, shape, dtype)
    return tensor


def check_tensor(name: str, tensor: Tensor, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
    """InputError for another dtype or shape, and for a NaN or an infinity."""
    found = tuple(tensor.shape)
    fits = len(found) == len(shape) and all(
        size >= 1 if wanted is None else size == wanted for size, wanted in zip(found, shape, strict=True)
    )
    if not fits or tensor.dtype != dtype:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(
            f"{name} must be {_word(dtype)} [{sizes}]", got=f"{_word(tensor.dtype)} {[*found]}"
        )
    if dtype.is_floating_point and not bool(tensor.isfinite().all()):
        raise InputError(f"{name} must hold finite numbers", got="nan or inf")


def check_fit(
    name: str, fit: Amortised | Distilled, heads: int | None = None, head_dim: int | None = None,
    value_dim: int | None = None,
) -> None:  # fmt: skip
    """InputError where the tensors do not fit each other, or a site of so many heads of that size, with
    values of another."""
    if isinstance(fit, Distilled):
        sizes = {"H": heads, "D": head_dim, "E": value_dim}
        _check_distilled(f"{name}.{fit.operator}", fit, sizes)
        return
    for predictor in fit.predictors:
        stem = f"{name}.{predictor.side}"
        pairs = zip(predictor.features, predictor.parameters, strict=True)
        for index, (feature, parameter) in enumerate(pairs):
            if parameter is not None:
                shape = feature.parameter_shape(heads, head_dim)
                check_tensor(f"{stem}.parameter.{index}", parameter, shape)
        shown = (tensor.shape[-1] for tensor in predictor.parameters if tensor is not None)
        dim = head_dim or next(shown, None)
        groups = _groups(predictor.coefficients, heads)
        columns = total_width(predictor.features, dim, None)
        check_tensor(f"{stem}.coefficients", predictor.coefficients, (groups, columns))
    if fit.intercept is not None:
        check_tensor(f"{name}.intercept", fit.intercept, (_groups(fit.intercept, heads),))


def _groups(tensor: Tensor, heads: int | None) -> int | None:
    """1 where all heads share their numbers."""
    return 1 if tensor.shape[:1] == (1,) else heads


def _check_distilled(name: str, distilled: Distilled, known: Mapping[str, int | None]) -> None:
    types, axes = _described(distilled.operator, distilled.settings)
    if distilled.settings.keys() != types.keys() | axes.keys():
        wanted = ", ".join(sorted(types.keys() | axes.keys()))
        raise InputError(f"{name} must have {wanted}", got=", ".join(sorted(distilled.settings)))
    for key, kind in types.items():
        checked(distilled.settings[key], kind, Place(name, (key,)))
    sizes = {"n": None, "w": None, **known}
    for key, names in axes.items():
        tensor = distilled.settings[key]
        shape = [sizes[axis] for axis in names]
        check_tensor(f"{name}.{key}", tensor, shape, _DTYPES.get(key, torch.float32))
        if key in _NOT_NEGATIVE and bool((tensor < 0).any()):
            raise InputError(f"{name}.{key} must not be negative", got=f"{float(tensor.min()):g}")
        for axis, size in zip(names, tensor.shape, strict=True):
            sizes[axis] = sizes[axis] or size


def _described(operator: str, settings: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """The types of an operator's settings, and the axes of its tensors.  Raises KeyError for an operator
    that nothing is distilled into."""
    inner = OPERATORS[operator].hybrid_of
    if not inner:
        return _SETTINGS[operator], AXES[operator]
    types = {**_SETTINGS[inner], **_OF_HYBRIDS}
    if settings.get("depthwise") is None:
        return {**types, "depthwise": Literal[None]}, AXES[inner]
    return types, {**AXES[inner], **_DEPTHWISE}


def distilled_tensors(
    operator: str, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor], stem: str
) -> dict[str, Tensor]:
    """The tensors of a distilled operator by their names.  arguments: all it is given, as in a file."""
    return {
        key: tensor_of(tensors, f"{stem}.{key}", [None] * len(axes), _DTYPES.get(key, torch.float32))
        for key, axes in _described(operator, arguments)[1].items()
    }


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
