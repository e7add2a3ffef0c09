"""Select: the cheapest candidate of every site inside the budget, proven on the whole model.

    measure   every candidate's errors and price at its site
    shortcut  the cheapest that is left at every site, where the whole model keeps its budget with it
    alone     otherwise what the model does with each candidate alone
    solve     the cheapest set whose damages add up to the budget (passes.solve)
    verify    the whole model with that set; while it exceeds the budget, tighten and solve again, then
              turn the most damaging sites back, one by one: to the lossless operator, at last the teacher

Everything is measured on the selection split, against the lossless model, which reproduces the teacher.
A candidate that is slower at any of the required shapes than the teacher's loop in plain PyTorch is never
chosen, nor is an approximation that is hardly cheaper than the exact operator; the whole model is timed
against the teacher's own code on the largest batch. A recipe that names an operator gets it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from asapc.calibration.collect import pieces
from asapc.calibration.stored import AnySiteCalibration, Calibration
from asapc.device import CPU, described, moved
from asapc.errors import InputError
from asapc.features.predictor import Amortised
from asapc.inputs.data import Batch
from asapc.inputs.recipe import DEFAULT_BUDGET, Recipe
from asapc.ir import Convention, Distilled, Program, SiteTensors
from asapc.measure.differences import comparable
from asapc.measure.fidelity import AttentionFidelity, OutputFidelity, TensorFidelity
from asapc.measure.timing import quartiles
from asapc.metrics import BUDGET_BOUNDS, MAP_EXAMPLES
from asapc.operators.catalogue import TEACHER
from asapc.operators.sinkhorn import clean_values
from asapc.passes.analyse import Analysis, Site
from asapc.passes.audit import settle_exact_sorting
from asapc.passes.candidates import (
    FEW_HALF_STEPS,
    Candidate,
    Choice,
    candidates_of,
    check_operator,
    fits_needed,
    proposed,
    why_no_fit,
)
from asapc.passes.price import Apply, Price, Shape, prices, shapes_of, timed
from asapc.passes.rewrite import Replacement
from asapc.passes.solve import Option, cheapest
from asapc.program.apply import apply_lossless, apply_replacement, beyond_map
from asapc.program.calls import site_function
from asapc.program.runner import Runner, Tap
from asapc.terminal.progress import Progress

WORTHWHILE = 1.1  # an approximation must be this much cheaper than the exact operator to be picked
TIGHTENED = 0.8  # of the budget that a set exceeded, or of what it was predicted to use
MAX_ROUNDS = 8  # of solving again, before sites are turned back one by one
EXCEEDS = "exceeds the budget"
GAINS_TOO_LITTLE = "gains too little"  # in a manifest, which has no times
SLOWER_MODEL = "the whole model is slower than the teacher with it"


@dataclass(eq=False)
class Tried:
    """A candidate at its site and what was measured of it; verdict: why it is out, empty if it is not.

    attention, output: against the exact operator, of which `errors` are read.
    """

    candidate: Candidate
    attention: AttentionFidelity = field(default_factory=AttentionFidelity)
    output: TensorFidelity = field(default_factory=TensorFidelity)
    errors: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    price: Price | None = None
    verdict: str = ""

    @property
    def approximate(self) -> bool:
        return self.candidate.replacement is not None


@dataclass
class OpenSite:
    """A site that the selection decides: the exact operator first, then approximations."""

    index: int
    site: Site
    recipe: Recipe
    budget: Mapping[str, float]
    tried: list[Tried]
    teacher: Price | None = None

    @property
    def forced(self) -> bool:
        return self.recipe.operator != "auto" or self.ends_early

    @property
    def ends_early(self) -> bool:
        """Whether no program can hold the teacher's own code, as where it ends is up to the data."""
        return getattr(self.site.convention, "ending", None) is not None


@dataclass(frozen=True)
class Selection:
    """choices: by site.  hashes: of the examples that were looked at.  trail: what was tried and why it
    lost, in JSON types.  switch: what became of soft sorts that might be exact, likewise."""

    choices: Mapping[str, Choice]
    hashes: Sequence[int]
    trail: Mapping[str, Any]
    switch: Mapping[str, Any] | None

    @property
    def fits(self) -> list[AnySiteCalibration]:
        return [choice.fit for choice in self.choices.values() if choice.fit is not None]

    @property
    def becomes(self) -> dict[str, Replacement | None]:
        """As Analysis.rewritten takes it."""
        return {
            name: choice.replacement for name, choice in self.choices.items()
            if choice.replacement is not None or choice.operator == TEACHER
        }  # fmt: skip


