"""The choice of operators on the digits teacher: prices are set by hand, errors are measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_text import write_data, write_teacher

import asapc
from asapc import pipeline
from asapc.artifact import read_artifact
from asapc.calibration.stored import Calibration, load_calibration
from asapc.errors import InputError
from asapc.inputs.data import Batch, open_data, split_of
from asapc.inputs.load import load_teacher
from asapc.inputs.recipe import Recipe
from asapc.ir import SiteTensors
from asapc.measure.differences import comparable
from asapc.measure.fidelity import OutputFidelity
from asapc.metrics import BUDGET_BOUNDS
from asapc.passes import price, select
from asapc.passes.analyse import Analysis, analyse
from asapc.passes.price import Price
from asapc.passes.solve import ROUNDING, Option, cheapest
from asapc.program.runner import Runner
from asapc.report.evaluate import Measuring, bench, report
from asapc.stages.analyse import forward_signature
from asapc.terminal.progress import make_progress
from asapc.training import parameters, refresh

QUIET = make_progress(quiet=True)
ROUGH, FINE = "asap target 1 norm", "asap source 3 coarse:4 gaussian"
TRIED = [
    {"side": "target", "c_transforms": 1, "features": ["norm"]},
    {"side": "source", "c_transforms": 3, "features": ["coarse:4", "gaussian"]},
]
SMALL = {"candidates": TRIED, "batch_size": 16, "max_examples": 64, "selection_examples": 48}


@dataclass
class Ground:
    """One analysis and one calibration for every test."""

    folder: Path
    data: str
    analysis: Analysis
    calibration: Calibration
    batches: list[Batch]


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    folder = tmp_path_factory.mktemp("select")
    data = write_data(folder / "data.npz", 320)
    teacher = load_teacher(str(write_teacher(folder / "teacher")))
    pipeline.calibrate(teacher, data, folder / "calib", Recipe.from_dict(SMALL), QUIET)
    source = open_data(data, forward_signature(teacher))
    batches = list(source.batches(16, select=lambda h: split_of(h) == "selection", limit=48))
    analysis = analyse(teacher, next(source.batches(4)))
    return Ground(folder, data, analysis, load_calibration(folder / "calib"), batches)


def priced(monkeypatch: pytest.MonkeyPatch, by_label: Mapping[str, float]) -> list[Any]:
    """Milliseconds for every label; returns the shapes that were asked for."""
    asked: list[Any] = []

    def fake(calls: Any, t: Any, shapes: Any, memory: bool = False) -> dict[str, Price]:
        asked.append((shapes, memory))
        times = {label: dict.fromkeys(shapes, by_label[label]) for label in calls}
        return {label: Price(own, own, own, by_label[label]) for label, own in times.items()}

    monkeypatch.setattr(select, "prices", fake)
    monkeypatch.setattr(select, "timed", lambda calls, **_: {name: [1.0] for name in calls})
    return asked


CHEAP = {"teacher": 100.0, "sinkhorn": 30.0, FINE: 12.0, ROUGH: 5.0}


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    priced(monkeypatch, CHEAP)


def chosen(ground: Ground, recipe: Mapping[str, Any]) -> select.Selection:
    own = Recipe.from_dict({**SMALL, **recipe})
    return select.select(ground.analysis, own, ground.calibration, ground.batches, QUIET)


def written(ground: Ground, out: Path, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """By the whole of compile: the manifest."""
    teacher = load_teacher(str(ground.folder / "teacher"))
    own = Recipe.from_dict({**SMALL, **recipe})
    return pipeline.compile(teacher, ground.folder / "calib", out, own, ground.data, QUIET).manifest


def labels(trail: Mapping[str, Any]) -> list[str]:
    picked = [[c["label"] for c in site["candidates"] if c["chosen"]] for site in trail["sites"]]
    assert all(len(own) == 1 for own in picked)
    return [own[0] for own in picked]


@pytest.mark.parametrize("limit", [0.045, 0.2, 1e-6])
def test_attention_error_is_kept_at_every_site(ground, limit):
    """Without a budget of the whole model, each site takes the cheapest that keeps the limit."""
    made = chosen(ground, {"budget": {"attention_rel_l2": limit}})
    for site, entry in zip(made.trail["sites"], made.choices.values(), strict=True):
        errors = {c["label"]: c["attention_rel_l2"] for c in site["candidates"]}
        inside = [label for label in (ROUGH, FINE) if errors[label] <= limit] or ["sinkhorn"]
        own = next(c for c in site["candidates"] if c["chosen"])
        assert own["label"] == inside[0] and entry.operator == own["operator"]
        for other in site["candidates"]:
            if other["label"] in errors and (errors[other["label"]] or 0) > limit:
                assert other["verdict"].startswith("exceeds the budget: attention_rel_l2")


@pytest.mark.parametrize("metric", ["logit_kl", "prediction_agreement"])
def test_the_cheapest_set_inside_a_budget_of_the_model(ground, monkeypatch, metric):
    """Against every set by brute force on the damages that the trail lists, and measured as a whole."""
    monkeypatch.setattr(select.Search, "cheapest_everywhere", lambda *_: None)
    free = chosen(ground, {"budget": {metric: 0.0 if metric.startswith("pred") else 9.0}}).trail
    assert labels(free) == [ROUGH] * 3
    assert all(metric in c["alone"] for site in free["sites"] for c in site["candidates"][1:])
    damages = [
        {c["label"]: _damage(metric, c["alone"].get(metric)) for c in site["candidates"]}
        for site in free["sites"]
    ]
    budget = 0.6 * sum(own[ROUGH] for own in damages)
    limit = 1 - budget if BUDGET_BOUNDS[metric] == "min" else budget
    made = chosen(ground, {"budget": {metric: limit}})
    trail = made.trail
    sets = [
        (sum(CHEAP[label] for label in own), own)
        for own in itertools.product((ROUGH, FINE, "sinkhorn"), repeat=3)
        if sum(site[label] for site, label in zip(damages, own, strict=True)) <= budget * (1 + 1e-9)
    ]
    first = trail["rounds"][0]
    assert first["predicted_ms"] == pytest.approx(min(sets)[0])
    assert trail["rounds"][-1]["verdict"] == "inside the budget"
    measured = trail["rounds"][-1]["measured"][metric]
    assert _damage(metric, measured) <= budget + 1e-12
    assert labels(trail) == list(trail["rounds"][-1]["choice"].values())
    assert measured == pytest.approx(by_hand(ground, made)[metric], rel=1e-9)


def _damage(metric: str, value: float | None) -> float:
    if value is None:
        return 0.0
    return 1 - value if BUDGET_BOUNDS[metric] == "min" else value


def by_hand(ground: Ground, made: select.Selection) -> dict[str, float]:
    """The whole model with these choices against the untouched one, on the same examples."""
    fidelity = OutputFidelity()
    exact = Runner(ground.analysis.model, ground.analysis.lifted)
    own = Runner(ground.analysis.model, ground.analysis.rewritten(made.becomes))
    for batch in ground.batches:
        fidelity.update(comparable(exact(batch)), comparable(own(batch)), batch.labels)
    return fidelity.metrics()


def outputs(out: Path, stage: Any, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        found = asapc.load(out, stage=stage)(*batch.args, **batch.kwargs)
    return found[0]  # type: ignore[no-any-return]


def test_a_set_that_nobody_measured_is_not_said_to_exceed(ground, monkeypatch):
    monkeypatch.setattr(select.WholeModel, "measure", lambda self, own: {"logit_kl": 0.6 * len(own)})
    made = chosen(ground, {"budget": {"logit_kl": 1.0}})
    assert len(made.trail["rounds"]) == 2
    reasons = [choice.reason for choice in made.choices.values() if choice.operator == "sinkhorn"]
    assert len(reasons) == 2
    assert all("had no room for it" in own and "exceeded" not in own for own in reasons)


def test_a_set_that_exceeds_the_budget_together_is_tightened(ground, monkeypatch):
    """Damages that add up to more than their sum: the next rounds solve for less."""
    monkeypatch.setattr(select.Search, "cheapest_everywhere", lambda *_: None)
    true_measure = select.WholeModel.measure

    def interacting(self: Any, own: Any) -> dict[str, float]:
        found = true_measure(self, own)
        return {**found, "logit_kl": found["logit_kl"] * (1 if len(own) < 2 else 50 * len(own))}

    monkeypatch.setattr(select.WholeModel, "measure", interacting)
    free = chosen(ground, {"budget": {"logit_kl": 1e9}}).trail
    tried = [c for site in free["sites"] for c in site["candidates"]]
    alone = [c["alone"]["logit_kl"] for c in tried if c["label"] == ROUGH]
    trail = chosen(ground, {"budget": {"logit_kl": 2 * sum(alone)}}).trail
    verdicts = [own["verdict"] for own in trail["rounds"]]
    assert len(verdicts) > 1 and verdicts[-1] == "inside the budget"
    assert all(verdict.startswith("logit_kl") for verdict in verdicts[:-1])
    budgets = [own["budget"]["logit_kl"] for own in trail["rounds"]]
    assert budgets[1] < budgets[0]
    assert trail["rounds"][-1]["measured"]["logit_kl"] <= 2 * sum(alone)


def test_sites_are_turned_back_one_by_one_where_nothing_else_helps(ground, monkeypatch):
    """A model that is broken by any approximation, although none does harm alone."""

    def treacherous(self: Any, own: Any) -> dict[str, float]:
        return {"prediction_agreement": 1.0 if len(own) < 2 else 0.5}

    monkeypatch.setattr(select.WholeModel, "measure", treacherous)
    trail = chosen(ground, {"budget": {"prediction_agreement": 0.9}}).trail
    assert sorted(labels(trail)) == [ROUGH, "sinkhorn", "sinkhorn"]
    counts = [sum(label != "sinkhorn" for label in own["choice"].values()) for own in trail["rounds"]]
    assert counts == [3, 2, 1]

    def broken(self: Any, own: Any) -> dict[str, float]:
        return {"prediction_agreement": 0.5 if own else 1.0}

    monkeypatch.setattr(select.WholeModel, "measure", broken)
    made = chosen(ground, {"budget": {"prediction_agreement": 0.9}})
    trail = made.trail
    assert labels(trail) == ["sinkhorn"] * 3
    assert all(choice.replacement is None and choice.fit is None for choice in made.choices.values())


def test_what_is_slower_than_the_teacher_is_never_chosen(ground, tmp_path, monkeypatch):
    """Down to an artefact that is the teacher, which report and bench can measure."""
    priced(monkeypatch, {"teacher": 4.0, "sinkhorn": 30.0, FINE: 12.0, ROUGH: 5.0})
    loose = {"budget": {"attention_rel_l2": 9.0}}
    trail = chosen(ground, loose).trail
    assert labels(trail) == ["teacher"] * 3
    for site in trail["sites"]:
        for own in site["candidates"]:
            if own["label"] != "teacher":
                assert own["verdict"].startswith("slower than the teacher at 16x12: ")
                assert own["verdict"].endswith(" ms, not 4 ms")
    manifest = written(ground, tmp_path / "out", loose)
    assert {site["operator"] for site in manifest["sites"]} == {"teacher"}
    batch = ground.batches[0]
    assert torch.equal(*(outputs(tmp_path / "out", s, batch) for s in ("graph", "teacher")))
    measured = report(tmp_path / "out", ground.data, measuring=Measuring(16), progress=QUIET)
    facts = measured.to_json()
    assert {site["operator"] for site in facts["sites"]} == {"teacher"}
    assert facts["model"]["max_abs_error"] == 0
    timed = bench(tmp_path / "out", ground.data, repeats=1, progress=QUIET)
    assert [site["operator"] for site in timed["sites"]] == ["teacher"] * 3


def test_one_site_may_stay_with_the_teacher(ground, tmp_path, monkeypatch):
    """The sites behind it keep their places."""
    true_opened = select._opened

    def opened(index: int, *rest: Any) -> Any:
        own = true_opened(index, *rest)
        if index == 0:
            own.tried = [select.Tried(select.Candidate("teacher", "teacher"))]
        return own

    monkeypatch.setattr(select, "_opened", opened)
    manifest = written(ground, tmp_path / "out", {"budget": {"attention_rel_l2": 9.0}})
    assert [site["operator"] for site in manifest["sites"]] == ["teacher", "asap", "asap"]
    artifact = read_artifact(tmp_path / "out")
    last = {(0, name) for name in parameters.coefficients(artifact.programs["graph"][0].graph)[1]}
    trained = refresh._manifest(artifact, {"best_epoch": 1}, last)["sites"]
    both = zip(trained, manifest["sites"], strict=True)
    assert last and [own["reason"] != site["reason"] for own, site in both] == [False, False, True]


@pytest.mark.parametrize(("exact_ms", "operator"), [(2.0, "teacher"), (0.5, "sinkhorn")])
def test_a_compiled_model_slower_than_the_teacher_is_exact_or_the_teacher(
    ground, monkeypatch, exact_ms, operator
):
    """Approximations are slower than the teacher's millisecond as a whole, exact operators are or not."""
    compiled = iter([2.0, exact_ms])
    monkeypatch.setattr(
        select, "timed", lambda calls, **_: {"teacher": [1.0], "compiled": [next(compiled)]}
    )
    made = chosen(ground, {"budget": {"attention_rel_l2": 9.0}})
    assert {choice.operator for choice in made.choices.values()} == {operator}
    amortised, exact = made.trail["rounds"]  # each with the times of its own set
    assert {*amortised["choice"].values()} == {ROUGH} and {*exact["choice"].values()} == {"sinkhorn"}
    assert amortised["whole_model"] == {"teacher_ms": 1.0, "compiled_ms": 2.0}
    assert exact["whole_model"] == {"teacher_ms": 1.0, "compiled_ms": exact_ms}
    assert (exact["verdict"] == select.SLOWER_MODEL) == (operator == "teacher")


