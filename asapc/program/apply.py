"""Apply: runs what a site becomes on its tensors, by the same calls that rewrite puts into a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features import total_width
from asapc.features.predictor import Amortised, DualPredictor
from asapc.ir import Convention, Distilled, SiteTensors
from asapc.operators.catalogue import OPERATORS
from asapc.operators.sinkhorn import loop_of
from asapc.program.calls import apply_operator, times_share


def apply_lossless(convention: Convention, t: SiteTensors, v: Tensor | None) -> Tensor:
    """The finite loop on a site's tensors: A v, or the map A where v is None."""
    operator, settings = loop_of(convention)
    return apply_operator(operator, t, v, settings)


def predict(convention: Convention, predictor: DualPredictor, t: SiteTensors) -> Tensor:
    """One predicted dual on a site's tensors."""
    return torch.ops.asapc.dual(
        q=t.q, k=t.k, keep=t.keep, bias=t.bias, **predictor.arguments(convention.score_multiplier)
    )


def beyond_map(replacement: Amortised | Distilled) -> bool:
    """Whether A v has a part that the map does not show: a convolution on the values."""
    return isinstance(replacement, Distilled) and replacement.settings.get("depthwise") is not None


def apply_distilled(distilled: Distilled, t: SiteTensors, v: Tensor | None) -> Tensor:
    """A distilled operator on a site's tensors: A v, or the map A where v is None."""
    result = apply_operator(OPERATORS[distilled.operator], t, v, distilled.settings)
    return times_share(result, t.keep) if distilled.share else result


def apply_replacement(
    convention: Convention, replacement: Amortised | Distilled, t: SiteTensors, v: Tensor | None
) -> Tensor:
    """What replaces a site's loop, on its tensors: A v, or the map A where v is None.

    The same calls that passes.rewrite puts into a graph.
    """
    if isinstance(replacement, Distilled):
        return apply_distilled(replacement, t, v)
    duals: dict[str, Tensor | None] = {"source": None, "target": None}
    mass: Tensor | None = None
    for predictor in replacement.predictors:
        _check_columns(predictor, t)
        if replacement.plan.rescaled:
            duals["target"], mass = torch.ops.asapc.dual_and_row_mass(
                q=t.q, k=t.k, keep=t.keep, bias=t.bias,
                **predictor.arguments(convention.score_multiplier, mass=True),
            )  # fmt: skip
        else:
            duals[predictor.side] = predict(convention, predictor, t)
    source = duals["source"]
    if replacement.intercept is not None and source is not None:
        source = source + replacement.intercept[:, None]
    _, loop = loop_of(convention)
    settings = replacement.settings(source, duals["target"], loop)
    result = apply_operator(OPERATORS["asap"], t, v, settings)
    return result if mass is None else (result * mass[..., None]).to(result.dtype)


def _check_columns(predictor: DualPredictor, t: SiteTensors) -> None:
    """Raises InputError if a feature has a column for each position, and the fit had other positions."""
    tokens = t.q.shape[2] if predictor.side == "source" else t.k.shape[2]
    columns = total_width(predictor.features, t.q.shape[3], tokens)
    fitted = predictor.coefficients.shape[1]
    if columns != fitted:
        raise InputError(
            f"the {predictor.side} dual is predicted from {fitted} columns, as it was fitted",
            got=f"{columns} columns of {tokens} tokens",
            help="with token_bias, every sequence has the length that calibration saw: leave it out of "
            "the candidate's features, or keep to that length in `shapes` and in the data",
        )
