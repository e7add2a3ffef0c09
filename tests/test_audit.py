"""The soft-to-hard audit: measured by hand, decided by a budget, shown in the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import esp_net
import pytest
import torch
from torch import Tensor, nn

from asapc.artifact import Artifact, read_artifact
from asapc.cli import main
from asapc.inputs.data import Batch, open_data, split_of
from asapc.inputs.recipe import Recipe
from asapc.ir import Program
from asapc.passes.audit import Balance, SoftToHard, hardened, settle_exact_sorting, soft_sites
from asapc.passes.candidates import Choice
from asapc.passes.capture import export_graph
from asapc.passes.rewrite import Hardened
from asapc.program.calls import name_calls, operator_calls
from asapc.program.runner import Runner
from asapc.report import Report
from asapc.report.tables import report_tables


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return esp_net.compiled(tmp_path_factory)


@pytest.fixture(scope="module")
def artifact(work: Path) -> Artifact:
    return read_artifact(work / "out")


def split(work: Path, artifact: Artifact, name: str, size: int = 64) -> list[Batch]:
    source = open_data(str(work / "data.npz"), artifact.signature())
    return list(source.batches(size, select=lambda content: split_of(content) == name))


# Sums of rows and columns


def one_by_one(
    a: Tensor, keep: Tensor | None, query_keep: Tensor | None
) -> tuple[list[float], list[float], list[float]]:
    """|row sum - 1|, |scaled column sum - 1| and entropies, token by token."""
    rows, columns, entropies = [], [], []
    for b, example in enumerate(a):
        queries = range(a.shape[2]) if query_keep is None else query_keep[b].nonzero().flatten().tolist()
        keys = range(a.shape[3]) if keep is None else keep[b].nonzero().flatten().tolist()
        if not len(queries) or not len(keys):
            continue
        for head in example.tolist():
            for i in queries:
                total = math.fsum(head[i])
                rows.append(abs(total - 1))
                shares = [x / total for x in head[i] if x] if total else []
                entropies.append(-math.fsum(p * math.log(p) for p in shares))
            for j in keys:
                total = math.fsum(head[i][j] for i in queries)
                columns.append(abs(total * len(keys) / len(queries) - 1))
    return rows, columns, entropies


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (5, 3), (1, 1), (1, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_balance_token_by_token(queries: int, keys: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    balance, expected = Balance(), ([], [], [])  # type: ignore[var-annotated]
    for batch in (3, 0, 2):
        a = torch.rand(batch, 2, queries, keys, generator=generator, dtype=torch.float64)
        a[:1, 0, 0] = 0.0  # a row without mass
        keep = query_keep = None
        if masked:
            keep = torch.rand(batch, keys, generator=generator) < 0.6
            query_keep = torch.rand(batch, queries, generator=generator) < 0.6
            keep[1:2], query_keep[2:3] = False, False
            a = a * keep[:, None, None] * query_keep[:, None, :, None]
        balance.update(a.float(), keep, query_keep)
        for own, more in zip(expected, one_by_one(a.float(), keep, query_keep), strict=True):
            own.extend(more)
    for value, own in zip(balance.metrics().values(), expected, strict=True):
        assert value == pytest.approx(mean(own), rel=1e-12) if own else value is None


# The audit


def test_report_has_the_audit(work: Path, artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["report", str(work / "out"), "--json", "--quiet", "--examples", "30"]) == 0
    report = json.loads(capsys.readouterr().out)
    audit = report["soft_to_hard"]
    assert (audit["sites"], audit["examples"], audit["batch"]) == (2, 30, 16)
    soft, released, exact = audit["variants"]
    assert [v["name"] for v in audit["variants"]] == ["soft", "released hard", "exact hard"]
    assert soft["prediction_change"] == 0 and soft["accuracy"] == report["model"]["accuracy_teacher"]
    assert exact["row_err"] < 1e-6 and exact["col_err"] < 1e-6 < soft["row_err"]
    assert released["col_err"] >= exact["col_err"] and exact["entropy"] < soft["entropy"]
    assert all(v["examples_per_second"] > 0 for v in audit["variants"])

    # The same by hand: the teacher's own module, and its sorts made exact in place of SoftSort.
    module = esp_net.Net().eval()
    source = open_data(str(work / "data.npz"), artifact.signature())
    unseen = list(source.batches(1, select=lambda content: split_of(content) == "gate", limit=30))
    x = torch.cat([b.kwargs["x"] if b.kwargs else b.args[0] for b in unseen])
    labels = torch.cat([b.labels for b in unseen if b.labels is not None])
    with torch.no_grad():
        theirs = module(x).argmax(-1)
        for layer in module.layers:
            layer.sort = exact_sort
        ours = module(x).argmax(-1)
    assert soft["accuracy"] == pytest.approx(float((theirs == labels).double().mean()))
    assert exact["accuracy"] == pytest.approx(float((ours == labels).double().mean()))
    assert exact["prediction_change"] == pytest.approx(float((ours != theirs).double().mean()))

    text = (work / "out" / "report.md").read_text()
    assert "Soft to hard: the model by how it sorts" in text and "released hard" in text
    assert not [t for t in report_tables(Report()) if "Soft to hard" in t.title]


def exact_sort(x: Tensor) -> Tensor:
    order = x.argsort(dim=-1, descending=True, stable=True)
    return nn.functional.one_hot(order, x.shape[-1]).to(x.dtype)


class Padded(nn.Module):
    """A soft layer and a loop, both behind a key mask, and the mean of the active tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tau", torch.tensor([0.3], dtype=torch.float64))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x, own = x[:, None], (keep, keep, None, self.tau, 0.05, False, False, 2.0)
        x = x + torch.ops.asapc.esp_soft(x, x.sin(), x, *own)
        y = torch.ops.asapc.sinkhorn(x, x, x, keep, None, 0.3, 4, True, [1.0, 1.0, 0.0, 0.0])
        x = (x + y).masked_fill(~keep[:, None, :, None], 0.0)
        return x.sum((1, 2))