def test_an_approximation_must_gain_something(ground, monkeypatch):
    priced(monkeypatch, {"teacher": 100.0, "sinkhorn": 10.0, FINE: 9.5, ROUGH: 9.2})
    trail = chosen(ground, {"budget": {"attention_rel_l2": 9.0}}).trail
    assert labels(trail) == ["sinkhorn"] * 3
    verdicts = {own["label"]: own["verdict"] for own in trail["sites"][0]["candidates"]}
    assert "1.05 x as fast as the exact operator" in verdicts[FINE]


def test_required_shapes_and_memory_are_asked_for(ground, monkeypatch):
    asked = priced(monkeypatch, CHEAP)
    shapes = {"shapes": [128, [2, 300]], "objective": "memory", "budget": {"attention_rel_l2": 9.0}}
    trail = chosen(ground, shapes).trail
    assert asked[0] == ([(16, 128), (2, 300)], True)
    assert trail["shapes"] == [[16, 128], [2, 300]] and trail["objective"] == "memory"
    assert trail["rounds"][0]["predicted_mib"] == 3 * CHEAP[ROUGH]


def test_a_site_may_have_a_budget_of_its_own(ground):
    own = {"layers.1.*": {"budget": {"logit_kl": 1e-12}}, "layers.2.*": {"operator": "lossless"}}
    made = chosen(ground, {"budget": {"logit_kl": 9.0}, "sites": own})
    trail = made.trail
    assert labels(trail) == [ROUGH, "sinkhorn"]
    assert [choice.operator for choice in made.choices.values()] == ["asap", "sinkhorn", "sinkhorn"]
    assert list(made.choices.values())[2].reason == "the recipe asks for it"
    assert "with this site alone logit_kl" in trail["sites"][1]["candidates"][1]["verdict"]