def select(
    analysis: Analysis,
    recipe: Recipe,
    calibration: Calibration,
    batches: Sequence[Batch],
    progress: Progress,
) -> Selection:
    """The choice for every site, with exact sorting where that is allowed, and the trail of the decision.

    batches: the selection split.  Raises InputError where a site cannot become what the recipe names,
    where calibration lacks a fit, and where a metric of the budget cannot be measured.
    """
    start = time.perf_counter()
    choices: dict[str, Choice] = {}
    sites: list[OpenSite] = []
    for index, site in enumerate(analysis.sites):
        site_recipe = recipe.for_site(site.name)
        check_operator(site.convention, site_recipe)
        choice = proposed(site.convention, site_recipe)
        if choice is not None:
            choices[site.name] = choice
        else:
            sites.append(_opened(index, site, site_recipe, recipe, calibration))
    largest, first, exact = _measure_sites(analysis, sites, batches, progress)
    shapes = _measure_prices(analysis, sites, first, recipe, progress) if batches else {}
    _rule_out(sites, recipe.objective, analysis.drop_maps)
    model = WholeModel(analysis, batches, recipe, exact)
    search = Search(model, sites, recipe.objective)
    picked = search.cheapest_everywhere(progress)
    if picked is None:
        search.measure_alone(progress)
        picked = search.solved()
    if largest is not None and picked and not all(opened.forced for opened in sites):
        with progress.phase("timing the whole model"):
            picked = search.not_slower(picked, largest)
    choices |= {
        opened.site.name: Choice(
            tried.candidate.operator, _reason(opened, tried), tried.candidate.replacement,
            tried.errors.get("attention_rel_l2"), tried.candidate.fit,
        ) for opened, tried in zip(sites, picked, strict=True)
    }  # fmt: skip
    held = {"attention_rel_l2", *model.limits}  # the default also limits what a model may lack
    trail = {
        "objective": recipe.objective,
        "budget": {key: recipe.budget[key] for key in recipe.budget if key in held},
        "examples": sum(map(len, batches)),
        "seconds": time.perf_counter() - start,
        "device": described(batches[0].device if batches else CPU),
        "shapes": [list(shape) for shape in dict.fromkeys(chain.from_iterable(shapes.values()))],
        "sites": [_trail(opened, t) for opened, t in zip(sites, picked, strict=True)],
        "rounds": search.rounds,
    }
    settled, switch = _settled(model, recipe, {name: choices[name] for name in analysis.names})
    hashes = [content for batch in batches for content in batch.hashes]
    return Selection(settled, hashes, trail, switch)


def _opened(
    index: int, site: Site, site_recipe: Recipe, recipe: Recipe, calibration: Calibration
) -> OpenSite:
    exact = site.convention.operator
    fitted = [Tried(c) for c in candidates_of(site, site_recipe, calibration)]
    if site_recipe.operator != "auto":
        if not fitted:
            assert isinstance(site.convention, Convention)
            reason = f"no dual can be predicted: {why_no_fit(site_recipe, site.convention)}"
            fitted = [Tried(Candidate(exact, exact), verdict=reason)]
        return OpenSite(index, site, site_recipe, {}, fitted)
    tried = [Tried(Candidate(exact, exact)), *fitted]
    return OpenSite(index, site, site_recipe, recipe.site_budget(site.name), tried)


# Measuring


def _measure_sites(
    analysis: Analysis, sites: Sequence[OpenSite], batches: Sequence[Batch], progress: Progress
) -> tuple[Batch | None, list[SiteTensors], list[Any]]:
    """Errors of every approximation behind the teacher's layers; returns the largest of the batches
    looked at, what the sites see on it, and the lossless model's outputs on each."""
    if not batches:
        return None, [], []
    tap = Tap(analysis.model, analysis.lifted, analysis.names)
    approximate = [t for opened in sites for t in opened.tried if t.approximate]
    largest, first = batches[0], list[SiteTensors]()
    outputs: list[Any] = []
    examples = 0
    for batch in progress.track(batches, "selection split", len(batches)):
        if examples and (not approximate or examples >= MAP_EXAMPLES):
            break
        output, tensors = tap(batch)
        outputs.append(comparable(output))
        if sum(t.q.numel() for t in tensors) > sum(t.q.numel() for t in first):
            largest, first = batch, tensors
        for opened in sites:
            tried = [t for t in opened.tried if t.approximate]
            for piece in pieces(tensors[opened.index]) if tried else []:
                _compare(opened.site.loop, tried, piece)
        examples += len(batch)
    for t in approximate:
        metrics = t.attention.metrics() | t.output.metrics()
        t.errors = {key: metrics.get(key, math.inf) for key in ("attention_rel_l2", "output_rel_l2")}
    return largest, first, outputs


