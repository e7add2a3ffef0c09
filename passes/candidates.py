"""Candidates: what a site may become, from its convention, its recipe and what calibration fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asapc.calibration.checked import check_fit
from asapc.calibration.stored import AnySiteCalibration, Calibration, SiteCalibration
from asapc.calibration.students import refusal
from asapc.errors import InputError
from asapc.features.predictor import TransformPlan, transform_plan
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention, Kind
from asapc.operators.catalogue import OPERATORS, REPLACEMENTS
from asapc.passes.analyse import Site
from asapc.passes.rewrite import Hardened, Replacement

# Operators that are fitted to a Sinkhorn site's outputs, and the recipe's key for their size.
DISTILLED = {
    operator.name: operator.size
    for operator in OPERATORS.values()
    if operator.size and "sinkhorn" in operator.fitted_to
}
# A c-transform costs about a half-step: with so few of them the lossless loop is already as cheap. One is
# a softmax layer, which has no dual to predict, and becomes something else only where that is named.
FEW_HALF_STEPS = 5


@dataclass(frozen=True)
class Candidate:
    """label: tells it from the site's other candidates.  replacement: None for the lossless operator and
    for the teacher's own code.  fit: what calibration knows of it."""

    label: str
    operator: str
    replacement: Replacement | None = None
    fit: AnySiteCalibration | None = None


@dataclass(frozen=True)
class Choice:
    """The operator a site becomes, why, and its error on the selection split where it has one."""

    operator: str
    reason: str
    replacement: Replacement | None = None
    attention_rel_l2: float | None = None
    fit: AnySiteCalibration | None = None


def check_operator(convention: Kind, recipe: Recipe) -> None:
    """InputError if the site's recipe names an operator that this kind of site cannot become."""
    kind = convention.operator
    if recipe.operator not in ("auto", "lossless", kind, *REPLACEMENTS[kind]):
        raise InputError(
            f"recipe: a site of the kind {kind} can become {' or '.join((kind, *REPLACEMENTS[kind]))}",
            got=f"operator: {recipe.operator}",
            help="name sites of different kinds under `sites`, each with its own operator",
        )


def fits_needed(convention: Kind, recipe: Recipe) -> list[tuple[Recipe, TransformPlan | None]]:
    """What calibration has to fit for a site, from the site's recipe, each fit once.

    A plan is there where a dual is predicted. Alternatives that this convention has no plan for are left
    out: see why_no_fit. So are candidates of `auto` that it cannot become: see students.refusal.
    """
    # A bias that tells pairs apart does not tell which queries it hides, see features.clouds.clouds_of.
    if not isinstance(convention, Convention) or (convention.hides_queries and convention.bias):
        return []
    if recipe.operator == "auto" and 1 < convention.half_steps <= FEW_HALF_STEPS:
        return []
    found: list[tuple[Recipe, TransformPlan | None]] = []
    for alternative in recipe.alternatives():
        if alternative.operator in DISTILLED:
            settings = alternative.fit_settings()
            if convention.hides_queries:
                continue
            if recipe.operator == "auto" and refusal("", convention, settings) is not None:
                continue
            entry: tuple[Recipe, TransformPlan | None] = (alternative, None)
        elif alternative.operator == "asap":
            own = alternative.c_transforms, alternative.side, alternative.aim
            plan = transform_plan(convention, *own)
            if plan is None:
                continue
            entry = (alternative, plan)
        else:
            continue
        known = [(other.fit_settings(), plan) for other, plan in found]
        if (alternative.fit_settings(), entry[1]) not in known:
            found.append(entry)
    return found


def why_no_fit(recipe: Recipe, convention: Convention) -> str:
    """Why nothing is fitted: hidden queries, the parity of the ending, or too few half-steps."""
    if convention.hides_queries and (convention.bias or recipe.operator in DISTILLED):
        beside = " beside a score bias" if convention.bias else ""
        return f"padded queries are hidden{beside}, and what is fitted would count them"
    return (
        f"a {convention.last_side}-ending loop of {convention.half_steps} half-steps has no "
        f"{recipe.side} dual {recipe.c_transforms} or fewer c-transforms before its end"
    )


def candidates_of(site: Site, recipe: Recipe, calibration: Calibration) -> list[Candidate]:
    """The approximations of one site that calibration has fitted, in the recipe's order.

    Raises InputError where compile asks for a fit that calibrate did not make, and where the tensors of
    one do not fit the site.
    """
    name, convention = site.name, site.convention
    found = []
    for alternative, plan in fits_needed(convention, recipe):
        fit = calibration.fit_of(name, alternative.fit_settings(), plan)
        if fit is None or (fit.convention != convention and not _alike(fit.convention, convention)):
            fits = calibration.sites.get(name, ())
            raise InputError(
                f"calibration: {name} {_problem(alternative, plan, fits, fit)}",
                help="run `asapc calibrate` with the recipe that you pass to compile",
            )
        place = next(i for i, other in enumerate(calibration.sites[name]) if other is fit)
        try:
            sizes = (site.heads, site.head_dim, site.value_dim)
            check_fit(f"{name}.{place}", fit.replacement, *sizes)
        except InputError as error:
            raise InputError(
                f"calibration: {error.rule}",
                got=error.got,
                help="run `asapc calibrate` on this model",
            ) from error
        found.append(Candidate(alternative.label(), alternative.operator, fit.replacement, fit))
    return found


def _alike(first: Convention, second: Kind) -> bool:
    """The same loop, with a scale that was found twice by experiment."""
    if not isinstance(second, Convention):
        return False
    close = abs(first.score_multiplier - second.score_multiplier) <= 1e-6 * abs(second.score_multiplier)
    return close and (first.half_steps, first.first_side, first.mask, first.bias, first.stabiliser) == (
        second.half_steps, second.first_side, second.mask, second.bias, second.stabiliser,
    )  # fmt: skip


def _problem(
    recipe: Recipe, plan: TransformPlan | None, fits: Sequence[AnySiteCalibration],
    found: AnySiteCalibration | None,
) -> str:  # fmt: skip
    """How the nearest fit differs from what is asked for."""
    if found is not None:
        return "was fitted on another convention"
    wanted = recipe.fit_settings()
    alike = [fit for fit in fits if fit.settings.get("operator") == recipe.operator]
    if not alike:
        return f"was not fitted as `{recipe.label()}`"
    then = min(alike, key=lambda fit: sum(fit.settings.get(k) != v for k, v in wanted.items()))
    if isinstance(then, SiteCalibration) and (
        then.amortised.plan != plan or then.settings.get("features") != wanted["features"]
    ):
        was = then.amortised.plan
        return (
            f"was fitted for {was.c_transforms} c-transforms of the {was.side} dual on "
            f"{', '.join(then.features)}, `aim: {was.aim}`"
        )
    differing = next((key for key, value in wanted.items() if then.settings.get(key) != value), None)
    verb = "fitted" if recipe.operator == "asap" else "distilled"
    return f"was {verb} with `{differing}: {then.settings.get(str(differing))}`"


def proposed(convention: Kind, recipe: Recipe) -> Choice | None:
    """What needs no measurement: a named lossless operator, or exact instead of soft sorting, which is
    settled for the whole model afterwards; None where the selection decides."""
    exact = convention.operator
    if recipe.operator in ("lossless", exact):
        return Choice(exact, "the recipe asks for it")
    if exact == "esp_soft":
        forced = recipe.operator == "esp_hard"
        return Choice("esp_hard", "the recipe asks for it" if forced else "exact sorting", Hardened())
    return None