def test_what_cannot_be_measured_is_an_error_where_it_was_asked_for(ground, monkeypatch):
    """The default budget asks for nothing that a model does not have; the recipe's and a site's do."""
    unlabelled = [replace(batch, labels=None) for batch in ground.batches]
    recipe = Recipe.from_dict({**SMALL, "budget": {"accuracy_drop": 0.01}})
    with pytest.raises(InputError, match=r"budget: accuracy_drop cannot be measured here, got no labels"):
        select.select(ground.analysis, recipe, ground.calibration, unlabelled, QUIET)
    monkeypatch.setattr(select, "comparable", lambda output: [output[1][0]])  # maps: no classes
    trail = chosen(ground, {}).trail
    assert trail["budget"] == {"attention_rel_l2": 0.05}  # what was kept, and not what could not be
    own = {"*": {"budget": {"prediction_agreement": 0.5}}}
    with pytest.raises(InputError, match=r"prediction_agreement cannot be measured here, got no output"):
        chosen(ground, {"sites": own})


def test_a_bias_by_position_has_one_length(ground):
    site = ground.analysis.sites[0]
    fit = SimpleNamespace(features=("norm", "token_bias"))
    tried = [select.Tried(select.Candidate("asap", "asap", None, fit))]  # type: ignore[arg-type]
    own = select.OpenSite(0, site, Recipe(), {}, tried)
    t = SiteTensors(torch.ones(1, 1, 12, 4), torch.ones(1, 1, 12, 4))
    select._check_one_length(own, t, [(4, 12)])
    with pytest.raises(InputError, match=r"asap holds for sequences of one length, got 4x13"):
        select._check_one_length(own, t, [(4, 12), (4, 13)])