def _compare(convention: Convention, tried: Sequence[Tried], t: SiteTensors) -> None:
    values = clean_values(t.k if t.v is None else t.v, t.keep)
    with torch.no_grad():
        exact = apply_lossless(convention, t, None)
        for entry in tried:
            replacement = moved(entry.candidate.replacement, t.q.device)
            assert isinstance(replacement, Amortised | Distilled)
            approximate = apply_replacement(convention, replacement, t, None)
            entry.attention.update(exact, approximate, t.keep)
            applied = approximate @ values
            if beyond_map(replacement):
                applied = apply_replacement(convention, replacement, t, values)
            entry.output.update(exact @ values, applied)


class WholeModel:
    """The whole model on the selection split, whatever its sites become, against the lossless one."""

    def __init__(
        self, analysis: Analysis, batches: Sequence[Batch], recipe: Recipe, exact: Sequence[Any] = ()
    ) -> None:
        """exact: the lossless model's outputs on the first of the batches, where they are known."""
        self.analysis, self.batches = analysis, batches
        lossless = Runner(analysis.model, analysis.lifted)
        self.exact = [*exact, *(comparable(lossless(batch)) for batch in batches[len(exact) :])]
        self._known: list[tuple[Mapping[str, Replacement], dict[str, float]]] = []
        self.limits = self._limits(recipe)

    def _limits(self, recipe: Recipe) -> dict[str, float]:
        """The budget of the whole model, as far as this model has what it limits."""
        limits = {key: limit for key, limit in recipe.budget.items() if key != "attention_rel_l2"}
        of_sites = set[str]().union(*(settings.get("budget", {}) for settings in recipe.sites.values()))
        asked = (set(limits) | of_sites) - {"attention_rel_l2"}
        if not self.batches or not asked:
            return limits
        there = self._metrics(self.exact)
        for key in sorted(asked - set(there)):
            if recipe.budget == DEFAULT_BUDGET and key in DEFAULT_BUDGET and key not in of_sites:
                del limits[key]  # not asked for: a model without classes has nothing to agree on
                continue
            lacks = "no output [B, classes]"
            if key == "accuracy_drop" and "prediction_agreement" in there:
                lacks = "no labels"
            raise InputError(f"recipe: budget: {key} cannot be measured here", got=lacks)
        return limits

    def _metrics(self, outputs: Iterable[Any]) -> dict[str, float]:
        fidelity = OutputFidelity()
        for batch, exact, output in zip(self.batches, self.exact, outputs, strict=True):
            fidelity.update(exact, output, batch.labels)
        return fidelity.metrics()

    def excess(self, replacements: Mapping[str, Replacement]) -> str:
        """What of the budget the model exceeds with these sites replaced, in words; empty if nothing."""
        return _excess(self.measure(replacements), self.limits) if self.limits else ""

    def measure(self, replacements: Mapping[str, Replacement]) -> dict[str, float]:
        """Metrics of the model with these sites replaced; the same set is run once."""
        if not replacements:
            return self._metrics(self.exact)
        for known, metrics in self._known:
            if known.keys() == replacements.keys() and all(known[i] is replacements[i] for i in known):
                return metrics
        metrics = self.of_programs(self.analysis.rewritten(replacements))
        self._known.append((replacements, metrics))
        return metrics

    def of_programs(self, programs: Sequence[Program]) -> dict[str, float]:
        """Metrics of the model with these programs."""
        runner = Runner(self.analysis.model, programs)
        return self._metrics(comparable(runner(batch)) for batch in self.batches)