def test_only_soft_sites_of_a_mixed_padded_model_are_audited() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 9, 4, generator=generator)
    keep = torch.arange(9) < torch.tensor([9, 7, 5, 3, 1, 2])[:, None]
    exported = export_graph(Padded(), (x, keep), {}, None)
    graph = exported.module(check_guards=False)
    assert name_calls(graph, [str(i) for i, _ in enumerate(operator_calls(graph))])
    programs = [Program("", graph, (), {}, None)]  # type: ignore[arg-type]
    assert soft_sites(programs) == ["0"]
    audit, batch = SoftToHard(None, programs), Batch((x, keep), {}, None, list(range(6)))
    audit.update(batch)
    result = audit.result(batch, repeats=1)
    soft, released, exact = result["variants"]
    assert result["sites"] == 1 and soft["accuracy"] is None
    tau = torch.tensor([0.3], dtype=torch.float64)
    settings = (keep, keep, None, tau)
    clouds, ops = (x[:, None], x[:, None].sin()), torch.ops.asapc
    maps = {
        "soft": ops.esp_soft_attention(*clouds, *settings, 0.05, False, False, 1.0),
        "released hard": ops.esp_released_hard_attention(*clouds, *settings, 0.05, False, False, 1.0),
        "exact hard": ops.esp_hard_attention(*clouds, *settings, False, False, 1.0),
    }
    for variant in (soft, released, exact):
        rows, columns, entropies = one_by_one(maps[variant["name"]].double(), keep, keep)
        for key, own in (("row_err", rows), ("col_err", columns), ("entropy", entropies)):
            assert variant[key] == pytest.approx(mean(own), rel=1e-6, abs=1e-9), key
    assert exact["row_err"] < 1e-6 and exact["entropy"] < soft["entropy"]


# The decision


