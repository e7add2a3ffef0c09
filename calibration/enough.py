"""Whether a fit rests on enough data: enough examples, and enough regression rows for its coefficients.

Neither limit is a proof. Each marks the point below which a fit's own figures, measured on the examples
it was made from, begin to mislead.

EXAMPLES: rows of the same example are not independent, so examples are counted as well. The chance that
a new example lies outside the range of the n examples seen, in any one figure, is 2 / (n + 1): 6 % at
n = 32. Slices and pivots are made from the same number (pipeline.SAMPLE_EXAMPLES).
ROWS: least squares with F coefficients on n independent rows leaves a share 1 - F/n of the noise in those
rows, and 1 + F/n in new ones; at n = 20 F its own figures are a tenth too good. Rows are counted per head
where each head has coefficients of its own, and over all heads or sites that share them. The figures of a
distilled operator come from held-out examples, so only the number of examples matters for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asapc.calibration.stored import AnySiteCalibration, SiteCalibration

EXAMPLES = 32
ROWS = 20  # for each coefficient

Fits = Mapping[str, Sequence[AnySiteCalibration]]


@dataclass(frozen=True)
class Shortage:
    """Sites whose fits rest on `given` examples or regression rows, where `needed` are required."""

    sites: tuple[str, ...]
    of: Literal["examples", "rows"]
    given: int
    needed: int

    @property
    def text(self) -> str:
        others = len(self.sites) - 1
        who = self.sites[0]
        if others:
            who += f" and {others} other site{'s' if others > 1 else ''}"
        what = f"{self.given} example{'' if self.given == 1 else 's'}"
        per = ""
        if self.of == "rows":
            what = f"{self.given} regression rows for {self.needed // ROWS} coefficients"
            per = f" ({ROWS} per coefficient)"
        return (
            f"{who}: fitted on only {what}; at least {self.needed} are needed{per}. "
            "Provide more data, 70 % of which is used for fitting, or raise max_examples"
        )

    def to_dict(self) -> dict[str, Any]:
        """As it stands in calibration.json, manifest.json and report.json."""
        return {
            "sites": list(self.sites), "of": self.of, "given": self.given, "needed": self.needed,
            "text": self.text,
        }  # fmt: skip


def shortages(fits: Fits, chosen: Sequence[AnySiteCalibration] | None = None) -> list[Shortage]:
    """Those of all fits, or only of the `chosen` ones; sites that lack the same share one entry."""
    sites_by_lack: dict[tuple[Literal["examples", "rows"], int, int], dict[str, None]] = {}
    for name, site_fits in fits.items():
        for fit in site_fits:
            if chosen is not None and not any(fit is other for other in chosen):
                continue
            for lack in _lacks(fit, fits):
                sites_by_lack.setdefault(lack, {})[name] = None
    return [Shortage(tuple(sites), *lack) for lack, sites in sites_by_lack.items()]


def _lacks(fit: AnySiteCalibration, fits: Fits) -> Iterator[tuple[Literal["examples", "rows"], int, int]]:
    examples = fit.examples
    if isinstance(fit, SiteCalibration):
        kept = [quality.kl_examples for quality in fit.quality if quality.kl_examples is not None]
        if fit.sharing != "shared":  # a shared KL fit counts the examples of all its sites together
            examples = min([examples, *kept])
    if examples < EXAMPLES:
        yield "examples", examples, EXAMPLES
    if not isinstance(fit, SiteCalibration):
        return
    columns = max(predictor.coefficients.shape[1] for predictor in fit.amortised.predictors)
    together = [fit]
    if fit.sharing == "shared":  # all that have these coefficients
        every = [x for others in fits.values() for x in others if isinstance(x, SiteCalibration)]
        together = [x for x in every if dict(x.settings) == dict(fit.settings)]
    rows = sum(member.tokens // len(member.amortised.predictors) for member in together)
    if rows < ROWS * columns:
        yield "rows", rows, ROWS * columns
