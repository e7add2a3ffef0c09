"""A report with everything in it, and pictures to match: the IMDb teacher's shapes and figures."""

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import torch

from asapc.calibration.enough import Shortage
from asapc.report import Report
from asapc.report.pictures import SitePictures

SITES = ("layers.0.mha", "layers.1.mha", "layers.2.mha")
CONVENTION: dict[str, Any] = {
    "operator": "sinkhorn", "half_steps": 20, "first_side": "row", "last_side": "column",
    "score_multiplier": 0.0883883, "output_factor": "M", "mask": "key", "bias": False,
    "early_stop": False,
}  # fmt: skip
GRID = [  # label, operator, attention error, output error, agreement, ms at 32x128, ms at 32x256
    ("teacher", "teacher", 0.0, 0.0, 1.0, 118.0, 481.7),
    ("sinkhorn", "sinkhorn", None, None, 1.0, 9.9, 30.6),
    ("asap target 1 gaussian", "asap", 0.0573, 0.031, 0.996, 4.6, 14.5),
    ("asap target 1 coarse:16", "asap", 0.0221, 0.0118, 0.998, 4.3, 12.9),
    ("asap target 1 coarse:32", "asap", 0.0167, 0.0084, 0.999, 4.9, 14.8),
    ("asap target 1 coarse:64", "asap", 0.0122, 0.0069, 0.999, 6.2, 18.9),
    ("asap key 2 coarse:32", "asap", 0.0038, 0.0019, 1.0, 11.8, 35.6),
    ("asap source 3 coarse:32 gaussian", "asap", 0.0021, 0.0011, 1.0, 13.6, 34.1),
    ("asap source 1 sliced:32:random norm", "asap", 0.1645, 0.0912, 0.981, 12.1, 37.0),
    ("asap source 3 sliced:32:random norm", "asap", 0.0175, 0.0094, 0.999, 12.9, 35.2),
    ("lot 32", "lot", 0.281, 0.164, 0.975, 3.1, 7.2),
]
CHOSEN = "asap target 1 coarse:32"


def full_report() -> dict[str, Any]:
    """A regression: one of five checks is beyond its limit."""
    return {
        "format_version": 3,
        "model": {
            "source": "teachers/imdb", "capture": "whole", "data": "imdb/test.npz",
            "examples": 1000, "batch": 32,
            "output_rmse": 0.00614, "output_rel_l2": 0.0048, "max_abs_error": 0.0713,
            "logit_kl": 3.1e-5, "prediction_agreement": 0.999, "accuracy_teacher": 0.838,
            "accuracy_compiled": 0.837, "accuracy_drop": 0.001, "lossless_max_abs_error": 9.1e-6,
            "latency_teacher_ms": 1468.2, "latency_lossless_ms": 107.1, "latency_compiled_ms": 74.2,
            "speedup": 19.79, "speedup_lossless": 13.71, "fit_seconds": 8.81,
            "calibration_order": "parallel", "break_even_batches": 6.32,
            "confidence": {"prediction_agreement": [0.997, 1.0], "accuracy_teacher": [0.815, 0.86],
                           "accuracy_compiled": [0.814, 0.859], "accuracy_drop": [-0.001, 0.003],
                           "logit_kl": [1.9e-5, 4.6e-5], "output_rel_l2": [0.0044, 0.0053]},
            "confidence_level": 0.95,
        },
        "fingerprints": {"teacher": "9f2c" * 16, "data": "07ab" * 16},
        "sites": [_site(i, name) for i, name in enumerate(SITES)],
        "splits": {"calibration": 3500, "selection": 750, "gate": 1000},
        "selection": _selection(),
        "refused": [{"name": "pooler", "status": "left alone", "reason": "softmax attention: rows only"}],
        "environment": {"asapc": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "processor": "x86_64",
                        "cores": 2, "threads": 2, "device": "cpu"},
        "gate": {
            "verdict": "REGRESSION", "passed": False,
            "checks": [
                _check("limit", "prediction_agreement", "model", 0.999, "ACCEPT", min=0.998,
                       message="prediction_agreement of model is 0.999, within its limit (min 0.998)"),
                _check("limit", "accuracy_drop", "model", 0.001, "ACCEPT", max=0.005, confidence=True,
                       bound_value=0.003, message="accuracy_drop of model is 0.001; its 95 % upper "
                       "bound 0.003 is within the limit 0.005"),
                _check("limit", "attention_rel_l2", SITES[2], 0.0221, "REGRESSION", max=0.02,
                       message="attention_rel_l2 of layers.2.mha is 0.0221, beyond its limit (max 0.02)"),
                _check("limit", "speedup", "model", 19.79, "ACCEPT", min=10.0,
                       message="speedup of model is 19.79, within its limit (min 10)"),
                _check("baseline", "speedup", "model", 19.79, "ACCEPT", baseline=19.6, allowed=0.02,
                       message="speedup of model is 19.79, no worse than the baseline's 19.6"),
            ],
            "baseline": {"path": "baseline/report.json", "max_regression": 0.02,
                         "verdict": "ACCEPT", "compared": 1, "skipped": []},
        },
    }  # fmt: skip


