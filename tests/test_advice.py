"""What to do with a compiled model, from its report alone."""

import math
from collections.abc import Callable
from typing import Any

import page_report
import pytest
import yaml

from asapc.inputs.recipe import Recipe
from asapc.report import Report
from asapc.report.advice import LOSSLESS_RECIPE, Decision, advise, decide, default_limits, error_shares
from asapc.report.document import worst_class

Document = dict[str, Any]


@pytest.fixture
def document() -> Document:
    """Inside its budget, and much faster than the lossless model; no gate."""
    full = page_report.full_report()
    full["gate"] = {}
    full["selection"]["budget"] = {"attention_rel_l2": 0.05, "prediction_agreement": 0.99}
    return full


def decided(document: Document) -> Decision:
    return decide(page_report.typed(document))


def limits(document: Document) -> dict[str, float]:
    return {gate.metric: gate.limit for gate in default_limits(page_report.typed(document))}


def exact(document: Document, operator: str = "sinkhorn", **more: Any) -> Document:
    """Every site keeps its loop."""
    for site in document["sites"]:
        site |= {"operator": operator, "side": None, "c_transforms": None, "rescaled": None, **more}
        site["metrics"]["attention_rel_l2"] = 3e-7
    return document


def site_error(document: Document, error: float | None, place: int = 0) -> Document:
    document["sites"][place]["metrics"]["attention_rel_l2"] = error
    return document


def near(document: Document, ratio: float, long: float = 1.0) -> Document:
    """The lossless model takes `ratio` times the compiled model's time, and the layers agree; at the
    longer of the two shapes they take `long` times as much."""
    compiled = document["model"]["latency_compiled_ms"]
    document["model"]["latency_lossless_ms"] = ratio * compiled
    document["model"]["speedup_lossless"] = document["model"]["speedup"] / ratio
    for site in document["selection"]["sites"]:
        chosen = next(c for c in site["candidates"] if c["chosen"])
        exact = next(c for c in site["candidates"] if c["operator"] == "sinkhorn")
        exact["latency_ms"] = {k: v * ratio for k, v in chosen["latency_ms"].items()}
        exact["latency_ms"]["32x256"] *= long
    return document


def model(**figures: float) -> Callable[[Document], None]:
    return lambda document: document["model"].update(figures)


def checked(*checks: Document) -> Callable[[Document], None]:
    """With a gate of these checks."""
    known = [{"scope": "model", "class": "ACCEPT", "kind": "limit", "message": "x", **own}
             for own in checks]  # fmt: skip
    gate = {"verdict": worst_class(own["class"] for own in known), "checks": known}
    return lambda document: document.update(gate=gate)


UNPROVEN = "But agreement on {} examples proves only that at least 98.50% of predictions are equal"
SLOW = {"speedup": 0.8, "speedup_lossless": 0.7, "latency_compiled_ms": 1835.0,
        "latency_lossless_ms": 2097.0}  # fmt: skip
OTHER = {"speedup": 2.0, "speedup_lossless": 1.5, "speedup_teacher_torch_compile": 3.0}
LABELS = {"mode": "labels", "epochs": 1, "best_epoch": 1}
INACCURATE = {"metric": "accuracy_teacher", "value": 0.8, "min": 0.9, "class": "REGRESSION"}
FEW = {"metric": "examples", "value": 200.0, "min": 500.0, "message": "too few of them"}


def low_end(low: float | None, examples: int = 1000) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document["model"]["examples"] = examples
        document["model"]["confidence"]["prediction_agreement"] = [low, 1.0]

    return change


