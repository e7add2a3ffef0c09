"""Whether fits rest on enough data: examples by their number, regression rows by their coefficients.

Neither limit is a proof; each says from where on a fit's own figures, which are of the examples that it
was made on, begin to mislead.

EXAMPLES: rows of one example are not independent, so examples are counted too. A new example is further
out than every one of n seen, to one side or the other of any figure, with a chance of 2 / (n + 1): 6 % at
32. Slices and pivots are made from as many (pipeline.SAMPLE_EXAMPLES).
ROWS: least squares with F coefficients on n independent rows leaves a share 1 - F/n of the noise in its
own rows and 1 + F/n in new ones; at n = 20 F the first flatters by a tenth. Counted for each head where
heads have coefficients of their own, over heads or sites where they share them. A distilled operator's
figures are of held-out examples, so it is held to the number of examples alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asapc.formats.calibration import AnySiteCalibration, SiteCalibration

EXAMPLES = 32
ROWS = 20  # for each coefficient

Fits = Mapping[str, Sequence[AnySiteCalibration]]


@dataclass(frozen=True)
class Shortage:
    """Fits of some sites that rest on `given` examples or regression rows where `needed` are wanted."""

    sites: tuple[str, ...]
    of: Literal["examples", "rows"]
    given: int
    needed: int

    @property
    def text(self) -> str:
        count = len(self.sites)
        who = self.sites[0] if count == 1 else f"{self.sites[0]} and {count - 1} more"
        what = f"{self.given} example{'' if self.given == 1 else 's'}"
        wanted = f"at least {self.needed} are needed"
        if self.of == "rows":
            coefficients = self.needed // ROWS
            what = f"{self.given} regression rows for {coefficients} coefficients"
            wanted += f", {ROWS} for each"
        remedy = "give more data, of which 70 % is fitted on, or raise max_examples"
        return f"{who}: fitted on {what}, and {wanted}; {remedy}"

    def to_dict(self) -> dict[str, Any]:
        """As calibration.json, manifest.json and report.json have it."""
        return {
            "sites": list(self.sites), "of": self.of, "given": self.given, "needed": self.needed,
            "text": self.text,
        }  # fmt: skip


def shortages(fits: Fits, chosen: Sequence[AnySiteCalibration] | None = None) -> list[Shortage]:
    """Of every fit, or of those `chosen` among them; sites that lack the same are told together."""
    found: dict[tuple[Literal["examples", "rows"], int, int], dict[str, None]] = {}
    for name, own in fits.items():
        for fit in own:
            if chosen is not None and not any(fit is other for other in chosen):
                continue
            for lack in _lacks(fit, fits):
                found.setdefault(lack, {})[name] = None
    return [Shortage(tuple(sites), *lack) for lack, sites in found.items()]


def _lacks(
    fit: AnySiteCalibration, fits: Fits
) -> Iterator[tuple[Literal["examples", "rows"], int, int]]:
    examples = fit.examples
    if isinstance(fit, SiteCalibration):
        kept = [own.kl_examples for own in fit.quality if own.kl_examples is not None]
        if fit.sharing != "shared":  # of a KL fit; shared, they are those of every site together
            examples = min([examples, *kept])
    if examples < EXAMPLES:
        yield "examples", examples, EXAMPLES
    if not isinstance(fit, SiteCalibration):
        return
    columns = max(predictor.coefficients.shape[1] for predictor in fit.amortised.predictors)
    together = [fit] if fit.sharing != "shared" else _sharing(fit, fits)
    rows = sum(own.tokens // len(own.amortised.predictors) for own in together)
    if rows < ROWS * columns:
        yield "rows", rows, ROWS * columns


def _sharing(fit: SiteCalibration, fits: Fits) -> list[SiteCalibration]:
    """The fits that have their coefficients in common with this one, itself among them."""
    return [
        own
        for others in fits.values()
        for own in others
        if isinstance(own, SiteCalibration) and dict(own.settings) == dict(fit.settings)
    ]
