"""Apply: what a site becomes, on its own tensors, by the same calls that rewrite puts into a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from asapc.errors import InputError
from asapc.features import total_width
from asapc.features.predictor import Amortised, DualPredictor
from asapc.ir import Convention, Distilled, SiteTensors
from asapc.operators.catalogue import OPERATORS, loop_of
from asapc.operators.sinkhorn import factor_terms
from asapc.program.calls import times_share


def apply_lossless(convention: Convention, t: SiteTensors, v: Tensor | None) -> Tensor:
    """The finite loop on a site's tensors: A v, or the map A where v is None."""
    operator, settings = loop_of(convention)
    values = {} if v is None else {"v": v}
    result: Tensor = operator.overload(v is None)(
        q=t.q, k=t.k, **values, keep=t.keep, bias=t.bias, **settings
    )
    return result


def predict(convention: Convention, predictor: DualPredictor, t: SiteTensors) -> Tensor:
    """One predicted dual on a site's tensors."""
    dual: Tensor = torch.ops.asapc.dual(
        t.q, t.k, t.keep, t.bias, *predictor.arguments(convention.score_multiplier)
    )  # fmt: skip
    return dual


def apply_replacement(
    convention: Convention, own: Amortised | Distilled, t: SiteTensors, v: Tensor | None
) -> Tensor:
    """What replaces a site's loop, on its tensors: A v, or the map A where v is None."""
    if isinstance(own, Distilled):
        return apply_distilled(own, t, v)
    return apply_amortised(convention, own, t, v)


def apply_distilled(own: Distilled, t: SiteTensors, v: Tensor | None) -> Tensor:
    """A distilled operator on a site's tensors: A v, or the map A where v is None.

    The same calls that rewrite puts into a graph.
    """
    values = {} if v is None else {"v": v}
    call = OPERATORS[own.operator].overload(dense=v is None)
    result: Tensor = call(q=t.q, k=t.k, **values, keep=t.keep, query_keep=None, **own.settings)
    return times_share(result, t.keep) if own.share else result


def apply_amortised(
    convention: Convention, own: Amortised, t: SiteTensors, v: Tensor | None
) -> Tensor:
    """Predicted duals and closures on a site's tensors: A v, or the map A where v is None.

    The same calls that rewrite.amortise puts into a graph.
    """
    duals: dict[str, Tensor | None] = {"source": None, "key": None}
    mass: Tensor | None = None
    for predictor in own.predictors:
        _check_columns(predictor, t)
        if own.plan.rescaled:
            duals["key"], mass = torch.ops.asapc.dual_and_row_mass(
                t.q, t.k, t.keep, t.bias, *predictor.arguments(convention.score_multiplier, mass=True)
            )
        else:
            duals[predictor.side] = predict(convention, predictor, t)
    source = duals["source"]
    if own.intercept is not None and source is not None:
        source = source + own.intercept[:, None]
    settings = (
        source, duals["key"], convention.score_multiplier, own.plan.closures,
        factor_terms(convention.output_factor),
    )  # fmt: skip
    result: Tensor
    if v is None:
        result = torch.ops.asapc.asap_attention(t.q, t.k, t.keep, t.bias, *settings)
    else:
        result = torch.ops.asapc.asap(t.q, t.k, v, t.keep, t.bias, *settings)
    return result if mass is None else (result * mass[..., None]).to(result.dtype)


def _check_columns(predictor: DualPredictor, t: SiteTensors) -> None:
    """InputError where a feature has a column for each position, and the fit was of other positions."""
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