def test_prices_are_measured_at_other_shapes():
    """Sizes of what the calls see, and medians that are times."""
    seen: list[tuple[int, ...]] = []
    keep = torch.arange(7)[None] < torch.tensor([[7], [3]])
    q, k, bias = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 7, 4), torch.randn(1, 2, 5, 7)
    t = SiteTensors(q, k, keep, bias)

    def call(own: SiteTensors, v: torch.Tensor | None) -> None:
        assert own.keep is not None and own.bias is not None and v is None
        seen.append((*own.q.shape[:3], own.k.shape[2], *own.keep.shape, *own.bias.shape))

    found = price.prices({"a": call}, t, [(2, 5), (3, 10)])["a"]
    assert set(seen) == {(2, 2, 5, 7, 2, 7, 1, 2, 5, 7), (3, 2, 10, 14, 3, 14, 1, 2, 10, 14)}
    assert set(found.median) == {(2, 5), (3, 10)} and found.milliseconds > 0
    assert found.slower_than(found) is None
    fast = Price({(2, 5): 1.0}, {(2, 5): 0.9}, {(2, 5): 1.1})
    slow = Price({(2, 5): 2.0}, {(2, 5): 1.2}, {(2, 5): 2.1})
    assert slow.slower_than(fast) == (2, 5) and fast.slower_than(slow) is None


