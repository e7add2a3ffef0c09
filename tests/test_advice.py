"""What to do with a compiled model, from its report alone."""

import math
from typing import Any

import page_report
import pytest
import yaml

from asapc.inputs.recipe import Recipe
from asapc.report import Report
from asapc.report.advice import LOSSLESS_RECIPE, Decision, advise, decide, default_limits, error_shares

Document = dict[str, Any]


@pytest.fixture
def document():
    """Inside its budget, and much faster than the lossless model; no gate."""
    full = page_report.full_report()
    full["gate"] = {}
    full["selection"]["budget"] = {"attention_rel_l2": 0.05, "prediction_agreement": 0.99}
    return full


def decided(document: Document) -> Decision:
    return decide(page_report.typed(document))


def test_inside_the_default_limits_it_is_shipped(document):
    decision = decided(document)
    assert (decision.action, decision.sentence) == ("ship", "Ship it.")
    assert decision.because == "All 3 default limits are kept."
    judged = decision.judgement
    assert judged.default and judged.gate.verdict == "ACCEPT"


UNPROVEN = " But agreement on {} examples proves only that at least 98.50% of predictions are equal"


@pytest.mark.parametrize(("examples", "low", "told"), [
    (300, 0.985, f"{UNPROVEN.format(300)}; 99.00% takes 369."),
    (1000, 0.985, f"{UNPROVEN.format(1000)}."),
    (1000, 0.99, ""), (1000, None, ""),
])  # fmt: skip
def test_a_budget_that_the_examples_do_not_prove_is_told(document, examples, low, told):
    document["model"]["examples"] = examples
    document["model"]["confidence"]["prediction_agreement"] = [low, 1.0]
    decision = decided(document)
    assert decision.sentence == "Ship it."
    assert decision.because == "All 3 default limits are kept." + told
    for site in document["sites"]:
        site["operator"] = "sinkhorn"
    assert decided(document).because == "Every layer computes the teacher's own attention." + told


def test_default_limits_are_the_budget_that_the_artefact_records(document):
    def limits() -> dict[str, float]:
        found = default_limits(page_report.typed(document))
        return {gate.metric: gate.limit for gate in found}

    assert limits() == {"attention_rel_l2": 0.05, "prediction_agreement": 0.99, "speedup": 1.0}
    document["selection"]["budget"] = {"attention_rel_l2": 0.01, "logit_kl": 1e-3}
    assert limits() == {"attention_rel_l2": 0.01, "logit_kl": 1e-3, "speedup": 1.0}
    document["selection"] = None
    assert limits()["attention_rel_l2"] == Recipe().budget["attention_rel_l2"]
    # What was not measured is not judged.
    for key in ("prediction_agreement", "speedup"):
        del document["model"][key]
    assert limits() == {"attention_rel_l2": 0.05}


def test_a_recorded_budget_may_be_anything(document):
    for junk in (math.nan, math.inf, -1.0, 1e308, None):
        budget = {"attention_rel_l2": junk, "prediction_agreement": junk, "x": 1.0}
        document["selection"]["budget"] = budget
        for gate in default_limits(page_report.typed(document)):
            assert 0 <= gate.limit < math.inf
            assert gate.metric != "prediction_agreement" or gate.limit <= 1
        assert decided(document).action in ("ship", "look")


def test_the_worst_site_beyond_its_budget_is_the_one_to_look_at(document):
    document["sites"][1]["metrics"]["attention_rel_l2"] = 0.08
    decision = decided(document)
    assert (decision.action, decision.site) == ("look", "layers.1.mha")
    assert decision.sentence == "Look at layers.1.mha first."
    assert "attention_rel_l2 of layers.1.mha is 0.08, beyond its limit (max 0.05)" in decision.because


SLOW = {"speedup": 0.8, "speedup_lossless": 0.7, "latency_compiled_ms": 1835.0,
        "latency_lossless_ms": 2097.0}  # fmt: skip