def _measure_prices(
    analysis: Analysis,
    sites: Sequence[OpenSite],
    first: Sequence[SiteTensors],
    recipe: Recipe,
    progress: Progress,
) -> dict[int, list[Shape]]:
    """Prices of what the sites may become; sites alike in all that a price depends on share them."""
    shapes: dict[int, list[Shape]] = {}
    known: dict[Any, dict[str, Price]] = {}
    batch = min(recipe.batch_size, first[0].q.shape[0]) if first else 0
    timed = [opened for opened in sites if not opened.forced]
    for opened in progress.track(timed, "timing candidates", len(timed)) if timed else ():
        t = first[opened.index]
        shapes[opened.index] = shapes_of(t, recipe.shapes, batch)
        _check_one_length(opened, t, shapes[opened.index])
        calls = _calls(analysis, opened, t.q.device)
        layout = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in vars(t).values())
        key = (repr(opened.site.convention.to_json()), layout, *calls)
        if key not in known:
            memory = recipe.objective == "memory"
            known[key] = prices(calls, t, shapes[opened.index], memory=memory)
        opened.teacher = known[key][TEACHER]
        for tried in opened.tried:
            tried.price = known[key][tried.candidate.label]
    return shapes


def _check_one_length(opened: OpenSite, t: SiteTensors, shapes: Sequence[Shape]) -> None:
    tokens = t.q.shape[2]
    for tried in opened.tried:
        features = getattr(tried.candidate.fit, "features", ())
        if "token_bias" in features and any(shape[1] != tokens for shape in shapes):
            raise InputError(
                f"recipe: shapes: {tried.candidate.label} holds for sequences of one length",
                got=f"{_text(next(s for s in shapes if s[1] != tokens))}, fitted on {tokens} tokens",
                help="leave out `shapes`, or token_bias",
            )


def _calls(analysis: Analysis, opened: OpenSite, device: torch.device) -> dict[str, Apply]:
    lifted, name = analysis.lifted, opened.site.name
    calls: dict[str, Apply] = {TEACHER: site_function(lifted, name, plain=True)}
    for tried in opened.tried:
        replacement = moved(tried.candidate.replacement, device)
        if replacement is None:
            calls[tried.candidate.label] = site_function(lifted, name)
        else:
            assert isinstance(replacement, Amortised | Distilled)
            calls[tried.candidate.label] = partial(apply_replacement, opened.site.loop, replacement)
    return calls


# Deciding


def _of_site(budget: Mapping[str, float]) -> dict[str, float]:
    return {k: v for k, v in budget.items() if k == "attention_rel_l2"}


def _of_model(budget: Mapping[str, float]) -> dict[str, float]:
    return {k: v for k, v in budget.items() if k != "attention_rel_l2"}


def _excess(metrics: Mapping[str, float], budget: Mapping[str, float]) -> str:
    """The first limit that is not kept, in words; empty where all are."""
    for key, limit in budget.items():
        value = metrics[key]
        if not (value <= limit if BUDGET_BOUNDS[key] == "max" else value >= limit):
            sign = ">" if BUDGET_BOUNDS[key] == "max" else "<"
            return f"{key} {value:.4g} {sign} {limit:g}"
    return ""


def _rule_out(sites: Sequence[OpenSite], objective: str, drop_maps: bool) -> None:
    """Verdicts on candidates that cannot be chosen, whatever the model does with them.

    drop_maps: the teacher's own code is no choice, since it computes the maps that are to be dropped.
    """
    for opened in sites:
        if opened.forced or opened.teacher is None:
            continue
        exact = opened.tried[0]
        for tried in opened.tried:
            assert tried.price is not None
            slower = tried.price.slower_than(opened.teacher)
            beyond = _excess(tried.errors, _of_site(opened.budget)) if tried.approximate else ""
            if beyond:
                tried.verdict = f"{EXCEEDS}: {beyond}"
            elif slower is not None and (tried.approximate or not drop_maps):
                took = f"{tried.price.median[slower]:.3g} ms, not {opened.teacher.median[slower]:.3g} ms"
                tried.verdict = f"slower than the teacher at {_text(slower)}: {took}"
            elif tried.approximate:
                tried.verdict = _hardly_cheaper(tried, exact, objective)
        if exact.verdict:  # nothing exact beats the teacher's own code
            left = Tried(Candidate(TEACHER, TEACHER), price=opened.teacher)
            opened.tried.insert(0, left)