def small_report() -> dict[str, Any]:
    """Every part of a report, with little in each: two layers, and what was tried at one of them."""
    report = full_report()
    site, left = report["sites"][0], {"name": "layers.1.mha", "operator": "teacher"}
    for part in ("by_length", "certificates"):
        site[part] = site[part][:1]
    site["by_head"] = {"attention_rel_l2": [0.01, 0.03]}
    report["sites"] = [site, left]
    tried, rounds = report["selection"]["sites"][0], report["selection"]["rounds"]
    report["selection"] |= {"sites": [{**tried, "candidates": tried["candidates"][4:5]}],
                            "rounds": rounds[1:]}  # fmt: skip
    report["warnings"] = [Shortage((SITES[0],), "examples", 3, 32).to_dict()]
    report["gate"] = {"verdict": None, "passed": True, "checks": [], "baseline": None}
    return report


def typed(document: dict[str, Any], pictures: Sequence[SitePictures] = ()) -> Report:
    return replace(Report.from_json(document, "report"), pictures=tuple(pictures))


def minimal_report() -> dict[str, Any]:
    return {"format_version": 3, "model": {"source": "x"}, "sites": [], "gate": {}}


def pictures() -> list[SitePictures]:
    """Balanced maps of 256, 173 and 61 tokens; the compiled ones a little off."""
    found = []
    for seed, name in enumerate(SITES):
        generator = torch.Generator().manual_seed(seed)
        collector = SitePictures(name)
        for count in (256, 173, 61):
            teacher = _balanced(count, generator)
            noise = 0.03 * torch.randn(1, 4, 1, count, generator=generator).cumsum(-1) / count**0.5
            collector.update(teacher, teacher * (1 + noise))
        found.append(collector)
    return found


def _balanced(count: int, generator: torch.Generator) -> torch.Tensor:
    """[1, 4, count, count] with sums of about 1: a diagonal band, a few blocks and noise."""
    place = torch.arange(count, dtype=torch.float64) / count
    scores = -60 * (place[:, None] - place[None, :]).square()
    scores = scores + 1.6 * torch.cos(9 * place)[:, None] * torch.cos(9 * place + 0.4)[None, :]
    scores = scores + 0.7 * torch.randn(1, 4, count, count, generator=generator, dtype=torch.float64)
    plan = scores.exp()
    for _ in range(6):
        plan = plan / plan.sum(-1, keepdim=True)
        plan = plan / plan.sum(-2, keepdim=True)
    return plan


def _by_length(error: float) -> list[dict[str, Any]]:
    bins = ((11, 96, 201, 0.6), (97, 139, 199, 0.9), (140, 188, 200, 1.1), (189, 255, 183, 1.2),
            (256, 256, 217, 1.2))  # fmt: skip
    return [
        {"low": low, "high": high, "examples": examples, "attention_rel_l2": error * factor}
        for low, high, examples, factor in bins
    ]


