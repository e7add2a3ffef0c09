"""How close a compiled layer or model is to its teacher: streaming metrics and certificates.

Attention units: rows of a balanced map sum to 1 (A = N P, operators' output factor [1, 1, 0, 0]).
Duals and scores are divided by epsilon (asapc.ir). All sums run in float64. A metric that met a NaN
is inf (0 where more is better), so that no limit is kept by accident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from asapc.class_scores import are_probabilities, log_probabilities
from asapc.passes.verify import tensor_outputs


@dataclass(frozen=True)
class MetricInfo:
    """direction: which way is better, "min" or "max".  scope: where the metric is reported."""

    direction: Literal["min", "max"]
    scope: Literal["site", "model", "both"]
    doc: str


METRICS: Mapping[str, MetricInfo] = {
    "attention_rel_l2": MetricInfo(
        "min", "site", "|A^ - A|_F / |A|_F, mean over examples and heads"
    ),
    "attention_rel_l2_worst": MetricInfo("min", "site", "the same, worst example and head"),
    "row_err": MetricInfo("min", "site", "mean |sum_j A^_ij - 1| over queries"),
    "row_err_teacher": MetricInfo("min", "site", "row_err of the teacher itself"),
    "col_err": MetricInfo("min", "site", "mean |sum_i A^_ij M/N - 1| over active keys"),
    "col_err_teacher": MetricInfo("min", "site", "col_err of the teacher itself"),
    "plan_kl": MetricInfo("min", "site", "generalised KL(P || P^), mean over examples and heads"),
    "row_bound": MetricInfo("min", "site", "proven bound on row_err, exp(max |g+ - g0|) - 1"),
    "contraction_bound": MetricInfo(
        "min", "site", "proven contraction of one Sinkhorn iteration, tanh^2(range(S) / 2)"
    ),
    "dual_stability": MetricInfo(
        "min", "site", "proven ratio of plan entries, exp(range(f^ - f)), at the dual's error"
    ),
    "r2": MetricInfo("max", "site", "variance of the teacher's dual that the fit explains"),
    "condition_number": MetricInfo("min", "site", "of X'X + lambda I, largest of the head groups"),
    "output_rmse": MetricInfo("min", "both", "root mean square difference of the outputs"),
    "output_rel_l2": MetricInfo("min", "both", "norm of the difference / norm of the teacher's"),
    "max_abs_error": MetricInfo("min", "both", "largest absolute difference of the outputs"),
    "logit_kl": MetricInfo("min", "model", "KL(teacher || compiled) of the predicted classes"),
    "prediction_agreement": MetricInfo("max", "model", "share of equal predicted classes"),
    "accuracy_teacher": MetricInfo("max", "model", "of the teacher, where labels are given"),
    "accuracy_compiled": MetricInfo("max", "model", "of the compiled model"),
    "accuracy_drop": MetricInfo("min", "model", "accuracy_teacher - accuracy_compiled"),
    "latency_teacher_ms": MetricInfo("min", "both", "median time of the teacher"),
    "latency_lossless_ms": MetricInfo("min", "both", "median time with lossless operators"),
    "latency_compiled_ms": MetricInfo("min", "both", "median time of the compiled model"),
    "speedup": MetricInfo("max", "both", "latency_teacher_ms / latency_compiled_ms"),
    "speedup_lossless": MetricInfo("max", "both", "latency_teacher_ms / latency_lossless_ms"),
    "fit_seconds": MetricInfo("min", "both", "time spent on calibration"),
    "break_even_batches": MetricInfo(
        "min", "model", "batches after which the time saved exceeds fit_seconds"
    ),
}


class AttentionFidelity:
    """Compares dense attention maps of one site, streaming over batches."""

    def __init__(self) -> None:
        self.pairs = 0  # (example, head)
        self.rows = 0
        self.columns = 0
        self._rel = self._worst = self._kl = 0.0
        self._row, self._col = [0.0, 0.0], [0.0, 0.0]  # teacher, compiled

    def update(
        self,
        teacher_map: Tensor,
        compiled_map: Tensor,
        keep: Tensor | None = None,
        query_keep: Tensor | None = None,
    ) -> None:
        """Add maps [B, H, N, M] in attention units; keep: [B, M] bool, True on active keys.

        Examples without an active key are passed over. Masked keys do not enter column errors.
        query_keep: [B, N] bool, where padded queries have no mass: they enter no row errors, and a
        column that every one of n active queries and m active keys shares weighs n / m.
        """
        teacher, compiled = teacher_map.detach().double(), compiled_map.detach().double()
        if teacher.shape != compiled.shape:
            raise ValueError(f"maps must have one shape: {teacher.shape}, {compiled.shape}")
        batch, _, num_queries, num_keys = teacher.shape
        if keep is None:
            keep = torch.ones(batch, num_keys, dtype=torch.bool, device=teacher.device)
        ratio = teacher.new_full((batch, 1, 1), num_keys / max(1, num_queries))
        queries = torch.ones(batch, num_queries, dtype=torch.bool, device=teacher.device)
        if query_keep is not None:
            queries = query_keep
            active = queries.sum(-1).clamp(min=1)
            ratio = (keep.sum(-1) / active)[:, None, None].to(teacher.dtype)
        counted = keep.any(-1) & queries.any(-1)
        teacher, compiled, keep = teacher[counted], compiled[counted], keep[counted]
        queries, ratio = queries[counted], ratio[counted]
        if teacher.numel() == 0:
            return
        heads = teacher.shape[1]
        difference = torch.linalg.vector_norm(compiled - teacher, dim=(-2, -1))
        relative = difference / torch.linalg.vector_norm(teacher, dim=(-2, -1)).clamp(min=_TINY)
        self._rel += float(relative.sum())
        self._worst = max(self._worst, _or_inf(float(relative.amax())))
        self._kl += float(_generalised_kl(teacher, compiled).sum()) / num_queries
        for side, attention in enumerate((teacher, compiled)):
            missing = (attention.sum(-1) - 1).abs()
            self._row[side] += float(missing.masked_fill(~queries[:, None, :], 0.0).sum())
            excess = (attention.sum(-2) * ratio - 1).abs()
            self._col[side] += float(excess.masked_fill(~keep[:, None, :], 0.0).sum())
        self.pairs += relative.numel()
        self.rows += heads * int(queries.sum())
        self.columns += heads * int(keep.sum())

    def metrics(self) -> dict[str, float]:
        """Values by name, see METRICS; empty if nothing was added."""
        if not self.pairs:
            return {}
        values = {
            "attention_rel_l2": self._rel / self.pairs,
            "attention_rel_l2_worst": self._worst,
            "row_err": self._row[1] / self.rows,
            "row_err_teacher": self._row[0] / self.rows,
            "col_err": self._col[1] / self.columns,
            "col_err_teacher": self._col[0] / self.columns,
            "plan_kl": self._kl / self.pairs,
        }
        return {name: _or_inf(value) for name, value in values.items()}


class TensorFidelity:
    """Compares one tensor with its teacher's, streaming: RMSE, relative l2, largest difference."""

    def __init__(self) -> None:
        self.count = 0
        self._squared = self._energy = self._largest = 0.0

    def update(self, teacher: Tensor, compiled: Tensor) -> None:
        """Add two tensors of one shape, any shape."""
        if teacher.shape != compiled.shape:
            raise ValueError(f"outputs must have one shape: {teacher.shape}, {compiled.shape}")
        if teacher.numel() == 0:
            return
        exact = teacher.detach().double()
        difference = compiled.detach().double() - exact
        self.count += exact.numel()
        self._squared += float(difference.square().sum())
        self._energy += float(exact.square().sum())
        self._largest = max(self._largest, _or_inf(float(difference.abs().amax())))

    def metrics(self) -> dict[str, float]:
        """output_rmse, output_rel_l2 and max_abs_error; empty if nothing was added."""
        if not self.count:
            return {}
        relative = math.sqrt(self._squared / self._energy) if self._energy else 0.0
        if not self._energy and self._squared:
            relative = math.inf
        return {
            "output_rmse": _or_inf(math.sqrt(self._squared / self.count)),
            "output_rel_l2": _or_inf(relative),
            "max_abs_error": self._largest,
        }