def _hardly_cheaper(tried: Tried, exact: Tried, objective: str) -> str:
    exact_cost, cost = _cost(exact, objective), _cost(tried, objective)
    if exact_cost >= WORTHWHILE * cost:
        return ""
    gain = exact_cost / cost if cost else math.inf
    what = "as fast" if objective == "latency" else "as small"
    return f"{gain:.2f} x {what} as the exact operator; at least {WORTHWHILE:g} x is needed"


def _cost(tried: Tried, objective: str) -> float:
    assert tried.price is not None
    if objective == "latency":
        return tried.price.milliseconds
    if tried.price.mib is None:
        raise InputError(
            "recipe: objective: memory needs a system that tells how much a process holds",
            help="on other systems than Linux choose `objective: latency`",
        )
    return tried.price.mib


def _damage(key: str, value: float) -> float:
    """How far a metric is from harmless; these are taken to add up over sites. inf: not a number."""
    distance = 1 - value if BUDGET_BOUNDS[key] == "min" else value
    return math.inf if math.isnan(distance) else max(0.0, distance)


@dataclass
class Search:
    """For what every site becomes: one of its `tried`, in the order of the sites.

    rounds: every set that was verified on the whole model, in JSON types.
    """

    model: WholeModel
    sites: Sequence[OpenSite]
    objective: str
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @property
    def room(self) -> dict[str, float]:
        """The damage that the whole model's budget allows."""
        return {key: _damage(key, limit) for key, limit in self.model.limits.items()}

    def cheapest_everywhere(self, progress: Progress) -> list[Tried] | None:
        """The cheapest candidate that is left at every site, where the whole model is inside its budget
        with them: no set is cheaper, and one pass tells, where one a candidate would. None where it is
        not."""
        asking = self._asking()
        limited = any(_of_model(opened.budget) for opened, _ in asking)
        if len(asking) < 2 or not self.model.limits or limited:
            return None
        picked = [
            opened.tried[0] if opened.forced else min(
                (t for t in opened.tried if not t.verdict), key=lambda t: _cost(t, self.objective)
            )
            for opened in self.sites
        ]  # fmt: skip
        with progress.phase("the cheapest operators together"):
            return picked if self._verified(picked, self.room) else None

    def _asking(self) -> list[tuple[OpenSite, Tried]]:
        """Approximations that are still in, where the budget limits what the model does."""
        return [
            (opened, t) for opened in self.sites for t in opened.tried
            if t.approximate and not opened.forced and not t.verdict
            and (self.model.limits or _of_model(opened.budget))
            and not _excess(t.errors, _of_site(opened.budget))
        ]  # fmt: skip

    def measure_alone(self, progress: Progress) -> None:
        """What the model does with one approximation alone, where the budget asks: a pass over the
        selection split for each, which those that are out already are spared."""
        asking = self._asking()
        for opened, t in progress.track(asking, "one site at a time", len(asking)) if asking else ():
            assert t.candidate.replacement is not None
            t.alone = self.model.measure({opened.site.name: t.candidate.replacement})
            beyond = _excess(t.alone, _of_model(opened.budget))
            t.verdict = f"{EXCEEDS}: with this site alone {beyond}" if beyond else ""

    def solved(self) -> list[Tried]:
        """The cheapest set inside the budget."""
        free = [opened for opened in self.sites if not opened.forced]
        if not free or any(opened.teacher is None for opened in free):
            return [opened.tried[0] for opened in self.sites]
        limits = self.room
        picked: list[Tried] = []
        for _ in range(MAX_ROUNDS):
            options = [self._options(opened, limits) for opened in self.sites]
            places = cheapest(options, list(limits.values()))
            assert places is not None, "the exact operators are always inside the budget"
            solution = [opened.tried[i] for opened, i in zip(self.sites, places, strict=True)]
            if solution == picked:
                break
            picked = solution
            if self._verified(picked, limits):
                return picked
            measured = self.rounds[-1]["measured"]
            for key, limit in limits.items():
                used = sum(_damage(key, t.alone[key]) for t in picked if t.alone)
                if _excess(measured, {key: self.model.limits[key]}):
                    limits[key] = TIGHTENED * min(limit, used)
        while self._free_to_turn(picked):
            harmful = max(self._free_to_turn(picked), key=lambda i: _harm(picked[i], self.model.limits))
            picked[harmful] = self.sites[harmful].tried[0]
            if self._verified(picked, limits):
                break
        return picked

    def _free_to_turn(self, picked: Sequence[Tried]) -> list[int]:
        """Places of approximations that nobody has asked for."""
        pairs = enumerate(zip(self.sites, picked, strict=True))
        return [i for i, (opened, t) in pairs if t.approximate and not opened.forced]

    def _options(self, opened: OpenSite, limits: Mapping[str, float]) -> list[Option]:
        nothing = (0.0,) * len(limits)
        if opened.forced:
            return [Option(0.0, nothing)]
        return [
            Option(math.inf, nothing) if t.verdict else Option(_cost(t, self.objective), tuple(
                _damage(key, t.alone[key]) for key in limits) if t.approximate else nothing)
            for t in opened.tried
        ]  # fmt: skip

    def _replacements(self, picked: Sequence[Tried]) -> dict[str, Replacement]:
        pairs = zip(self.sites, (t.candidate.replacement for t in picked), strict=True)
        return {opened.site.name: replacement for opened, replacement in pairs if replacement is not None}

    def _verified(self, picked: Sequence[Tried], limits: Mapping[str, float]) -> bool:
        """Whether the whole model with this set is inside its budget; a round of its own."""
        measured = self.model.measure(self._replacements(picked)) if self.model.limits else {}
        beyond = _excess(measured, self.model.limits)
        costs = [_cost(t, self.objective) for t in picked if t.price is not None]
        names = [opened.site.name for opened in self.sites]
        choice = {name: t.candidate.label for name, t in zip(names, picked, strict=True)}
        if self.rounds and self.rounds[-1]["choice"] == choice:
            self.rounds.pop()  # the cheapest set of all, which was measured first
        self.rounds.append({
            "budget": {key: 1 - x if BUDGET_BOUNDS[key] == "min" else x for key, x in limits.items()},
            "choice": choice,
            "predicted_ms" if self.objective == "latency" else "predicted_mib": sum(costs),
            "measured": {key: measured[key] for key in self.model.limits},
            "verdict": beyond or "inside the budget",
        })  # fmt: skip
        return not beyond

    def not_slower(self, picked: list[Tried], batch: Batch) -> list[Tried]:
        """The set; exact operators at the free sites where the whole model is slower with it than with
        the teacher's code there, and the teacher's code where the exact operators are slower too."""
        if self._faster_than_teacher(picked, batch):
            return picked
        exact = [*picked]
        for i in self._free_to_turn(picked):
            picked[i].verdict = SLOWER_MODEL
            exact[i] = self.sites[i].tried[0]
        if exact != picked:
            self._verified(exact, self.room)  # a round of its own, with its own times
            if self._faster_than_teacher(exact, batch):
                return exact
        if self.model.analysis.drop_maps:
            return exact
        for i, opened in enumerate(self.sites):
            if not opened.forced and exact[i].candidate.operator != TEACHER:
                exact[i].verdict = SLOWER_MODEL
                exact[i] = Tried(Candidate(TEACHER, TEACHER), price=opened.teacher)
                opened.tried.insert(0, exact[i])
        return exact

    def _faster_than_teacher(self, picked: Sequence[Tried], batch: Batch) -> bool:
        """Whether it is slower on one batch by at most the measurement's spread; noted in the last round.

        The teacher here has its own code at every site that is free to choose, and what was asked for at
        the others.
        """
        analysis = self.model.analysis
        replacements = self._replacements(picked)
        free = [opened.site.name for opened in self.sites if not opened.forced]
        kept = [
            opened.site.name for opened, t in zip(self.sites, picked, strict=True)
            if t.candidate.operator == TEACHER
        ]  # fmt: skip
        becomes = {
            "teacher": {**replacements, **dict.fromkeys(free)},
            "compiled": {**replacements, **dict.fromkeys(kept)},
        }
        calls = {
            name: partial(Runner(analysis.model, analysis.rewritten(what)), batch)
            for name, what in becomes.items()
        }
        times = {name: quartiles(rounds) for name, rounds in timed(calls, repeats=5).items()}
        self.rounds[-1]["whole_model"] = {f"{name}_ms": time["median_ms"] for name, time in times.items()}
        slower = times["compiled"]["q1"] > times["teacher"]["q3"]
        if slower:
            self.rounds[-1]["verdict"] = SLOWER_MODEL
        return not slower


