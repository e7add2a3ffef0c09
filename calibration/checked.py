"""Checks on the tensors of a fit that was read from a file, before anything runs with them.

Somebody else may have written the file, so every tensor must have the dtype and shape that its feature or
operator calls for, and finite numbers.  Raises InputError with the rule and what arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features import Feature, total_width
from asapc.features.predictor import Amortised
from asapc.inputs.weights import layout_of
from asapc.ir import Distilled
from asapc.operators.catalogue import OPERATORS

Shape = Sequence[int | None]  # None: any number from 1 on

# A distilled operator's tensors and their axes: H heads, D the size of a head, E of its values, n pivots
# or slices (the same number in all of them), w the width of a hybrid operator's convolution.
AXES: Mapping[str, Mapping[str, str]] = {
    "lot": {"pivots": "HnD", "pivot_mass": "Hn"},
    "esp_hard": {"slices": "HnD", "inverse_temperature": "H"},
    "fitted_sinkhorn": {"head_multiplier": "H"},
}
DEPTHWISE = {"depthwise": "HEw"}
_DTYPES = {"inverse_temperature": torch.float64}
_NOT_NEGATIVE = ("pivot_mass", "inverse_temperature", "head_multiplier")


def tensor_of(
    tensors: Mapping[str, Tensor], name: str, shape: Shape, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The tensor of that name, checked."""
    return check_tensor(name, tensors.get(name), shape, dtype)


def check_tensor(
    name: str, tensor: Tensor | None, shape: Shape, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Raise InputError if the tensor is missing, has another dtype or shape, or holds NaN or infinity."""
    if tensor is None:
        raise InputError(f"{name} must be there", got="no such tensor")
    fits = tensor.dim() == len(shape) and all(
        size >= 1 if wanted is None else size == wanted
        for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype != dtype:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(
            f"{name} must be {str(dtype).removeprefix('torch.')} [{sizes}]", got=layout_of(tensor)
        )
    if dtype.is_floating_point and not bool(tensor.isfinite().all()):
        raise InputError(f"{name} must hold finite numbers", got="nan or inf")
    return tensor


def parameters_of(
    tensors: Mapping[str, Tensor],
    stem: str,
    features: Sequence[Feature],
    heads: int | None = None,
    head_dim: int | None = None,
) -> tuple[Tensor | None, ...]:
    """One for each feature, None where it has none.  heads, head_dim: of the site, where known."""
    return tuple(
        tensor_of(tensors, f"{stem}.parameter.{index}", feature.parameter_shape(heads, head_dim))
        if feature.has_parameter else None
        for index, feature in enumerate(features)
    )  # fmt: skip


def check_fit(
    name: str, fit: Amortised | Distilled, heads: int | None = None, head_dim: int | None = None,
    value_dim: int | None = None, **sizes: int,
) -> None:  # fmt: skip
    """Raise InputError where the tensors do not fit each other, or a site of these sizes.

    sizes: of a distilled operator's other axes, n and w, where they are known.
    """
    if isinstance(fit, Distilled):
        known = {"n": None, "w": None, "H": heads, "D": head_dim, "E": value_dim, **sizes}
        _check_distilled(f"{name}.{fit.operator}", fit, known)
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


def _check_distilled(name: str, distilled: Distilled, sizes: dict[str, int | None]) -> None:
    axes = AXES[OPERATORS[distilled.operator].hybrid_of or distilled.operator]
    if distilled.settings.get("depthwise") is not None:
        axes = {**axes, **DEPTHWISE}
    for key, names in axes.items():
        shape, dtype = [sizes[axis] for axis in names], _DTYPES.get(key, torch.float32)
        tensor = check_tensor(f"{name}.{key}", distilled.settings[key], shape, dtype)
        if key in _NOT_NEGATIVE and bool((tensor < 0).any()):
            raise InputError(f"{name}.{key} must not be negative", got=f"{float(tensor.min()):g}")
        sizes = {**sizes, **dict(zip(names, tensor.shape, strict=True))}