class OutputFidelity:
    """Compares the outputs of whole models, streaming over batches.

    The first 2-D float output [B, classes] is taken as the logits, or as probabilities if the rows
    of the first batch are distributions in both models; a single column is one binary logit, or a
    probability if within [0, 1]. Without a 2-D output the first float tensor is compared and no
    prediction is reported.
    """

    def __init__(self) -> None:
        self.examples = 0
        self.labelled = 0
        self._tensor = TensorFidelity()
        self._probabilities: bool | None = None
        self._agreed = self._right_teacher = self._right_compiled = 0
        self._kl = 0.0

    def update(self, teacher_out: Any, compiled_out: Any, labels: Tensor | None = None) -> None:
        """Add one batch of outputs (tensor, array, tuple, list, dict, or nested ones).

        labels: [B] class numbers (or [B, 1]).  Raises ValueError if the structures differ.
        """
        teacher, compiled = tensor_outputs(teacher_out), tensor_outputs(compiled_out)
        if [t.shape for t in teacher] != [t.shape for t in compiled] or not teacher:
            raise ValueError("the two outputs must hold the same float tensors, at least one")
        index = next((i for i, t in enumerate(teacher) if t.dim() == 2), None)
        principal = 0 if index is None else index
        self._tensor.update(teacher[principal], compiled[principal])
        if index is None or teacher[index].numel() == 0:
            return
        exact, approximate = teacher[index].double(), compiled[index].double()
        if self._probabilities is None:
            self._probabilities = are_probabilities(exact) and are_probabilities(approximate)
        log_p, log_q = (log_probabilities(x, self._probabilities) for x in (exact, approximate))
        terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
        self._kl += float(terms.sum())
        # Where a row holds a NaN, argmax would still name a class: no prediction, no agreement.
        broken = log_q.isnan().any(-1)
        predicted_p = log_p.argmax(-1)
        predicted_q = log_q.argmax(-1).masked_fill(broken, -1)
        self.examples += len(exact)
        self._agreed += int((predicted_p == predicted_q).sum())
        if labels is not None and labels.numel() == len(exact):
            target = labels.reshape(-1).to(predicted_p.device)
            self.labelled += len(exact)
            self._right_teacher += int((predicted_p == target).sum())
            self._right_compiled += int((predicted_q == target).sum())

    def metrics(self) -> dict[str, float]:
        """Values by name, see METRICS; accuracies only where labels were given."""
        values = self._tensor.metrics()
        if self.examples:
            values["logit_kl"] = _or_inf(self._kl / self.examples)
            values["prediction_agreement"] = self._agreed / self.examples
        if self.labelled:
            values["accuracy_teacher"] = self._right_teacher / self.labelled
            values["accuracy_compiled"] = self._right_compiled / self.labelled
            values["accuracy_drop"] = values["accuracy_teacher"] - values["accuracy_compiled"]
        return values


