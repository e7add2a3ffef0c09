"""Identification by experiment: which finite Sinkhorn loop turns these scores into this attention?

A region between q k^T and A v is treated as a function of its scores. Nothing here looks at code.

    log A = m S + u 1' + 1 v'      double centring removes u and v, what is left is the multiplier m
    constant sums of A             give the last side and the output factor, at mild scores
    the T that reproduces A        gives the half-steps, at scores so sharp that every loop still moves
    what departs at sharp scores   gives the stabilising constant, if there is one

Long loops look converged at mild scores: T = 80 and T = 33 then agree to rounding. So samples must reach
the sharpest scores at which the region is finite, and a budget that other budgets agree with there is
said to have a rival.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from asapc.ir import Convention, FiniteLoop, OutputFactor, PlanConvention, Side, Stabiliser
from asapc.operators.c_transforms import close_columns, close_rows, log_marginals
from asapc.operators.plan import plan, settings_of
from asapc.operators.sinkhorn import (
    attention_map,
    factor_terms,
    factor_value,
    finite_duals,
    initial_duals,
)
from asapc.operators.stabilised import stabilised_plans, unit_mass
from asapc.passes.experiment import EXACT, STABILISED, Lengths, NoFit, Sized, normal, relative_error

MAX_HALF_STEPS = 1024
BOTH: tuple[Side, ...] = ("row", "column")
NOT_POSITIVE = "not Sinkhorn: the attention is not strictly positive on finite scores"
OTHER_SCORES = "not a row and column scaling of exp(scores)"
HELD = 1e-4  # of a convention that a constant nobody could name leaves at the sharpest scores
MILD = 6.0  # spread of the scores up to which a multiplier is measured
GAPS = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
# Standard deviations of the probed scores, in units of epsilon. The sharp ones are for budgets of
# hundreds of half-steps, which look converged at mild ones, and for constants not seen there.
SPREADS = (1.0, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0)
SHIFTS = (100.0, -900.0)
FEW_SPREADS = (1.0, 6.0, 25.0, 100.0)  # of fixed lengths that make N x M matrices large, as of
LARGE = 64 * 64
SEPARATES = 1e-6  # relative difference on which two budgets are told apart
SHORT = 64  # half-steps of a loop that is named where none fits
BEYOND = 8  # half-steps that are looked at after the first that fits: do they fit as well?
MARKS = ("asapc.seen.default", "asapc.holds.default")

T = TypeVar("T")
C = TypeVar("C", Convention, PlanConvention)
Pair = tuple[float, float]
"""Of rows and of columns."""


@dataclass(frozen=True)
class Sample:
    """One observation: scores (raw products) and map [B, H, N, M], keep [B, M], query_keep [B, N];
    marginals broadcastable to [B, H, N] and [B, H, M], None where they are uniform.

    mild: the scores spread so little that a stabilising constant is not seen.
    """

    scores: Tensor
    attention: Tensor
    keep: Tensor | None = None
    mild: bool = True
    log_mu: Tensor | None = None
    log_nu: Tensor | None = None
    query_keep: Tensor | None = None

    @property
    def marginals(self) -> tuple[Tensor | None, Tensor | None]:
        return self.log_mu, self.log_nu

    @property
    def is_given(self) -> bool:
        """Whether it has a marginal that is not uniform."""
        return any(x is not None for x in self.marginals)

    def head(self) -> Sample:
        """The first head of the first example, by which loops are searched."""
        keep = None if self.keep is None else self.keep[:1]
        marginals = (None if x is None else x.reshape(-1, x.shape[-1])[:1, None] for x in self.marginals)
        return Sample(self.scores[:1, :1], self.attention[:1, :1], keep, self.mild, *marginals)

    def powered(self, powers: Pair) -> Sample:
        """With powers of the marginals that are given."""
        log_mu, log_nu = (
            None if x is None else x * power for x, power in zip(self.marginals, powers, strict=True)
        )
        return replace(self, log_mu=log_mu, log_nu=log_nu)


@dataclass(frozen=True)
class Fit(Generic[C]):
    """A convention and the largest relative error with which it reproduces the samples.

    rival: another budget that reproduces them as well, which only other scores could tell apart.
    powers: of the marginals that are given, as the operator takes them.
    """

    convention: C
    error: float
    rival: C | None = None
    powers: Pair = (1.0, 1.0)


@dataclass(frozen=True)
class Budget:
    """The half-steps of a loop, its largest error, and another budget that fits as well."""

    first_side: Side
    half_steps: int
    error: float
    rival: tuple[Side, int] | None = None
    stabiliser: Stabiliser | None = None


@dataclass(frozen=True)
class Guesses:
    """What the code might keep its divisions from 0 with: see Stabiliser. Every combination is tried."""

    constants: Sequence[float] = ()
    kinds: Sequence[str] = ("add", "clamp")
    starts: Sequence[str] = ("softmax", "plain", "row", "matrix", "tensor")

    def stabilisers(self) -> Iterator[Stabiliser]:
        """The most usual first: a matrix that is divided, then scaling vectors."""
        for constant, kind in itertools.product(self.constants, self.kinds):
            for start, shares in itertools.product(self.starts, (False, True)):
                yield Stabiliser.of("plan", kind, constant, start, shares, False)
            starts = (start for start in self.starts if start != "softmax")
            for start, *flags in itertools.product(starts, (False, True), (False, True)):
                yield Stabiliser.of("scaling", kind, constant, start, *flags)


NO_GUESS = Guesses()


def identify(
    samples: Sequence[Sample], made: Callable[..., C], tolerance: float = STABILISED,
    guesses: Guesses = NO_GUESS, most: int = MAX_HALF_STEPS,
) -> Fit[C]:  # fmt: skip
    """The convention that reproduces every sample to `tolerance` (relative to max A).  Raises NoFit.

    Samples without a mask decide the multiplier; all must agree. Use several score spreads, the mildest
    first, up to the sharpest at which attention is finite.
    made: a convention of half-steps, first side, multiplier, and what else is named.
    """
    plain = [sample for sample in samples if sample.keep is None] or list(samples)
    mild, mildest = mild_ones(samples)
    multiplier = score_multiplier([s for s in plain if s.mild] or plain)
    sides: Sequence[Side] = BOTH  # of given marginals, no constant ones
    if not any(sample.is_given for sample in samples):
        sides = _constant_sides(mild, tolerance) or _constant_sides(mildest, HELD)
    budget: Budget | None
    if sides:
        budget = budget_of(samples, multiplier, sides, tolerance, guesses, most)
    else:  # a large constant takes a part of every mass
        budget = _stabilised(samples, multiplier, BOTH, guesses, SHORT)
    if budget is None:
        raise NoFit("not Sinkhorn: neither rows nor columns of the attention have constant mass")
    masked = {"mask": "key"} if any(sample.keep is not None for sample in samples) else {}
    loop = (budget.half_steps, budget.first_side, multiplier)
    convention = made(*loop, stabiliser=budget.stabiliser, **masked)
    fit = with_factor(convention, samples, mildest)
    if budget.rival is None:
        return fit
    first, half_steps = budget.rival
    return replace(fit, rival=replace(fit.convention, first_side=first, half_steps=half_steps))


def longest_in(nodes: Collection[Node]) -> int:
    """The half-steps of the longest loop that is tried of a region: each takes an operator, if not one
    of another library, which may be a whole loop."""
    spaces = {getattr(x.target, "namespace", "aten") for x in nodes if str(x.target) not in MARKS}
    return MAX_HALF_STEPS if spaces - {"aten"} else min(MAX_HALF_STEPS, len(nodes) + BEYOND)


def mild_ones(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The mild samples, all where none is; and the milder half of them."""
    mild = [sample for sample in samples if sample.mild] or list(samples)
    return mild, mild[: max(1, len(mild) // 2)]


def budget_of(
    samples: Sequence[Sample], multiplier: float, sides: Sequence[Side], tolerance: float,
    guesses: Guesses, most: int,
) -> Budget:  # fmt: skip
    """The shortest loop, ending on one of the sides, with which mild and sharp samples agree."""
    _, mildest = mild_ones(samples)
    at_mild = search_budget(groups_of(mildest, multiplier), loop_plans, sides, most)
    # A constant of 1e-6 is seen at mild scores, too, and a large one is nothing else.
    if not at_mild.error <= (max(tolerance, HELD) if guesses.constants else tolerance):
        stabilised = _stabilised(samples, multiplier, sides, guesses, min(most, SHORT))
        if stabilised is not None:
            return stabilised
        raise NoFit(
            f"not a finite Sinkhorn loop of at most {most} half-steps"
            f"{' with these marginals' if samples[0].is_given else ''} "
            f"(best: {at_mild.half_steps} half-steps, {at_mild.first_side}s first)",
            at_mild.error,
        )
    # Only what looks converged at mild scores may be longer than it looks there.
    most = most if at_mild.rival is not None else at_mild.half_steps + BEYOND
    budget = search_budget(groups_of(samples, multiplier), loop_plans, sides, most)
    if budget.error > tolerance and guesses.constants:
        budget = _stabilised(samples, multiplier, sides, guesses, most) or budget
    if not budget.error <= max(tolerance, HELD):
        raise NoFit(
            f"a loop of {at_mild.half_steps} half-steps at mild scores, and something else at sharp "
            "ones: a constant in its divisions, a clamp or a damping that is not known",
            budget.error,
        )
    return budget


def blocks(size: Sequence[int]) -> Iterator[Tensor]:
    """Scores [*, N, M] in units of epsilon on which long loops differ, the wider the gap the longer.

    Two blocks of tokens that hardly see each other, of unequal mass, exchange it slowly: every half-step
    moves the duals by the same amount until the gap between the blocks is overcome.
    """
    queries, keys = size[-2:]
    across = (torch.arange(queries) < queries // 2)[:, None] != (torch.arange(keys) < keys // 2 + 1)
    noise = normal(size, torch.Generator().manual_seed(3))
    for gap in GAPS:
        yield noise - gap * across


@dataclass(frozen=True)
class Drawn:
    """Scores of one standard deviation, in units of epsilon, with a number times noise added to every row
    or column, or a number to all; zeros: a third of them are exactly 0, which code may take for padding.
    """

    spread: float
    rows: float = 0.0
    columns: float = 0.0
    all: float = 0.0
    zeros: bool = False

    @property
    def mild(self) -> bool:
        """Whether they spread so little that a stabilising constant is not seen."""
        return self.spread <= MILD and not (self.rows or self.columns or self.all)

    def scores(self, size: Sequence[int], generator: torch.Generator) -> Tensor:
        """[*, N, M]"""
        s = self.spread * normal(size, generator)
        if self.zeros:
            rows, columns = (torch.arange(length) for length in size[-2:])
            s = s.masked_fill((rows[:, None] + columns) % 3 == 0, 0.0)
        lines = ((*size[:-1], 1), (*size[:-2], 1, size[-1]))
        by_row, by_column = (normal(along, generator) for along in lines)
        return s + self.rows * by_row + self.columns * by_column + self.all


def drawings(sizes: Sequence[T], large: bool) -> Iterator[tuple[Drawn, T]]:
    """What to observe at which sizes: every spread at all of them, the mildest first; then, at the first,
    shifted scores, which show what is subtracted before exp, and zeros."""
    for spread in FEW_SPREADS if large else SPREADS:
        yield from ((Drawn(spread), at) for at in sizes)
    for shift in SHIFTS:
        for drawn in (Drawn(1.0, rows=shift), Drawn(1.0, columns=shift), Drawn(1.0, all=shift)):
            yield drawn, sizes[0]
    yield Drawn(MILD, zeros=True), sizes[0]


def overflown(attention: Tensor) -> bool:
    """Whether scores were past what exp holds: a map that is not finite, or has no mass at all."""
    return not bool(attention.isfinite().all()) or not bool(attention.any(-1).any(-1).all())


class Trials(Sized, ABC):
    """A loop on scores that are drawn one after the other.

    rough: what multiplies them on the way, as seen first.  samples: what was observed, the mildest first.
    bounds: numbers that the code holds scores against, beyond which something else may happen.
    """

    rough = 1.0
    bounds: Sequence[float] = ()
    samples: Sequence[Sample] = ()

    @abstractmethod
    def size(self, at: Lengths | None = None) -> tuple[int, ...]:
        """[B, H, N, M] of the scores."""

    @abstractmethod
    def on(self, scores: Tensor, at: Lengths | None = None, mild: bool = False) -> Sample | None:
        """What is observed of these scores, None where they overflow."""

    def noise(self, at: Lengths | None = None) -> Tensor:
        return self.normal(self.size(at))

    def scores(self, spread: float = 1.0, at: Lengths | None = None) -> Tensor:
        """Random ones of so many units of epsilon."""
        return spread * self.noise(at) / abs(self.rough)

    def drawn(self, drawn: Drawn, at: Lengths | None = None) -> Sample | None:
        return self.on(drawn.scores(self.size(at), self.generator) / abs(self.rough), at, drawn.mild)

    def fitted(self, identify: Callable[[Sequence[Sample]], Fit[C]]) -> Fit[C]:
        """The convention of all that is drawn, held against its rival on scores on which one of the two
        is wrong.  Raises NoFit."""
        size = self.size()
        beyond = ((Drawn(3.0 * x * max(1.0, abs(self.rough))), self.few) for x in self.bounds)
        draws = itertools.chain(drawings(self.sizes, size[-2] * size[-1] > LARGE), beyond)
        tried = (self.drawn(*one) for one in draws)
        self.samples = [sample for sample in tried if sample is not None]
        if not self.samples:
            raise NoFit("the region gives NaN or infinity on random scores")
        fit, samples = identify(self.samples), [*self.samples]
        for units in blocks(size):
            if fit.rival is None:
                return fit
            sample = self.on(units / abs(fit.convention.score_multiplier))
            both = (fit.convention, fit.rival)
            if sample is not None and max(convention_error(one, [sample]) for one in both) > SEPARATES:
                samples.append(sample)
                fit = identify(samples)
        if fit.rival is None:
            return fit
        first, rival = fit.convention, fit.rival
        raise NoFit(
            f"{first.half_steps} half-steps ({first.first_side}s first) and {rival.half_steps} "
            f"({rival.first_side}s first) give the same attention in every test"
        )

    def check_larger_loops(self, convention: FiniteLoop, heads: float) -> None:
        """Hold a convention against what there is where tokens or examples are many.  Raises NoFit."""
        def error_at(at: Lengths) -> float:
            sample = self.drawn(Drawn(1.0), at)
            return math.inf if sample is None else convention_error(convention, [sample])

        self.check_larger(convention.half_steps * heads, error_at, HELD, "loop")


def with_factor(convention: C, samples: Sequence[Sample], mildest: Sequence[Sample]) -> Fit[C]:
    """The convention with the output factor that the mildest samples show, held against all of them.
    Its power of the shown queries stays.  Raises NoFit."""
    factor = factor_of(masses_of(convention, mildest))
    convention = replace(convention, output_factor=replace(factor, shown=convention.output_factor.shown))
    error = convention_error(convention, samples)
    if not error <= HELD:
        raise NoFit("one head or example runs this loop and another does not", error)
    return Fit(convention, error)


def convention_error(convention: FiniteLoop, samples: Sequence[Sample]) -> float:
    """Largest error of the convention over all heads and examples, relative to each sample's largest
    entry; infinite where it is not a number."""
    return max((relative_error(map_of(convention, x), x.attention) for x in samples), default=0.0)


def map_of(convention: FiniteLoop, sample: Sample) -> Tensor:
    """What the convention computes of what was observed to go in, [B, H, N, M]."""
    if isinstance(convention, PlanConvention):
        return plan(sample.scores, *sample.marginals, **settings_of(convention) | {"log": False})
    assert isinstance(convention, Convention)
    keep = sample.query_keep
    count = sample.scores.shape[-2] if keep is None else keep.sum(1).double()[:, None, None, None]
    times = count ** (convention.output_factor.shown or 0)
    return attention_of(convention, sample.scores, sample.keep, keep) * times


def attention_of(
    convention: Convention, scores: Tensor, keep: Tensor | None, query_keep: Tensor | None = None
) -> Tensor:
    """The map that the convention computes from raw products [B, H, N, M], in their dtype, before what
    the number of shown queries multiplies it by."""
    scores = convention.score_multiplier * scores
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None, :], -math.inf)
    if query_keep is not None:
        scores = scores.masked_fill(~query_keep[:, None, :, None], -math.inf)
    factor, rows_first = factor_terms(convention.output_factor), convention.first_side == "row"
    if convention.stabiliser is None:
        f, g = finite_duals(scores, convention.half_steps, convention.first_side, keep)
        return attention_map(scores, f, g, factor, keep)
    queries, keys = scores.shape[-2:]
    steps = stabilised_plans(scores, rows_first, convention.stabiliser)
    a, kernel, b = next(itertools.islice(steps, convention.half_steps - 1, None))
    unit = unit_mass(convention.stabiliser, convention.half_steps, rows_first, queries, keys)
    return a * unit * factor_value(factor, queries, keys, keep) * kernel * b.transpose(-1, -2)


def double_centre(matrix: Tensor) -> Tensor:
    """Remove row and column means: kills every term u_i + v_j."""
    rows = matrix.mean(-1, keepdim=True)
    columns = matrix.mean(-2, keepdim=True)
    return matrix - rows - columns + rows.mean(-2, keepdim=True)


def score_multiplier(samples: Sequence[Sample]) -> float:
    """m of log A = m S + u 1' + 1 v'.  Raises NoFit where there is none."""
    top = bottom = 0.0
    pairs: list[tuple[Tensor, Tensor]] = []
    for sample in samples:
        for row in range(len(sample.scores)):
            scores, attention = sample.scores[row], sample.attention[row]
            if sample.keep is not None:
                scores, attention = (x[..., sample.keep[row]] for x in (scores, attention))
            if attention.numel() == 0 or not bool(((attention > 0) & attention.isfinite()).all()):
                continue
            log_a, s = double_centre(attention.log()), double_centre(scores)
            pairs.append((log_a, s))
            top += float((log_a * s).sum())
            bottom += float((s * s).sum())
    if not pairs or bottom == 0.0:
        raise NoFit(NOT_POSITIVE)
    multiplier = top / bottom
    residual = math.sqrt(sum(float((a - multiplier * s).square().sum()) for a, s in pairs))
    scale = math.sqrt(sum(float(a.square().sum()) for a, _ in pairs))
    if scale == 0.0 or residual > 1e-4 * scale:
        raise NoFit(OTHER_SCORES, residual / max(scale, 1e-300))
    return multiplier


def _constant_sides(samples: Sequence[Sample], tolerance: float) -> list[Side]:
    return [side for side in BOTH if all(_mass_spread(one, side) <= tolerance for one in samples)]


def _mass_spread(sample: Sample, side: Side) -> float:
    """How much the sums over one side differ in an example, of what is not hidden."""
    sums = sample.attention.sum(-1 if side == "row" else -2)  # [B, H, *]
    if sample.keep is not None:
        shown = sums != 0 if side == "row" else sample.keep[:, None].expand_as(sums)
        sums = torch.where(shown, sums, sums.amax(-1, keepdim=True))
    sums = sums.flatten(1)
    if sums.numel() == 0:
        return 0.0
    return float(((sums.amax(-1) - sums.amin(-1)) / sums.amax(-1).abs().clamp(min=1e-300)).max())


# Budgets


Plans = Callable[[Side], Iterator[Tensor]]
"""From a first side, the plan [G, H, N, M] after each half-step."""


def search_budget(
    groups: Sequence[Sample], plans_of: Callable[[Sample], Plans], sides: Sequence[Side], most: int
) -> Budget:
    """The shortest loop, among those that end on `sides`, that is as good as the best.

    groups: as of groups_of; plans_of: the loops that should give their maps; most: the longest that is
    tried.  Every map counts up to a number: an output factor is looked for afterwards.
    """
    maps, plans = [group.attention for group in groups], [plans_of(group) for group in groups]
    errors: dict[tuple[Side, int], float] = {}
    for first in BOTH:
        running = [make(first) for make in plans]
        for half_steps, ours in enumerate(zip(*running, strict=True), 1):
            if half_steps > most:
                break
            if Convention(half_steps, first, 1.0).last_side not in sides:
                continue
            error = errors[first, half_steps] = max(map(_up_to_scale, ours, maps))
            if error <= EXACT:
                most = min(most, half_steps + BEYOND)
    least = min(errors.values())
    enough = EXACT if least <= EXACT else 1.5 * least
    fits = sorted(
        (key for key, error in errors.items() if error <= enough),
        key=lambda key: (key[1], key[0] == "column"),
    )
    if not fits:  # nothing but NaN
        return Budget("row", 1, math.inf)
    (first, half_steps), rivals = fits[0], fits[1:]
    return Budget(first, half_steps, errors[fits[0]], rivals[0] if rivals else None)


def loop_plans(sample: Sample, damping: Pair = (1.0, 1.0)) -> Plans:
    """The finite loop on scores in units of epsilon, from zero duals.  damping: as in operators.plan."""
    scores = sample.scores
    uniform = log_marginals(scores.shape[-2], scores.shape[-1], sample.keep, scores)
    log_mu, log_nu = (
        alike if x is None else x for x, alike in zip(sample.marginals, uniform, strict=True)
    )

    def run(first: Side) -> Iterator[Tensor]:
        f, g = initial_duals(scores, sample.keep)
        for side in itertools.cycle(BOTH if first == "row" else BOTH[::-1]):
            if side == "row":
                f = damping[0] * close_rows(scores, g, log_mu)
            else:
                g = damping[1] * close_columns(scores, f, log_nu)
            yield torch.exp(scores + f[..., None] + g[..., None, :])

    return run


def _up_to_scale(ours: Tensor, observed: Tensor) -> float:
    """Largest error relative to the largest entry, where each matrix counts up to a number but 0."""
    theirs, mass = (x.sum((-1, -2), keepdim=True) for x in (observed, ours))
    if bool(((theirs == 0) & (mass > 0)).any()):
        return math.inf
    scale = observed.abs().amax((-1, -2), keepdim=True).clamp(min=1e-300)
    error = float(((ours * (theirs / mass.clamp(min=1e-300)) - observed).abs() / scale).max())
    return math.inf if error != error else error


def nearest(samples: Sequence[Sample]) -> Budget:
    """The short loop that comes nearest at mild scores.  Raises NoFit where there is no multiplier."""
    mild = [sample for sample in samples if sample.mild]
    return search_budget(groups_of(mild[:2], score_multiplier(mild)), loop_plans, BOTH, SHORT)


def groups_of(samples: Sequence[Sample], multiplier: float) -> list[Sample]:
    """One head of every sample, with scores in units of epsilon, stacked by shape."""
    by_shape: dict[object, list[Sample]] = {}
    for sample in samples:
        head = sample.head()
        by_shape.setdefault((head.scores.shape, head.keep is None), []).append(head)
    groups = []
    for alike in by_shape.values():
        tensors = {
            name: torch.cat([getattr(sample, name) for sample in alike])
            for name, x in vars(alike[0]).items() if isinstance(x, Tensor)
        }  # fmt: skip
        tensors["scores"] *= multiplier
        if "keep" in tensors:
            tensors["scores"].masked_fill_(~tensors["keep"][:, None, None, :], -math.inf)
        groups.append(replace(alike[0], **tensors))  # type: ignore[arg-type]
    return groups


# Stabilising constants


def _stabilised(
    samples: Sequence[Sample], multiplier: float, sides: Sequence[Side], guesses: Guesses, most: int
) -> Budget | None:
    """The loop with a constant in its divisions that reproduces every sample, if there is one."""
    mildest, groups = groups_of(samples[:1], multiplier), groups_of(samples, multiplier)
    best: Budget | None = None
    for stabiliser in guesses.stabilisers():
        plans_of = partial(_stabilised_plans, stabiliser=stabiliser)
        if not search_budget(mildest, plans_of, sides, most).error <= STABILISED:
            continue
        budget = replace(search_budget(groups, plans_of, sides, most), stabiliser=stabiliser)
        if best is None or budget.error < best.error:
            best = budget
        if budget.error <= EXACT:
            break
    return best if best is not None and best.error <= STABILISED else None


def _stabilised_plans(sample: Sample, stabiliser: Stabiliser) -> Plans:
    def run(first: Side) -> Iterator[Tensor]:
        steps = stabilised_plans(sample.scores, first == "row", stabiliser, *sample.marginals)
        return (a * kernel * b.transpose(-1, -2) for a, kernel, b in steps)

    return run


Mass = tuple[int, int, float, float]
"""N, M, the active keys n, and the mass of a map over that of a convention's whose factor is 1, where
the map has any."""


def masses_of(convention: Convention | PlanConvention, samples: Sequence[Sample]) -> list[Mass]:
    """Of every example with active keys."""
    masses: list[Mass] = []
    plain = replace(convention, output_factor=OutputFactor(shown=convention.output_factor.shown))
    for sample in samples:
        queries, keys = sample.scores.shape[-2:]
        ours = map_of(plain, sample).masked_fill(sample.attention == 0, 0.0)
        ratios = sample.attention.sum((1, 2, 3)) / ours.sum((1, 2, 3))
        active = [keys] * len(ratios) if sample.keep is None else sample.keep.sum(-1).tolist()
        masses += [
            (queries, keys, float(n), float(ratio))
            for n, ratio in zip(active, ratios, strict=True) if n and sample.scores.numel()
        ]  # fmt: skip
    return masses


def factor_of(observed: Sequence[Mass]) -> OutputFactor:
    """The factor as a monomial in N, M and n.  Raises NoFit."""
    # Simplest first; where N = M = n always, "N" stands for all of them.
    powers = ((1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1), (1, 0, -1), (0, 1, -1), (1, 1, -1),
              (0, 2, -1), (2, -1, 0), (-1, 2, 0), (1, 1, 0), (2, 0, 0), (0, 2, 0), (-1, 1, 0),
              (1, -1, 0))  # fmt: skip
    for unit in (True, False):
        for a, b, d in powers:
            ratios = [value / (N**a * M**b * n**d) for N, M, n, value in observed]
            target = 1.0 if unit else ratios[0]
            if all(abs(ratio - target) <= 1e-5 * abs(target) for ratio in ratios):
                return OutputFactor(1.0 if unit else target, a, b, d)
    raise NoFit("the mass of the attention depends on the batch in no known way")