def _site(index: int, name: str) -> dict[str, Any]:
    error = (0.0167, 0.0142, 0.0221)[index]
    return {
        "name": name, "operator": "asap", "reason": "fastest inside the budget", "side": "target",
        "c_transforms": 1, "rescaled": True, "coefficients": "per_head", "features": ["coarse:32"],
        "pivots": None, "slices": None, "fit": "ls", "fit_converged": True, "replay_error": 3.4e-15,
        "convention": CONVENTION,
        "metrics": {
            "attention_rel_l2": error, "attention_rel_l2_worst": 4.3 * error,
            "output_rel_l2": error / 2, "row_err": 0.2941, "row_err_teacher": 0.2913,
            "col_err": 2.3e-7, "col_err_teacher": 2.3e-7, "plan_kl": 1.9e-4,
            "contraction_bound": 0.9987, "dual_stability": 2.41, "r2": 0.9968,
            "condition_number": 3.1e4,
        },
        "confidence": {"attention_rel_l2": [0.94 * error, 1.07 * error]},
        "by_head": {"attention_rel_l2": [error * f for f in (0.7, 1.2, 0.9, 1.6, 0.6, 1.1, 1.0, 0.9)]},
        "by_length": _by_length(error),
        "certificates": [
            {"name": "dual_stability", "source": "ASAP, Propositions B.8 and B.9", "bound": 2.41,
             "measured": 1.62, "holds": True, "cases": 8000, "vacuous": False},
            {"name": "kl_variance_bound", "source": "ASAP, Proposition B.10, Eq. B.53", "bound": 1.9e-4,
             "measured": 1.2e-4, "holds": True, "cases": 8000, "vacuous": False, "vacuous_cases": 0},
            {"name": "contraction_bound", "source": "Block-wise differentiable Sinkhorn attention, "
             "Proposition 4", "bound": 0.9987, "measured": 0.412, "holds": True, "cases": 8000,
             "vacuous": True, "vacuous_cases": 264},
        ],
    }  # fmt: skip


def _selection() -> dict[str, Any]:
    return {
        "objective": "latency", "budget": {"prediction_agreement": 0.998, "attention_rel_l2": 0.02},
        "examples": 750, "seconds": 21.4, "shapes": [[32, 128], [32, 256]],
        "sites": [{"name": name, "candidates": [_candidate(i, *row) for row in GRID]}
                  for i, name in enumerate(SITES)],
        "rounds": [
            {"budget": {"prediction_agreement": 0.998, "attention_rel_l2": 0.02},
             "choice": dict.fromkeys(SITES, "asap target 1 coarse:16"), "predicted_ms": 68.1,
             "measured": {"prediction_agreement": 0.9973, "attention_rel_l2": 0.0248},
             "verdict": "prediction_agreement 0.9973 < 0.998"},
            {"budget": {"prediction_agreement": 0.9985, "attention_rel_l2": 0.02},
             "choice": {**dict.fromkeys(SITES, CHOSEN), SITES[1]: CHOSEN}, "predicted_ms": 74.0,
             "measured": {"prediction_agreement": 0.9987, "attention_rel_l2": 0.0189},
             "verdict": "inside the budget"},
        ],
    }  # fmt: skip


def _candidate(
    index: int, label: str, operator: str, error: float | None, output: float | None,
    agreement: float, short: float, long: float,
) -> dict[str, Any]:  # fmt: skip
    scale = (1.0, 0.93, 1.08)[index]
    errors = [None if own is None else own * scale for own in (error, output)]
    verdict = "slower than asap target 1 coarse:32"
    if error is not None and error > 0.02:
        verdict = f"attention_rel_l2 {error * scale:.3g} > 0.02"
    if label == CHOSEN:
        verdict = "chosen"
    return {
        "label": label, "operator": operator, "attention_rel_l2": errors[0],
        "output_rel_l2": errors[1], "alone": {"prediction_agreement": agreement},
        "latency_ms": {"32x128": short * scale, "32x256": long * scale},
        "teacher_ms": {"32x128": 118.0 * scale, "32x256": 481.7 * scale},
        "speedup": {"32x256": [31.2, 34.9] if index else [0.97, 1.31]},
        "memory_mib": 12.0, "chosen": label == CHOSEN, "verdict": verdict,
    }  # fmt: skip


def _check(kind: str, metric: str, scope: str, value: float, verdict: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "metric": metric, "scope": scope, "value": value, "class": verdict,
            "passed": verdict == "ACCEPT", **more}  # fmt: skip


VOID = {"meta", "link", "img", "br", "wbr", "input"}


class Reader(HTMLParser):
    """Checks that tags close in order; collects tags, ids and the text of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def shown(text: str) -> str:
    """The text of a page; its tags close."""
    return " ".join(" ".join(Reader(text).text).split())