# What is changed, and the action, the sentence and a part of the reason.
CASES: list[tuple[Callable[[Document], Any], str, str, str]] = [
    (model(), "ship", "Ship it.", "All 3 default limits are kept."),
    # A budget that the examples do not prove is told.
    (low_end(0.985, 300), "ship", "Ship it.", f"kept. {UNPROVEN.format(300)}; 99.00% takes 369."),
    (low_end(0.985), "ship", "Ship it.", f"kept. {UNPROVEN.format(1000)}."),
    (lambda d: (exact(d), low_end(0.985)(d)), "ship", "Ship it.", f"attention. {UNPROVEN.format(1000)}."),
    # The worst site beyond its budget is the one to look at, or the one that makes most of the error.
    (lambda d: site_error(d, 0.08, 1), "look", "Look at layers.1.mha first.",
     "attention_rel_l2 of layers.1.mha is 0.08, beyond its limit (max 0.05)"),
    (model(prediction_agreement=0.9), "look", "Look at layers.2.mha first.",
     "prediction_agreement of model is 0.9, beyond its limit (min 0.99)."),
    (model(**SLOW), "teacher", "Keep the teacher.", "slower"),  # however close
    (model(**{**SLOW, "speedup_lossless": 1.4, "latency_lossless_ms": 1048.0}), "lossless",
     "Take the lossless model instead.", "The lossless model runs at 1.40x."),
    (model(**OTHER), "teacher", "Run the teacher under torch.compile.",
     "3.00x as fast there; asapc gains 2.00x"),
    (model(**OTHER, speedup_compiled_torch_compile=2.9), "ship", "Ship it.", ""),  # as fast, to its noise
    (model(examples=20), "measure", "Measure on more examples (--data) before you decide.",
     "at least 100 are needed"),
    (model(speedup=5000.0), "measure", "Measure again before you decide.", "a timing must be wrong"),
    # A file holds null for a number that was not finite.
    (lambda d: site_error(d, None), "measure", "Measure again before you decide.", ""),
    # Exact layers need no agreement of many examples.
    (lambda d: model(examples=20)(exact(d)), "ship", "Ship it.",
     "Every layer computes the teacher's own attention."),
    (lambda d: exact(d, "teacher", reason="nothing is faster"), "teacher", "Keep the teacher.",
     "Every layer still runs its own code: nothing is faster."),
    # The lossless model is no way out of itself, nor one back to old weights.
    (lambda d: model(speedup=0.99, speedup_lossless=1.01)(exact(d)), "teacher", "Keep the teacher.", ""),
    (lambda d: near(d, 1.04), "lossless", "Take the lossless model instead.", "takes 4% longer"),
    (lambda d: near(d, 1.04).update(refresh=LABELS), "ship", "Ship it.", ""),
    (lambda d: near(d, 1.04).update(refresh=LABELS) or model(speedup=0.9, speedup_lossless=1.3)(d),
     "teacher", "Keep the teacher.", ""),
    # It mends errors of approximation and nothing else.
    (lambda d: site_error(near(d, 1.0), 0.9), "lossless", "Take the lossless model instead.", ""),
    (lambda d: checked(INACCURATE)(near(d, 1.0)), "look", "Do not ship it yet.", ""),
    # What a check says is told.
    (checked({**FEW, "class": "ANOMALOUS"}), "measure",
     "Measure on more examples (--data) before you decide.", "too few of them"),
    (checked({**FEW, "metric": "new_metric", "class": "ANOMALOUS"}), "measure",
     "Measure again before you decide.", "too few of them"),
    (checked({**FEW, "metric": "new_metric", "class": "REGRESSION"}), "look", "Do not ship it yet.",
     "too few of them"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "action", "sentence", "because"), CASES)
def test_what_a_report_decides(
    document: Document, change: Callable[[Document], Any], action: str, sentence: str, because: str
) -> None:
    change(document)
    decision = decided(document)
    assert (decision.action, decision.sentence) == (action, sentence)
    assert because in decision.because


@pytest.mark.parametrize("low", [0.99, None])
def test_an_agreement_that_is_proven_is_not_doubted(document: Document, low: float | None) -> None:
    low_end(low)(document)
    assert decided(document).because == "All 3 default limits are kept."
    judged = decided(document).judgement
    assert judged.defaults and judged.gate.verdict == "ACCEPT"


def test_default_limits_are_the_budget_that_the_artefact_records(document: Document) -> None:
    assert limits(document) == {"attention_rel_l2": 0.05, "prediction_agreement": 0.99, "speedup": 1.0}
    document["selection"]["budget"] = {"attention_rel_l2": 0.01, "logit_kl": 1e-3}
    assert limits(document) == {"attention_rel_l2": 0.01, "logit_kl": 1e-3, "speedup": 1.0}
    document["selection"] = None
    assert limits(document)["attention_rel_l2"] == Recipe().budget["attention_rel_l2"]
    # What was not measured is not judged.
    for key in ("prediction_agreement", "speedup"):
        del document["model"][key]
    assert limits(document) == {"attention_rel_l2": 0.05}


def test_a_recorded_budget_may_be_anything(document: Document) -> None:
    for junk in (math.nan, math.inf, -1.0, 1e308, None):
        budget = {"attention_rel_l2": junk, "prediction_agreement": junk, "x": 1.0}
        document["selection"]["budget"] = budget
        for metric, limit in limits(document).items():
            assert 0 <= limit < math.inf and (metric != "prediction_agreement" or limit <= 1)
        assert decided(document).action in ("ship", "look")