def row_error_bound(g_plus: Tensor, g_0: Tensor) -> Tensor:
    """exp(max_j |g+_j - g0_j|) - 1 >= row_err of the plan closed on g+, per example and head.

    g_0, g_plus: [B, H, M], the key duals before and after the row closure between them; masked keys
    are -inf in both. Returns [B, H] float64. Holds with masks too: after the row closure every row
    has mass 1/N, and only active keys are rescaled.  Source: ASAP, Proposition B.7.
    """
    active = ~(g_plus.isneginf() & g_0.isneginf())
    change = (g_plus.double() - g_0.double()).abs()
    return torch.expm1(torch.where(active, change, 0.0).amax(-1))


def dual_stability_factor(f_hat: Tensor, f: Tensor, keep: Tensor | None = None) -> Tensor:
    """exp(2 alpha) with alpha = min_c max_i |f^_i - f_i - c|: bounds the ratio of plan entries.

    f_hat, f: [B, H, N] predicted and teacher dual of one side, in the same coordinates; keep: [B, N],
    the points that carry mass, or None for all. Every entry of
    the plan closed from f_hat is within this factor of the one closed from f, after any number of
    closures. Returns [B, H] float64.  Source: ASAP, Propositions B.8 and B.9 (gauge-free form).
    """
    error = f_hat.double() - f.double()
    if keep is None:
        return torch.exp(error.amax(-1) - error.amin(-1))
    massless = ~keep[:, None, :]
    high = error.masked_fill(massless, -math.inf).amax(-1)
    low = error.masked_fill(massless, math.inf).amin(-1)
    return torch.exp((high - low).clamp(min=0.0))  # no point at all: nothing to bound


def contraction_bound(scores: Tensor, keep: Tensor | None = None) -> Tensor:
    """tanh^2(range(S) / 2) >= Hilbert contraction of one iteration (two half-steps), [B, H].

    scores: [B, H, N, M] divided by epsilon; only active keys count. Row and column offsets of S do
    not change the iteration, so the smaller of the ranges of S and of S centred over rows and
    columns is taken. By Birkhoff the contraction is tanh^2(Delta / 4) with Delta, the largest
    |S_ij + S_kl - S_il - S_kj|, at most 2 range(S); tanh^2(range / 4) would not be a bound.
    1 where nothing is proven (range above about 38), 0 without an active key.
    Source: Block-wise differentiable Sinkhorn attention, Proposition 4.
    """
    wide = scores.detach().double()
    if keep is None:
        active = torch.ones_like(wide, dtype=torch.bool)
    else:
        active = keep[:, None, None, :].expand(wide.shape)
    filled = wide.masked_fill(~active, 0.0)
    count = active.sum(-1, keepdim=True).clamp(min=1)
    centred = filled - filled.sum(-1, keepdim=True) / count
    centred = centred - centred.mean(-2, keepdim=True)
    spread = torch.minimum(_range(filled, active), _range(centred, active))
    return torch.tanh(spread / 2).square()


_TINY = 1e-300


def _range(values: Tensor, active: Tensor) -> Tensor:
    """Largest minus smallest active entry of each [N, M] matrix; 0 where none is active."""
    largest = values.masked_fill(~active, -math.inf).flatten(-2).amax(-1)
    smallest = values.masked_fill(~active, math.inf).flatten(-2).amin(-1)
    return torch.where(active.flatten(-2).any(-1), largest - smallest, 0.0)


def _generalised_kl(exact: Tensor, approximate: Tensor) -> Tensor:
    """sum P log(P / P^) - P + P^ of each matrix, finite where P^ underflows; [B, H]."""
    ratio = exact.clamp(min=_TINY).log() - approximate.clamp(min=_TINY).log()
    # clamp lets a NaN through, so a broken map is not hidden.
    return (exact * ratio - exact + approximate).sum((-2, -1))


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
