"""The soft-to-hard audit: what exact sorting instead of a soft one does to a whole model.

An ESP layer is trained with soft sorts and meant to run with hard ones. Hard sorting is another
operator: its permutations are balanced exactly, its rows hold far less entropy, and predictions
change. How much is measured, next to the hardening of the released code, which takes the largest
entry of every row of a soft sort and need not give a permutation.
Source: ASAP, Appendix C.5, Table C.6.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asapc.inputs.data import Batch
from asapc.inputs.recipe import DEFAULT_BUDGET, Recipe
from asapc.ir import Program
from asapc.measure.differences import comparable
from asapc.measure.fidelity import AttentionFidelity, OutputFidelity
from asapc.measure.timing import interleaved_medians
from asapc.passes.candidates import Choice
from asapc.passes.rewrite import Hardened, rewritten_programs, soft_calls
from asapc.program.calls import SiteFunction, site_function
from asapc.program.runner import Runner, Tap


def soft_sites(programs: Sequence[Program]) -> list[str]:
    """The names of the sites that sort softly."""
    return [o.site for program in programs for o in soft_calls(program.graph)]


def hardened(programs: Sequence[Program], hard: Hardened, sites: Sequence[str]) -> list[Program]:
    """The programs with these soft sites hardened."""
    return rewritten_programs(programs, dict.fromkeys(sites, hard))


class Balance:
    """Streams maps [B, H, N, M] whose rows should sum to 1: errors of the sums, and entropy.

    row_err:  mean |sum_j A_ij - 1| over active queries.
    col_err:  mean |sum_i A_ij m/n - 1| over active keys, with n active queries and m active keys.
    entropy:  mean -sum_j p_ij log p_ij over active queries, p = A / its row sums, in nats.
    """

    def __init__(self) -> None:
        self._sums, self._entropy = AttentionFidelity(), 0.0

    def update(self, attention: Tensor, keep: Tensor | None, query_keep: Tensor | None) -> None:
        """Examples without an active query or key are passed over; masks as in SiteTensors."""
        a = attention.detach().double()
        queries = a.new_ones(len(a), a.shape[2]).bool() if query_keep is None else query_keep
        self._sums.update(a, a, keep, queries)
        if keep is not None:
            queries = queries & keep.any(-1, keepdim=True)
        sums = a.sum(-1, keepdim=True)
        entropy = torch.special.entr(a / torch.where(sums > 0, sums, 1.0)).sum(-1)
        self._entropy += float((entropy * queries[:, None]).sum())

    def metrics(self) -> dict[str, float | None]:
        sums = self._sums.metrics()
        entropy = self._entropy / self._sums.rows if sums else None
        return {"row_err": sums.get("row_err"), "col_err": sums.get("col_err"), "entropy": entropy}


class Variant:
    """One way to sort, behind its own activations."""

    def __init__(
        self, model: nn.Module | None, programs: Sequence[Program], sites: Sequence[str]
    ) -> None:
        self.runner = Runner(model, programs)
        self.outputs, self.balance = OutputFidelity(), Balance()
        self._tap = Tap(model, programs, sites)
        self._maps: list[SiteFunction] = [site_function(programs, site, unit=True) for site in sites]

    def update(self, batch: Batch, soft: Any = None) -> Any:
        """Add one batch; soft: the soft variant's output, None if this is the soft one."""
        output, inputs = self._tap(batch)
        self.outputs.update(output if soft is None else soft, output, batch.labels)
        with torch.no_grad():
            for tensors, function in zip(inputs, self._maps, strict=True):
                self.balance.update(function(tensors, None), tensors.keep, tensors.query_keep)
        return output

    def result(self, name: str, examples_per_second: float) -> dict[str, Any]:
        metrics = self.outputs.metrics()
        agreement = metrics.get("prediction_agreement")
        return {
            "name": name,
            "accuracy": metrics.get("accuracy_compiled"),
            "prediction_change": None if agreement is None else 1 - agreement,
            **self.balance.metrics(),
            "examples_per_second": examples_per_second,
        }