def _harm(tried: Tried, limits: Mapping[str, float]) -> float:
    """Share of the budget that a candidate alone takes; its attention error breaks ties."""
    shares = [
        _damage(key, tried.alone[key]) / max(_damage(key, limit), 1e-12)
        for key, limit in limits.items() if key in tried.alone
    ]  # fmt: skip
    return max(shares, default=0.0) + 1e-9 * tried.errors.get("attention_rel_l2", 0.0)


# Telling


def _reason(opened: OpenSite, tried: Tried) -> str:
    """Why, without any time: two runs that choose alike write the same."""
    if opened.ends_early:
        return "its loop ends early, which its captured code does not"
    if opened.forced:
        return tried.verdict or "the recipe asks for it"
    if tried.candidate.operator == TEACHER:
        whole = any(t.verdict == SLOWER_MODEL for t in opened.tried)
        where = "in the whole model" if whole else "at every shape"
        return f"nothing that was tried is faster {where} than the teacher's own code"
    if tried.approximate:
        return "the cheapest inside the budget"
    convention = opened.site.convention
    if not isinstance(convention, Convention):
        return "the same map from a faster kernel: nothing is approximated"
    if len(opened.tried) > 1:
        return "; ".join(f"{t.candidate.label}: {_lost(t)}" for t in opened.tried if t.approximate)
    if convention.half_steps <= FEW_HALF_STEPS:
        return f"{convention.half_steps} half-steps cost as much as the c-transforms"
    if not fits_needed(convention, opened.recipe):
        tried_ways = opened.recipe.alternatives()
        return f"no dual can be predicted: {why_no_fit(tried_ways[0], convention)}"
    return "nothing was tried: the selection split is empty"


