"""One site's calibration: activations in, sufficient statistics kept, coefficients out."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asapc.calibration.checked import parameters_of, tensor_of
from asapc.calibration.kept import Kept
from asapc.calibration.kl import KlPiece, fit_kl
from asapc.calibration.least_squares import DualFit, NormalEquations
from asapc.calibration.stored import SiteCalibration
from asapc.calibration.teacher import TeacherDuals
from asapc.errors import InputError
from asapc.features import feature_columns, total_width
from asapc.features.clouds import Clouds, PredictedSide, clouds_of, shown_queries
from asapc.features.predictor import Amortised, DualPredictor, TransformPlan
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention, SiteTensors
from asapc.processes import Part, apart, together

# Score entries per piece of a batch: 8 MB of float64, so that the teacher's loop runs in cache.
_PIECE = 2**20
KL_BYTES = 2**27  # activations a KL fit keeps per dual; examples beyond this only enter the start


class SiteStatistics:
    """Streams one site's activations into the statistics of each predicted dual.

    name: the site, for messages.  plan: see features.predictor.transform_plan.  recipe: of the site.
    """

    def __init__(self, name: str, convention: Convention, plan: TransformPlan, recipe: Recipe) -> None:
        self.name = name
        self.convention = convention
        self.plan = plan
        self.recipe = recipe
        self.duals = [_DualStatistics(self, side) for side in plan.sides()]
        self.examples = 0
        self.seconds = 0.0
        self._intercepts: list[Tensor] = []  # [B, H] each; only where no c-transform finds it

    def prepare(self, tensors: SiteTensors) -> None:
        """Make slices and pivots from a batch, unless an earlier one has made them."""
        active = active_examples(tensors)
        if len(active):
            sample = select(tensors, active)
            for dual in self.duals:
                dual.prepare(sample)

    def prepare_as(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over slices and pivots that another process has made, in the form of state()."""
        for dual in self.duals:
            dual.parameters = parameters_of(tensors, dual.side, dual.features)

    def add(self, teacher: TeacherDuals) -> None:
        """Add one piece of a batch, with the teacher's duals on it; after prepare.

        Raises InputError if the teacher's dual is NaN or infinite.
        """
        for dual in self.duals:
            dual.add(teacher)
        if self.plan.side == "both":
            self._intercepts.append(teacher.intercept(self.plan.half_steps))
        self.examples += teacher.tensors.q.shape[0]

    def keep_at_most(self, size: int) -> None:
        """Limit the bytes of activations for KL fits, of all duals; further examples enter a start."""
        for dual in self.duals:
            dual.kept.limit = min(KL_BYTES, size // len(self.duals))

    def end_batch(self) -> None:
        """After the last piece of a batch."""
        for dual in self.duals:
            dual.kept.end_batch()

    def part(self) -> Part:
        """Everything collected, for another process to gather."""
        tensors, facts = self.state()
        kept = {dual.side: dual.kept.part() for dual in self.duals}
        return (
            {**tensors, **together((f"kept {side}", part) for side, (part, _) in kept.items())},
            {**facts, "kept": {side: ends for side, (_, ends) in kept.items()}},
        )

    def gather(self, parts: Sequence[Part]) -> None:
        """Hold what one process would have collected, had the batches not been shared out.

        parts: one for each process, in the order of ranks.
        """
        self.examples, self.seconds, self._intercepts = 0, 0.0, []
        for dual in self.duals:
            dual.equations = None
            kept = [(apart(tensors, f"kept {dual.side}"), facts["kept"][dual.side])
                    for tensors, facts in parts]  # fmt: skip
            dual.kept.take_turns(kept, KlPiece.of)
        for tensors, facts in parts:
            self.restore(tensors, facts)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What was collected, except for the activations of a KL fit; restore is the inverse."""
        tensors: dict[str, Tensor] = {}
        for dual in self.duals:
            for index, parameter in enumerate(dual.parameters or ()):
                if parameter is not None:
                    tensors[f"{dual.side}.parameter.{index}"] = parameter
            if dual.equations is not None:
                equations = dual.equations.to_tensors().items()
                tensors.update({f"{dual.side}.{name}": tensor for name, tensor in equations})
        if self._intercepts:
            tensors["intercepts"] = torch.cat(self._intercepts)
        return tensors, {"examples": self.examples, "seconds": self.seconds}

    def restore(
        self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], heads: int | None = None,
        head_dim: int | None = None,
    ) -> None:  # fmt: skip
        """Add what state() gave.  heads, head_dim: the site's, where they are known.

        Raises InputError or KeyError if something is missing or does not fit such a site; nothing changes
        then.
        """
        examples, seconds = int(facts["examples"]), float(facts["seconds"])
        if examples < 0 or not math.isfinite(seconds):
            raise InputError("examples and seconds must be counts", got=f"{examples}, {seconds}")
        restored = [(dual, *dual.restored(tensors, heads, head_dim)) for dual in self.duals if examples]
        intercepts = []
        if self.plan.side == "both" and restored:
            intercepts = [tensor_of(tensors, "intercepts", (examples, heads), torch.float64)]
        self.examples += examples
        self.seconds += seconds
        self._intercepts += intercepts
        for dual, parameters, equations in restored:
            dual.parameters = parameters
            dual.equations = equations if dual.equations is None else dual.equations + equations

    def calibration(self, fits: Sequence[DualFit]) -> SiteCalibration:
        """The site with its fitted coefficients, one fit per dual."""
        intercept = None
        if self._intercepts:
            intercept = torch.cat(self._intercepts).mean(0).float()  # [H]
        predictors = tuple(
            dual.predictor(fit.coefficients) for dual, fit in zip(self.duals, fits, strict=True)
        )
        return SiteCalibration(
            convention=self.convention,
            amortised=Amortised(self.plan, predictors, intercept),
            quality=tuple(fit.quality for fit in fits),
            examples=self.examples,
            tokens=sum(dual.equations.tokens for dual in self.duals if dual.equations),
            fit_seconds=self.seconds,
            sharing=self.recipe.coefficients,
            settings=self.recipe.fit_settings(),
        )


class _DualStatistics:
    """One predicted dual of a site: its parameters (made from the first batch), normal equations, KL
    pieces."""

    def __init__(self, site: SiteStatistics, side: PredictedSide) -> None:
        self.name, self.convention, self.recipe = site.name, site.convention, site.recipe
        self.side = side
        self.features = site.recipe.parsed_features()
        self.budget = site.plan.budget(site.convention, side)
        self.parameters: tuple[Tensor | None, ...] | None = None
        self.equations: NormalEquations | None = None
        self.kept = Kept[KlPiece](KL_BYTES)

    def prepare(self, tensors: SiteTensors) -> None:
        if self.parameters is not None:
            return
        sample = self._clouds(tensors)
        self.parameters = tuple(f.parameter(sample, self.recipe.seed) for f in self.features)

    def _clouds(self, tensors: SiteTensors) -> Clouds:
        return clouds_of(tensors, self.convention.score_multiplier, self.side, self.recipe.points)

    def add(self, teacher: TeacherDuals) -> None:
        tensors = teacher.tensors
        assert self.parameters is not None
        y = teacher.target(self.budget.half_steps, self.side, self.recipe.points)
        if not bool(y.isfinite().all()):
            raise InputError(
                f"{self.name}: the teacher's duals must be finite",
                got="nan or inf",
                help="check the scale of this layer's queries, keys and score bias",
            )
        clouds = self._clouds(tensors)
        x = feature_columns(self.features, self.parameters, clouds, self.budget)
        if not bool(x.isfinite().all()):
            raise InputError(
                f"{self.name}: the features {', '.join(map(str, self.features))} overflow",
                got="nan or inf",
                help="the layer's activations are extreme: use `operator: sinkhorn` for it",
            )
        if self.equations is None:
            groups = x.shape[1] if self.recipe.coefficients == "per_head" else 1
            self.equations = NormalEquations(x.shape[-1], groups)
        if x.shape[-1] != self.equations.features:
            raise InputError(
                f"{self.name}: a feature with one column per position needs sequences of one length",
                got=f"{self.equations.features} and {x.shape[-1]} columns",
                help="remove token_bias from `features`",
            )
        rows = int(clouds.x_keep.sum()) if clouds.x_keep is not None else x.shape[0] * x.shape[2]
        self.equations.add(x, y, rows)
        if self.recipe.fit == "kl":
            self.kept.add(KlPiece(x, clouds, teacher.mass(self.budget.half_steps, self.side)))

    def restored(
        self, tensors: Mapping[str, Tensor], heads: int | None, head_dim: int | None
    ) -> tuple[tuple[Tensor | None, ...], NormalEquations]:
        """Parameters and equations as SiteStatistics.state() wrote them.  Raises InputError."""
        parameters = parameters_of(tensors, self.side, self.features, heads, head_dim)
        groups = heads if self.recipe.coefficients == "per_head" else 1
        columns = total_width(self.features, head_dim, None)
        of_side = {name.removeprefix(f"{self.side}."): tensor for name, tensor in tensors.items()}
        return parameters, NormalEquations.from_tensors(of_side, groups, columns)

    def predictor(self, coefficients: Tensor) -> DualPredictor:
        assert self.parameters is not None
        return DualPredictor(
            self.side, self.features, self.parameters, coefficients.float(), self.budget,
            self.recipe.points,
        )


def check_finite(name: str, tensors: SiteTensors, numbers: Sequence[int] = ()) -> None:
    """Raises InputError naming the example where an activation is NaN or infinite.

    numbers: of the examples in the data, where they are known.
    """
    k = tensors.k
    if tensors.keep is not None:
        k = k.masked_fill(~tensors.keep[:, None, :, None], 0.0)
    bad = {"queries": ~tensors.q.isfinite(), "keys": ~k.isfinite()}
    if tensors.bias is not None:
        # -inf in a bias is a legal way to forbid a pair.
        bad["score bias"] = tensors.bias.isnan() | tensors.bias.isposinf()
    for what, wrong in bad.items():
        if bool(wrong.any()):
            example = int(wrong.flatten(1).any(1).nonzero()[0])
            which = f"{numbers[example]} (counted from 0)" if numbers else f"{example} of a batch"
            raise InputError(
                f"{name}: {what} must be finite",
                got=f"nan or inf in example {which}",
                help="look for broken weights, or inputs unlike the training data",
            )


def pieces(tensors: SiteTensors, every: bool = False) -> list[SiteTensors]:
    """Examples with an active key and query, a few at a time so that their score matrices stay in cache.

    every: include those without.
    """
    batch, heads, queries, _ = tensors.q.shape
    size = max(1, _PIECE // max(1, heads * queries * tensors.k.shape[2]))
    chosen = torch.arange(batch, device=tensors.q.device) if every else active_examples(tensors)
    return [select(tensors, part) for part in chosen.split(size) if len(part)]


def active_examples(tensors: SiteTensors) -> Tensor:
    """The examples [b] in which a query and a key carry mass."""
    index = torch.arange(tensors.q.shape[0], device=tensors.q.device)
    active = torch.ones_like(index, dtype=torch.bool)
    for keep in (tensors.keep, shown_queries(tensors.bias)):
        active = active if keep is None else active & keep.any(-1)
    return index[active]


def select(tensors: SiteTensors, index: Tensor) -> SiteTensors:
    """The examples at index [b]."""
    bias = tensors.bias
    if bias is not None and bias.dim() == 4 and bias.shape[0] > 1:
        bias = bias[index]
    keep, query_keep, v = (
        None if x is None else x[index] for x in (tensors.keep, tensors.query_keep, tensors.v)
    )
    return SiteTensors(tensors.q[index], tensors.k[index], keep, bias, query_keep, v)


def finish(statistics: Mapping[str, SiteStatistics]) -> dict[str, SiteCalibration]:
    """Solve every site; those that share coefficients are solved together, once per side.

    Raises InputError where there are no examples, fewer regression rows than coefficients, or sites
    that cannot share because their features have different numbers of columns.
    """
    shared: dict[PredictedSide, list[_DualStatistics]] = {}
    for site in statistics.values():
        for dual in site.duals:
            if dual.recipe.coefficients == "shared":
                shared.setdefault(dual.side, []).append(dual)
    solve = functools.cache(lambda *duals: _solve(duals))
    done = {}
    for name, site in statistics.items():
        start = time.perf_counter()
        fits = [
            solve(*(shared[dual.side] if dual.recipe.coefficients == "shared" else [dual]))
            for dual in site.duals
        ]
        site.seconds += time.perf_counter() - start
        done[name] = site.calibration(fits)
    return done


def _solve(duals: Sequence[_DualStatistics]) -> DualFit:
    """One fit of one dual, or of several that share their coefficients."""
    recipe, name = duals[0].recipe, duals[0].name
    merged: NormalEquations | None = None
    for dual in duals:
        equations = dual.equations
        if equations is None:
            raise InputError(
                f"{dual.name}: calibration saw no examples",
                help="pass a data set in which this layer runs",
            )
        if merged is not None and merged.features != equations.features:
            raise InputError(
                "coefficients: shared needs as many feature columns at every site",
                got=f"{merged.features} at {name}, {equations.features} at {dual.name}",
                help="use `coefficients: pooled`",
            )
        merged = equations if merged is None else merged + equations
    assert merged is not None
    try:
        fit = merged.solve(recipe.ridge, direct=recipe.ridge_mode == "direct")
    except InputError as error:
        raise InputError(f"{name}: {error.rule}", got=error.got, help=error.help) from None
    return fit if recipe.fit == "ls" else _refine_kl(duals, merged, fit)


def _refine_kl(duals: Sequence[_DualStatistics], equations: NormalEquations, start: DualFit) -> DualFit:
    recipe = duals[0].recipe
    pieces = [piece for dual in duals for piece in dual.kept.pieces]
    # A map weighs its mass, 1, in this objective; in the least squares it weighs its rows.
    maps = sum(piece.columns.shape[0] * piece.columns.shape[1] for piece in pieces)
    direct = recipe.ridge_mode == "direct"
    penalty = recipe.ridge if direct else recipe.ridge * maps / equations.groups
    kl = fit_kl(pieces, groups=equations.groups, penalty=penalty, start=start.coefficients)
    quality = replace(
        start.quality, fit="kl", r2=equations.r2(kl.coefficients), iterations=kl.iterations,
        gradient_norm=kl.gradient_norm, converged=kl.converged,
        kl_examples=sum(dual.kept.examples for dual in duals),
    )  # fmt: skip
    return DualFit(kl.coefficients, quality)