OTHER = {"speedup": 2.0, "speedup_lossless": 1.5, "speedup_teacher_torch_compile": 3.0}


@pytest.mark.parametrize(("figures", "action", "told"), [
    # The site that makes most of the error is named.
    ({"prediction_agreement": 0.9}, "look",
     "Look at layers.2.mha first. prediction_agreement of model is 0.9, beyond its limit (min 0.99)."),
    (SLOW, "teacher", "Keep the teacher."),  # however close
    ({**SLOW, "speedup_lossless": 1.4, "latency_lossless_ms": 1048.0}, "lossless", "lossless"),
    (OTHER, "teacher", "3.00x as fast there; asapc gains 2.00x"),
    ({**OTHER, "speedup_compiled_torch_compile": 2.9}, "ship", "Ship it."),  # as fast, to its noise
    ({"examples": 20}, "measure", "at least 100 are needed"),
    ({"speedup": 5000.0}, "measure", "a timing must be wrong"),
])  # fmt: skip
def test_what_the_figures_of_the_model_decide(document, figures, action, told):
    document["model"] |= figures
    decision = decided(document)
    assert decision.action == action and told in f"{decision.sentence} {decision.because}"


def test_exact_layers_need_no_agreement_of_many_examples(document):
    for site in document["sites"]:
        site["operator"] = "sinkhorn"
        site["metrics"]["attention_rel_l2"] = 3e-7
    document["model"]["examples"] = 20
    decision = decided(document)
    assert decision.action == "ship"
    assert decision.because == "Every layer computes the teacher's own attention."
    for site in document["sites"]:
        site |= {"operator": "teacher", "reason": "nothing is faster"}
    decision = decided(document)
    assert decision.sentence == "Keep the teacher."
    assert decision.because == "Every layer still runs its own code: nothing is faster."


def test_a_model_trained_on_labels_is_judged_by_its_accuracy(document):
    document["model"]["prediction_agreement"] = 0.9
    document["sites"][0]["metrics"]["attention_rel_l2"] = 0.9
    document["refresh"] = {"mode": "labels"}
    found = default_limits(page_report.typed(document))
    limits = {gate.metric: gate.limit for gate in found}
    assert limits == {"accuracy_drop": pytest.approx(0.01), "speedup": 1.0}
    assert decided(document).action == "ship"


# The lossless model


def near(document: Document, ratio: float) -> Document:
    """The lossless model takes `ratio` times the compiled model's time, and the layers agree."""
    compiled = document["model"]["latency_compiled_ms"]
    document["model"]["latency_lossless_ms"] = ratio * compiled
    document["model"]["speedup_lossless"] = document["model"]["speedup"] / ratio
    for site in document["selection"]["sites"]:
        chosen = next(c for c in site["candidates"] if c["chosen"])
        exact = next(c for c in site["candidates"] if c["operator"] == "sinkhorn")
        exact["latency_ms"] = {k: v * ratio for k, v in chosen["latency_ms"].items()}
    return document


@pytest.mark.parametrize(
    ("ratio", "told"), [(0.8, "faster than"), (1.0, "as fast as"), (1.09, "takes 9% longer"), (1.12, "")],
)
def test_a_lossless_model_that_is_nearly_as_fast_is_the_better_one(document, ratio, told):
    report = page_report.typed(near(document, ratio))
    decision = decide(report)
    assert (decision.lossless is not None) == bool(told)
    assert decision.action == ("lossless" if told else "ship")
    if told:
        assert told in decision.because
        assert Recipe.from_dict(yaml.safe_load(LOSSLESS_RECIPE)).operator == "lossless"
        assert advise(report) == []  # one recipe is better than a line a layer


def test_it_must_hold_at_every_shape_that_the_recipe_named(document):
    near(document, 1.0)
    for site in document["selection"]["sites"]:
        exact = next(c for c in site["candidates"] if c["operator"] == "sinkhorn")
        exact["latency_ms"]["32x256"] *= 2
    assert decided(document).lossless is None
    for site in document["selection"]["sites"]:
        for candidate in site["candidates"]:
            del candidate["latency_ms"]["32x128"]  # one shape is that of the data: the model was timed
    assert decided(document).lossless is not None