def test_a_model_trained_on_labels_is_judged_by_its_accuracy(document: Document) -> None:
    document["model"]["prediction_agreement"] = 0.9
    site_error(document, 0.9)["refresh"] = {"mode": "labels"}
    assert limits(document) == {"accuracy_drop": pytest.approx(0.01), "speedup": 1.0}
    assert decided(document).action == "ship"


# The lossless model


@pytest.mark.parametrize(
    ("ratio", "told"), [(0.8, "faster than"), (1.0, "as fast as"), (1.09, "takes 9% longer"), (1.12, "")],
)
def test_a_lossless_model_that_is_nearly_as_fast_is_the_better_one(
    document: Document, ratio: float, told: str
) -> None:
    report = page_report.typed(near(document, ratio))
    decision = decide(report)
    assert (decision.lossless is not None) == bool(told)
    assert decision.action == ("lossless" if told else "ship")
    if told:
        assert told in decision.because
        assert Recipe.from_dict(yaml.safe_load(LOSSLESS_RECIPE)).operator == "lossless"
        assert advise(report) == []  # one recipe is better than a line a layer


def test_it_must_hold_at_every_shape_that_the_recipe_named(document: Document) -> None:
    assert decided(near(document, 1.0, long=2.0)).lossless is None
    for site in document["selection"]["sites"]:
        for candidate in site["candidates"]:
            del candidate["latency_ms"]["32x128"]  # one shape is that of the data: the model was timed
    assert decided(document).lossless is not None


LIMIT = {"metric": "attention_rel_l2", "scope": "sites", "value": 0.02, "max": 0.05}


def test_the_lossless_model_has_to_keep_what_was_asked_of_speed(document: Document) -> None:
    near(document, 1.04)
    time, speed = (document["model"][key] for key in ("latency_compiled_ms", "speedup"))
    for kept, own in (
        (True, {"metric": "latency_compiled_ms", "value": time, "max": 1.05 * time}),
        (False, {"metric": "latency_compiled_ms", "value": time, "max": 1.02 * time}),
        (False, {"metric": "speedup", "kind": "baseline", "value": speed, "baseline": 1.01 * speed,
                 "allowed": 0.02}),
    ):  # fmt: skip
        checked(own, LIMIT)(document)
        assert (decided(document).action == "lossless") == kept
    model(speedup=0.9, speedup_lossless=1.2)(document)
    checked({"metric": "speedup", "value": 0.9, "min": 1.5, "class": "REGRESSION"}, LIMIT)(document)
    assert decided(document).action != "lossless"


# Advice


def test_advice_is_ranked_by_what_it_would_gain(document):
    advice = advise(page_report.typed(document))
    assert [line.split()[1] for line in advice] == ["layers.2.mha", "layers.0.mha", "layers.1.mha"]
    # Its error is 0.0221 of 0.0530. At 32 x 256, the longest of the batches that the model was timed on,
    # its loop takes 17.1 ms more, of 91.3.
    assert advice[0] == (
        "Keeping layers.2.mha exact would remove 42% of the error and cost 19% of the speed."
    )
    document["selection"]["sites"] = []
    untimed = advise(page_report.typed(document))[0]
    assert untimed.endswith("42% of the error; the cost in speed was not timed.")


def test_each_layer_alone_tells_more_than_its_attention(document):
    for site, alone in zip(document["selection"]["sites"], (0.03, 0.01, 0.01), strict=True):
        for candidate in site["candidates"]:
            candidate["alone"] = {"output_rel_l2": alone}
    shares = error_shares(page_report.typed(document))
    assert shares == pytest.approx({"layers.0.mha": 0.6, "layers.1.mha": 0.2, "layers.2.mha": 0.2})
    for candidate in document["selection"]["sites"][1]["candidates"]:
        candidate["alone"] = {}  # not known of one: not of any
    assert error_shares(page_report.typed(document))["layers.2.mha"] == pytest.approx(0.417, abs=1e-3)


def test_the_worst_site_comes_first_and_what_is_not_finite_before_it(document):
    errors: list[float | None] = [0.1, None, math.inf, 0.3, 0.1]
    site = document["sites"][0]
    document["sites"] = [
        {**site, "name": str(i), "metrics": {"attention_rel_l2": error}} for i, error in enumerate(errors)
    ]
    report = Report.from_json(document, "report")
    assert [s.name for s in report.worst_first] == ["2", "3", "0", "4", "1"]
    worst = report.worst_site
    assert worst is not None and worst.name == "2"
    assert error_shares(report) == {}  # of what is not finite nobody makes a part
