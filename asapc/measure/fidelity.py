"""How close a compiled layer or model is to its teacher: streaming metrics over the examples.

Every example stays known by itself, for confidence intervals and for errors by length; what is proven
of a site is in asapc.report.certificates, and what each metric is in asapc.metrics.

Attention units: rows of a balanced map sum to 1 (A = N P, operators' output factor [1, 1, 0, 0]).
Duals and scores are divided by epsilon (asapc.ir). All sums run in float64. A metric that met a NaN
is inf (0 where more is better), so that no limit is kept by accident.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.inputs.faults import check_labels
from asapc.measure import bootstrap
from asapc.measure.differences import are_probabilities, comparable, log_probabilities


class AttentionFidelity:
    """Compares dense attention maps of one site, streaming over batches."""

    def __init__(self) -> None:
        self.pairs = self.rows = self.columns = 0  # pairs: (example, head)
        self._relative: list[Tensor] = []  # [b, H] each
        self._active: list[Tensor] = []  # [b] each
        self._kl = 0.0
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
            ratio = (keep.sum(-1).to(teacher.dtype) / active)[:, None, None]
        counted = keep.any(-1) & queries.any(-1)
        teacher, compiled, keep = teacher[counted], compiled[counted], keep[counted]
        queries, ratio = queries[counted], ratio[counted]
        if teacher.numel() == 0:
            return
        heads = teacher.shape[1]
        difference = torch.linalg.vector_norm(compiled - teacher, dim=(-2, -1))
        relative = difference / torch.linalg.vector_norm(teacher, dim=(-2, -1)).clamp(min=_TINY)
        self._relative.append(relative.nan_to_num(nan=math.inf, posinf=math.inf).cpu())
        self._active.append(keep.sum(-1).cpu())
        ratio_of_logs = teacher.clamp(min=_TINY).log() - compiled.clamp(min=_TINY).log()
        # sum P log(P / P^) - P + P^.  clamp lets a NaN through, so a broken map is not hidden.
        self._kl += float((teacher * ratio_of_logs - teacher + compiled).sum()) / num_queries
        for side, attention in enumerate((teacher, compiled)):
            missing = (attention.sum(-1) - 1).abs()
            self._row[side] += float(missing.masked_fill(~queries[:, None, :], 0.0).sum())
            excess = (attention.sum(-2) * ratio - 1).abs()
            self._col[side] += float(excess.masked_fill(~keep[:, None, :], 0.0).sum())
        self.pairs += relative.numel()
        self.rows += heads * int(queries.sum())
        self.columns += heads * int(keep.sum())

    def metrics(self) -> dict[str, float]:
        """Values by name, see asapc.metrics; empty if nothing was added."""
        if not self.pairs:
            return {}
        values = {
            "attention_rel_l2": float(self._errors().mean()),
            "attention_rel_l2_worst": float(self._errors().amax()),
            "row_err": self._row[1] / self.rows,
            "row_err_teacher": self._row[0] / self.rows,
            "col_err": self._col[1] / self.columns,
            "col_err_teacher": self._col[0] / self.columns,
            "plan_kl": self._kl / self.pairs,
        }
        return {name: _or_inf(value) for name, value in values.items()}

    def confidence(self) -> dict[str, bootstrap.Interval]:
        """Of the mean of attention_rel_l2, over examples."""
        if not self.pairs:
            return {}
        return _known(attention_rel_l2=bootstrap.mean(self._errors().mean(-1)))

    def by_head(self) -> dict[str, list[float]]:
        """attention_rel_l2, one number per head; empty if nothing was added."""
        return {"attention_rel_l2": self._errors().mean(0).tolist()} if self.pairs else {}

    def by_length(self) -> list[dict[str, float]]:
        """attention_rel_l2 of the examples by their active keys, see length_bins."""
        if not self.pairs:
            return []
        errors = self._errors().mean(-1)
        return [
            {**named, "attention_rel_l2": float(errors[chosen].mean())}
            for named, chosen in length_bins(torch.cat(self._active))
        ]

    def _errors(self) -> Tensor:
        """Relative l2 of every example and head, [examples, H]."""
        return torch.cat(self._relative)


class TensorFidelity:
    """Compares one tensor with its teacher's, streaming: RMSE, relative l2, largest difference.

    The first axis counts examples.
    """

    def __init__(self) -> None:
        self.count = 0
        self._largest = 0.0
        self._squared: list[Tensor] = []  # [b] each
        self._energy: list[Tensor] = []

    def update(self, teacher: Tensor, compiled: Tensor) -> None:
        """Add two tensors of one shape, any shape."""
        if teacher.shape != compiled.shape:
            raise ValueError(f"outputs must have one shape: {teacher.shape}, {compiled.shape}")
        if teacher.numel() == 0:
            return
        exact, approximate = teacher.detach().double(), compiled.detach().double()
        infinite = exact.isinf() & (exact == approximate)  # such as the logarithms of no mass
        exact, difference = (x.masked_fill(infinite, 0.0) for x in (exact, approximate - exact))
        self.count += exact.numel()
        rows = exact.shape[0] if exact.dim() else 1
        self._squared.append(difference.square().reshape(rows, -1).sum(-1).cpu())
        self._energy.append(exact.square().reshape(rows, -1).sum(-1).cpu())
        self._largest = max(self._largest, _or_inf(float(difference.abs().amax())))

    def metrics(self) -> dict[str, float]:
        """output_rmse, output_rel_l2 and max_abs_error; empty if nothing was added."""
        if not self.count:
            return {}
        squared, energy = (float(torch.cat(x).sum()) for x in (self._squared, self._energy))
        relative = math.sqrt(squared / energy) if energy else 0.0
        if not energy and squared:
            relative = math.inf
        return {
            "output_rmse": _or_inf(math.sqrt(squared / self.count)),
            "output_rel_l2": _or_inf(relative),
            "max_abs_error": self._largest,
        }

    def confidence(self) -> dict[str, bootstrap.Interval]:
        """Of output_rel_l2, over examples."""
        if not self.count:
            return {}
        squared, energy = torch.cat(self._squared), torch.cat(self._energy)
        return _known(output_rel_l2=bootstrap.root_ratio(squared, energy))


class OutputFidelity:
    """Compares the outputs of whole models, streaming over batches.

    A 2-D output [B, classes] is taken as the logits, or as probabilities if the rows of the first
    batch are distributions in both models; a single column is one binary logit, or a probability if
    within [0, 1]. Without a 2-D output no prediction is reported.
    """

    def __init__(self, lower_is_better: bool = False) -> None:
        """lower_is_better: of the user's own metric."""
        self.classes: int | None = None
        self._lower = lower_is_better
        self._tensor = TensorFidelity()
        self._probabilities: bool | None = None
        # By metric, one entry per example, [b] each; accuracies only of labelled batches.
        self._each: defaultdict[str, list[Tensor]] = defaultdict(list)

    @torch.no_grad()  # a model may return a weight
    def update(
        self,
        teacher_out: Any,
        compiled_out: Any,
        labels: Tensor | None = None,
        numbers: Sequence[int] = (),
        own: Mapping[str, Tensor] = {},
    ) -> None:
        """Add one batch of outputs (tensor, array, tuple, list, dict, or nested ones), see `comparable`.

        labels: [B] class numbers (or [B, 1]).  numbers: of the examples, for messages.  own: the user's
        metric of both models, see OwnMetric.values.
        Raises ValueError if there is nothing to compare, InputError for a label that no class has.
        """
        teacher, compiled = comparable(teacher_out), comparable(compiled_out)
        if not teacher or [t.shape for t in teacher] != [t.shape for t in compiled]:
            raise ValueError("the two outputs must hold the same float tensors, at least one")
        exact, approximate = teacher[0].double(), compiled[0].double()
        self._tensor.update(exact, approximate)
        each = dict(own)
        if exact.dim() == 2:
            each |= self._of_classes(exact, approximate, labels, numbers)
        for name, values in each.items():
            self._each[name].append(values.cpu())

    def _of_classes(
        self, exact: Tensor, approximate: Tensor, labels: Tensor | None, numbers: Sequence[int]
    ) -> dict[str, Tensor]:
        if self._probabilities is None:
            self._probabilities = are_probabilities(exact) and are_probabilities(approximate)
        log_p, log_q = (log_probabilities(x, self._probabilities) for x in (exact, approximate))
        # With q - p no term is below 0, also where probabilities are rounded and do not sum to one.
        p, q = log_p.exp(), log_q.exp()
        terms = (torch.where(log_p.isneginf(), 0.0, p * (log_p - log_q)) + q - p).clamp(min=0.0)
        each = {"logit_kl": terms.sum(-1).nan_to_num(nan=math.inf, posinf=math.inf)}
        # Where a row holds a NaN, argmax would still name a class: no prediction, no agreement.
        broken = log_q.isnan().any(-1)
        self.classes = log_p.shape[1]
        predicted_p = log_p.argmax(-1)
        predicted_q = log_q.argmax(-1).masked_fill(broken, -1)
        each["prediction_agreement"] = predicted_p == predicted_q
        if labels is not None and labels.numel() == len(exact):
            check_labels(labels.reshape(-1), self.classes, numbers)
            target = labels.reshape(-1).to(predicted_p.device)
            each["accuracy_teacher"] = predicted_p == target
            each["accuracy_compiled"] = predicted_q == target
        return each

    def metrics(self) -> dict[str, float]:
        """Values by name, see asapc.metrics; accuracies only where labels were given."""
        values = self._values()
        means = {name: float(x.double().mean()) for name, x in values.items()}
        for name, (first, second) in self._drops(values).items():
            means[name] = float(first.double().mean() - second.double().mean())
        return self._tensor.metrics() | {name: _or_inf(mean) for name, mean in means.items()}

    def confidence(self) -> dict[str, bootstrap.Interval]:
        """Of metrics(), output_rmse and max_abs_error excepted, over examples."""
        values = self._values()
        ends = {
            name: bootstrap.share(x) if x.dtype == torch.bool else bootstrap.mean(x)
            for name, x in values.items()
        }
        for name, (first, second) in self._drops(values).items():
            shares = first.dtype == torch.bool
            ends[name] = bootstrap.difference(first, second) if shares else bootstrap.mean(first - second)
        return self._tensor.confidence() | _known(**ends)

    def _values(self) -> dict[str, Tensor]:
        """By name; the user's own metric is a share where it is 0 or 1 everywhere."""
        values = {name: torch.cat(parts) for name, parts in self._each.items()}
        users = {name: x for name, x in values.items() if name.startswith("metric_")}
        if all(((x == 0) | (x == 1)).all() for x in users.values()):
            values |= {name: x.bool() for name, x in users.items()}
        return values

    def _drops(self, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """What the compiled model loses: the mean of the first less that of the second."""
        drops = {}
        for stem, turned in (("accuracy", False), ("metric", self._lower)):
            if f"{stem}_teacher" in values:
                sides = values[f"{stem}_teacher"], values[f"{stem}_compiled"]
                drops[f"{stem}_drop"] = sides[::-1] if turned else sides
        return drops


LENGTH_BINS = 5


def length_bins(lengths: Tensor) -> list[tuple[dict[str, int], Tensor]]:
    """At most LENGTH_BINS ranges of lengths [n] that hold about equally many examples.

    Examples of one length stay together.  Each range is ({"low", "high", "examples"}, which [n]),
    with the smallest and largest length that occur in it.
    """
    values, counts = lengths.unique(return_counts=True)  # sorted
    ranges: list[tuple[dict[str, int], Tensor]] = []
    first = taken = 0
    left = len(lengths)
    for i, count in enumerate(counts.tolist()):
        taken += count
        # A bin ends where adding the next length would carry it further from its share.
        following = int(counts[i + 1]) if i + 1 < len(counts) else 0
        share = left / max(1, LENGTH_BINS - len(ranges))
        if following and taken + following / 2 < share:
            continue
        low, high = int(values[first]), int(values[i])
        named = {"low": low, "high": high, "examples": taken}
        ranges.append((named, (lengths >= low) & (lengths <= high)))
        first, left, taken = i + 1, left - taken, 0
    return ranges


def _known(**intervals: bootstrap.Interval | None) -> dict[str, bootstrap.Interval]:
    return {name: interval for name, interval in intervals.items() if interval is not None}


_TINY = 1e-300


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