def test_memory_of_a_call_is_what_it_holds_at_its_peak():
    from asapc.measure.timing import extra_bytes

    def call() -> torch.Tensor:
        return torch.ones(2**24) + torch.ones(2**24)  # three of 64 MiB

    found = extra_bytes(call)
    if found is None:
        pytest.skip("this system does not tell how much a process holds")
    assert 180 * 2**20 < found < 260 * 2**20


def test_a_shape_that_memory_does_not_hold_is_bad_input():
    t = SiteTensors(*(torch.ones(1, 1, 2, 4) for _ in range(2)), None, v=torch.ones(1, 1, 2, 4))
    with pytest.raises(InputError, match="1048576x1048576"):
        price.prices({"own": lambda t, v: v}, t, [(2**20, 2**20)])


# The choice over sites against trying every set


def brute(sites: list[list[Option]], limits: tuple[float, ...]) -> float | None:
    """Cost of the best set."""
    found = [
        sum(own.cost for own in chosen)
        for chosen in itertools.product(*sites)
        if all(sum(own.damages[m] for own in chosen) <= limit + 1e-12 for m, limit in enumerate(limits))
    ]
    return min(found, default=None)


options = st.builds(
    lambda cost, a, b: Option(cost / 7, (a / 100, b / 50)),
    st.integers(0, 30), st.integers(0, 60), st.integers(0, 60),
)  # fmt: skip


@given(st.lists(st.lists(options, min_size=1, max_size=4), min_size=0, max_size=5))
def test_the_cheapest_set_is_found(sites: list[list[Option]]) -> None:
    limits = (1.0, 2.0)
    chosen, best = cheapest(sites, limits), brute(sites, limits)
    if best is None:
        assert chosen is None
        return
    own = [site[index] for site, index in zip(sites, chosen, strict=True)]
    for metric, limit in enumerate(limits):
        assert sum(option.damages[metric] for option in own) <= limit * (1 + ROUNDING)
    assert sum(option.cost for option in own) == pytest.approx(best)


def test_limits_of_nothing_and_of_everything() -> None:
    sites = [[Option(1.0, (0.2,)), Option(5.0, (0.0,))]] * 3
    assert cheapest(sites, [0.0]) == [1, 1, 1]
    assert cheapest(sites, [math.inf]) == [0, 0, 0]
    assert cheapest(sites, [0.2]) in ([0, 1, 1], [1, 0, 1], [1, 1, 0])
    assert cheapest([[Option(1.0, (math.inf,))]], [1.0]) is None
    assert cheapest([[Option(1.0, (math.nan,)), Option(2.0, (0.0,))]], [1.0]) == [1]
    assert cheapest([[Option(math.inf, (0.0,)), Option(9.0, (0.0,))]], [1.0]) == [1]
    assert cheapest([], [1.0]) == []
    assert cheapest([[]], [1.0]) is None
    assert cheapest([[Option(2.0, ()), Option(1.0, ())]], []) == [1]


def test_many_sites_are_solved_at_once() -> None:
    """Three options at each of 48 sites: 3 ** 48 sets."""
    sites = [
        [Option(1.0, (0.011 + i / 5000,)), Option(2.0, (0.004,)), Option(3.0, (0.0,))] for i in range(48)
    ]
    chosen = cheapest(sites, [0.4])
    assert chosen is not None and {0, 1} <= set(chosen)
    assert sum(site[i].damages[0] for site, i in zip(sites, chosen, strict=True)) <= 0.4 * (1 + ROUNDING)
    assert sum(site[i].cost for site, i in zip(sites, chosen, strict=True)) == 74.0