class SoftToHard:
    """Streams batches through a model with its sorts soft, released hard and exact hard.

    lossless: programs with soft sites.  refreshed: compiled programs that were trained since, if any.
    untouched: sites that the compiled programs left to the teacher's code: they hold no call for these.
    """

    def __init__(
        self,
        model: nn.Module | None,
        lossless: Sequence[Program],
        refreshed: Sequence[Program] | None = None,
        untouched: Collection[str] = (),
    ) -> None:
        self.sites, self.examples = soft_sites(lossless), 0
        programs: dict[str, Sequence[Program]] = {
            "soft": lossless,
            "released hard": hardened(lossless, Hardened("released"), self.sites),
            "exact hard": hardened(lossless, Hardened("exact"), self.sites),
        }
        self._variants = {name: Variant(model, variant, self.sites) for name, variant in programs.items()}
        if refreshed is not None:
            kept = [site for site in self.sites if site not in untouched]
            self._variants["refreshed"] = Variant(model, refreshed, kept)

    def update(self, batch: Batch) -> None:
        soft = None
        for name, variant in self._variants.items():
            output = variant.update(batch, soft)
            soft = output if name == "soft" else soft
        self.examples += len(batch)

    def result(self, batch: Batch, repeats: int = 7) -> dict[str, Any]:
        """What was seen, with the throughput on one batch: medians, the variants taking turns."""
        calls = {name: partial(variant.runner, batch) for name, variant in self._variants.items()}
        times = interleaved_medians(calls, repeats=repeats)
        return {
            "sites": len(self.sites),
            "examples": self.examples,
            "batch": len(batch),
            "variants": [
                variant.result(name, len(batch) / times[name]["median_ms"] * 1e3)
                for name, variant in self._variants.items()
            ],
        }


def prediction_change(
    model: nn.Module | None, before: Sequence[Program], after: Sequence[Program], batches: Iterable[Batch]
) -> float | None:
    """Share of examples whose predicted class differs; None where no class is predicted."""
    outputs = OutputFidelity()
    runners = [Runner(model, version) for version in (before, after)]
    for batch in batches:
        first, second = (comparable(runner(batch)) for runner in runners)
        outputs.update(first, second)
    agreement = outputs.metrics().get("prediction_agreement")
    return None if agreement is None else 1 - agreement


def settle_exact_sorting(
    model: nn.Module | None,
    lossless: Sequence[Program],
    choices: Mapping[str, Choice],
    recipes: Mapping[str, Recipe],
    batches: Sequence[Batch],
) -> tuple[dict[str, Choice], dict[str, Any] | None]:
    """Whether sites proposed for exact sorting get it: a decision for the whole model.

    choices, recipes: by site. Where the predictions change by more than the smallest budget of the sites
    left to `operator: auto`, or cannot be compared, those stay soft; forced sites switch anyway.
    Returns the choices with what was measured in their reasons, and the same for the manifest, None
    where no site is proposed: {"prediction_change", "examples", "switched"}, the change of the proposal.
    """
    settled = dict(choices)
    hard = [site for site, choice in choices.items() if isinstance(choice.replacement, Hardened)]
    if not hard:
        return settled, None
    examples = sum(map(len, batches))

    def measure(sites: Sequence[str]) -> tuple[float | None, str]:
        exact = hardened(lossless, Hardened(), sites)
        change = prediction_change(model, lossless, exact, batches)
        if change is None:
            return None, "what exact sorting changes cannot be measured: no predicted classes"
        return change, f"exact sorting changes {change:.2%} of {examples} predictions"

    auto = [site for site in hard if recipes[site].operator == "auto"]
    change, reason = measure(hard)
    key = "prediction_agreement"  # by which a switch to exact sorts is always measured
    shares = [recipes[site].budget.get(key, DEFAULT_BUDGET[key]) for site in auto]
    budget = min((1 - share for share in shares), default=math.inf)
    if auto and (change is None or change > budget):
        excess = "" if change is None else f", more than the budget of {budget:.2%}"
        settled |= dict.fromkeys(auto, Choice("esp_soft", reason + excess))
        hard = [site for site in hard if site not in auto]
        reason = measure(hard)[1] if hard else reason
    for site in hard:
        why = f", within the budget of {budget:.2%}" if site in auto else "; the recipe asks for it"
        settled[site] = replace(settled[site], reason=reason + why)
    return settled, {"prediction_change": change, "examples": examples, "switched": bool(hard)}