def test_it_mends_errors_of_approximation_and_nothing_else(document):
    near(document, 1.0)
    document["sites"][0]["metrics"]["attention_rel_l2"] = 0.9
    assert decided(document).action == "lossless"
    check = {"kind": "limit", "metric": "accuracy_teacher", "scope": "model", "value": 0.8, "min": 0.9,
             "class": "REGRESSION"}  # fmt: skip
    document["gate"] = {"verdict": "REGRESSION", "checks": [check]}
    assert decided(document).action == "look"


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


def test_a_model_trained_on_labels_is_not_given_up_for_the_old_weights(document):
    near(document, 1.04)
    assert decided(document).action == "lossless"
    document["refresh"] = {"mode": "labels", "epochs": 1, "best_epoch": 1}
    assert decided(document).lossless is None
    document["model"] |= {"speedup": 0.9, "speedup_lossless": 1.3}
    assert decided(document).action == "teacher"


def test_what_was_not_finite_is_not_shipped_once_the_report_was_read_back(document):
    """A file holds null for a number that was not finite."""
    document["sites"][0]["metrics"]["attention_rel_l2"] = None
    assert decided(document).action == "measure"


def test_the_lossless_model_is_no_way_out_of_itself(document):
    document["model"] |= {"speedup": 0.99, "speedup_lossless": 1.01}
    for site in document["sites"]:
        site |= {"operator": "sinkhorn", "side": None, "c_transforms": None, "rescaled": None}
    assert decided(document).action == "teacher"


@pytest.mark.parametrize(
    "check",
    [
        {"metric": "speedup", "kind": "limit", "value": 0.9, "min": 1.5, "class": "REGRESSION"},
        {"metric": "latency_compiled_ms", "kind": "limit", "relative": 1.02},
        {"metric": "speedup", "kind": "baseline", "relative": 1.01, "allowed": 0.02},
    ],
    ids=["limit on speed", "limit on time", "baseline"],
)
def test_the_lossless_model_has_to_keep_what_was_asked_of_speed(document, check):
    near(document, 1.04)
    own = {"scope": "model", "class": "ACCEPT", "message": "x"} | check
    if check.get("value") == 0.9:
        document["model"] |= {"speedup": 0.9, "speedup_lossless": 1.2}
    else:
        assert decided(document).action == "lossless"  # without this check
        own["value"] = document["model"][check["metric"]]
        own["max" if check["kind"] == "limit" else "baseline"] = own.pop("relative") * own["value"]
    verdict = own["class"]
    limit = {"kind": "limit", "metric": "attention_rel_l2", "scope": "sites", "value": 0.02,
             "max": 0.05, "class": "ACCEPT", "passed": True, "message": "x"}  # fmt: skip
    document["gate"] = {
        "verdict": verdict, "passed": verdict == "ACCEPT",
        "checks": [own | {"passed": verdict == "ACCEPT"}, limit],
    }  # fmt: skip
    assert decided(document).action != "lossless"


@pytest.mark.parametrize(
    ("metric", "verdict", "sentence"),
    [
        ("new_metric", "ANOMALOUS", "Measure again before you decide."),
        ("new_metric", "REGRESSION", "Do not ship it yet."),
        ("examples", "ANOMALOUS", "Measure on more examples before you decide."),
    ],
)
def test_what_a_check_says_is_told(document, metric, verdict, sentence):
    check = {"kind": "limit", "metric": metric, "scope": "model", "value": 200.0, "min": 500.0,
             "class": verdict, "passed": False, "message": "too few of them"}  # fmt: skip
    document["gate"] = {"verdict": verdict, "passed": False, "checks": [check]}
    decision = decided(document)
    assert decision.sentence == sentence and "too few of them" in decision.because