def decide(
    work: Path, artifact: Artifact, operators: Sequence[str], budgets: Sequence[float], **kwargs: Any
) -> tuple[list[Choice], dict[str, Any] | None]:
    soft, hard = Choice("esp_soft", "kept"), Choice("esp_hard", "exact", Hardened())
    sites = list(zip(names(artifact), operators, budgets, strict=True))
    proposed = {site: soft if name == "lossless" else hard for site, name, _ in sites}
    recipes = {
        site: replace(Recipe(), operator=name, budget={"prediction_agreement": 1 - budget})
        for site, name, budget in sites
    }
    batches = kwargs.get("batches", split(work, artifact, "calibration"))
    lossless = artifact.programs["lossless"]
    settled, facts = settle_exact_sorting(None, lossless, proposed, recipes, batches)
    return list(settled.values()), facts


def names(artifact: Artifact) -> list[str]:
    return [site["name"] for site in artifact.manifest["sites"]]


def changed(work: Path, artifact: Artifact, sites: list[str]) -> float:
    """Predictions that differ with these sites exact, by hand."""
    lossless = artifact.programs["lossless"]
    runners = [Runner(None, own) for own in (lossless, hardened(lossless, Hardened(), sites))]
    batches = split(work, artifact, "calibration", 7)
    classes = [torch.cat([runner(b).argmax(-1) for b in batches]) for runner in runners]
    return float((classes[0] != classes[1]).double().mean())


def test_exact_sorting_is_taken_within_the_budget_and_where_it_is_asked_for(
    work: Path, artifact: Artifact
) -> None:
    both, alone = changed(work, artifact, names(artifact)), changed(work, artifact, names(artifact)[:1])
    assert 0.01 < both < 0.9
    for budget, switched in ((both + 1e-9, True), (both - 1e-9, False)):
        choices, facts = decide(work, artifact, ("auto", "auto"), (0.9, budget))
        assert facts is not None and facts["switched"] is switched
        assert facts["prediction_change"] == pytest.approx(both)
        assert facts["examples"] == sum(map(len, split(work, artifact, "calibration")))
        for choice in choices:
            assert choice.operator == ("esp_hard" if switched else "esp_soft")
            assert isinstance(choice.replacement, Hardened) == switched
            assert f"{both:.2%}" in choice.reason and "the budget" in choice.reason
    choices, facts = decide(work, artifact, ("esp_hard", "auto"), (0.9, 1e-9))
    assert facts is not None and facts["switched"] is True
    assert facts["prediction_change"] == pytest.approx(both)
    assert [choice.operator for choice in choices] == ["esp_hard", "esp_soft"]
    assert f"{alone:.2%}" in choices[0].reason and "the recipe asks for it" in choices[0].reason
    assert f"{both:.2%}" in choices[1].reason


def test_what_cannot_be_measured_is_not_switched(work: Path, artifact: Artifact) -> None:
    choices, facts = decide(work, artifact, ("auto", "auto"), (0.9, 0.9), batches=[])
    assert facts == {"prediction_change": None, "examples": 0, "switched": False}
    assert all(c.operator == "esp_soft" and "cannot be measured" in c.reason for c in choices)
    choices, facts = decide(work, artifact, ("lossless", "lossless"), (0.9, 0.9))
    assert facts is None and [choice.reason for choice in choices] == ["kept", "kept"]


def test_compile_keeps_what_exceeds_the_budget_and_says_so(work: Path, artifact: Artifact) -> None:
    facts = artifact.manifest["soft_to_hard"]
    selection = split(work, artifact, "selection")
    assert facts["examples"] == sum(map(len, selection)) and facts["switched"] is False
    assert facts["prediction_change"] > 0.01
    for site in artifact.manifest["sites"]:
        assert site["operator"] == "esp_soft"
        assert f"{facts['prediction_change']:.2%}" in site["reason"] and "1.00%" in site["reason"]
    calls = [o.operator.name for p in artifact.programs["graph"] for o in operator_calls(p.graph)]
    assert calls == ["esp_soft", "esp_soft"]