def _lost(tried: Tried) -> str:
    if tried.verdict.startswith(EXCEEDS):
        return tried.verdict
    if tried.verdict:
        return GAINS_TOO_LITTLE
    return "the whole model's budget had no room for it"


def _trail(opened: OpenSite, picked: Tried) -> dict[str, Any]:
    listed = []
    for t in opened.tried:
        price = t.price
        verdict = "chosen" if t is picked else t.verdict or (
            "not in the cheapest set in the budget" if t.approximate else "exact, but not the cheapest"
        )
        listed.append(
            {
                "label": t.candidate.label,
                "operator": t.candidate.operator,
                "attention_rel_l2": t.errors.get("attention_rel_l2"),
                "output_rel_l2": t.errors.get("output_rel_l2"),
                "alone": {k: v for k, v in t.alone.items() if k in BUDGET_BOUNDS},
                "latency_ms": {} if price is None else _by_shape(price),
                "teacher_ms": {} if opened.teacher is None else _by_shape(opened.teacher),
                "speedup": {} if price is None else {_text(s): [*ends] for s, ends in price.gain.items()},
                "memory_mib": None if price is None else price.mib,
                "chosen": t is picked,
                "verdict": verdict,
            }
        )
    return {"name": opened.site.name, "candidates": listed}


def _by_shape(price: Price) -> dict[str, float]:
    return {_text(shape): value for shape, value in price.median.items()}


def _text(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


def _settled(
    model: WholeModel, recipe: Recipe, choices: Mapping[str, Choice]
) -> tuple[dict[str, Choice], dict[str, Any] | None]:
    """The choices, with exact sorting where predictions on the selection split allow it, alone, and the
    budget of the whole model does, with everything else that is approximate."""
    recipes = {name: recipe.for_site(name) for name in choices}
    analysis = model.analysis
    settled, switch = settle_exact_sorting(
        analysis.model, analysis.lifted, choices, recipes, model.batches
    )
    auto = [
        name for name, choice in settled.items()
        if choice.operator == "esp_hard" and recipes[name].operator == "auto"
    ]  # fmt: skip
    if switch is None or not auto:
        return settled, switch
    replaced = {name: x.replacement for name, x in settled.items() if x.replacement is not None}
    beyond = model.excess(replaced)
    if not beyond:
        return settled, switch
    why = f"exact sorting, with what is approximate elsewhere, exceeds the budget: {beyond}"
    settled |= dict.fromkeys(auto, Choice("esp_soft", why))
    switched = any(choice.operator == "esp_hard" for choice in settled.values())
    return settled, {**switch, "switched": switched}
