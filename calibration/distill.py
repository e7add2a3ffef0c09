"""Distillation: another operator's parameters, fitted per head to the outputs A v of a loop or a softmax.

No labels are needed: the target is the teacher's map applied to the site's values. What is minimised is
the squared error of a head's output relative to its norm, averaged over examples. Heads are independent,
so each keeps its own best step.

lot       Pivots start as k-means centres of a head's queries and keys, their masses equal; Adam
          follows the gradient. Only z / epsilon enters a score, so pivots carry their epsilon. Both
          plans end on their tokens: with the published budget (5 half-steps, for keys the last one on
          the pivots) maps came out 1.2 to 1.7 times as far from an IMDb teacher's. A convolution on
          the values lowered the output error by 4 to 7 % there, and would leave no map: beside Sinkhorn
          layers none is fitted.
esp_hard  Sorting has no gradient in the slices. Plans of one slice each, along principal and random
          directions of the head's tokens, are added greedily, each time the one that lowers the
          error of their mean most; that needs only the products of their outputs. Then tau is the
          best of a few. Ties share mass, and unequal numbers meet by the monotone coupling: both
          marginals are uniform, as the teacher's are.
fitted_sinkhorn
          One number a head, the multiplier of its scores: the best of a few, then of its neighbours at
          ever smaller distances. The loop ends on the teacher's side.

The first two ignore a score bias: what it does to the teacher's outputs stays in the error.

In a softmax layer, summary tokens keep their rows: the operator is fitted to the other rows, from the
other tokens. Then a depthwise convolution on the values is fitted to the residual of a head's outputs, by
least squares in closed form. Heads whose held-out error it does not lower get zeros; if that is every
head, there is no convolution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from asapc.calibration.collect import check_finite, pieces, select
from asapc.calibration.kept import Kept
from asapc.calibration.stored import SiteDistillation
from asapc.calibration.students import COUPLING, Maker, asked, hybrid_of, maker_of, refusal
from asapc.calibration.teacher import TeacherDuals
from asapc.device import CPU, moved
from asapc.errors import InputError
from asapc.features.coarse import kmeans
from asapc.inputs.recipe import Recipe
from asapc.ir import Convention, Distilled, SiteTensors
from asapc.operators.hybrid import without_first
from asapc.operators.matching import match, orders_of
from asapc.operators.ranks import clouds_of
from asapc.operators.sinkhorn import clean_values, factor_terms, factor_value
from asapc.processes import Part
from asapc.program.apply import apply_distilled, apply_lossless
from asapc.program.calls import times_share

KEPT_BYTES = 2**28  # activations kept per site; further examples are ignored
HELD_OUT_BYTES = 2**25
ROUNDING = 1e-6  # of an output factor that was measured
SAMPLE_POINTS = 8192  # of a head, for k-means and principal directions

MINIBATCH = 8  # examples; fewer where their scores against the pivots are more than MINIBATCH_SCORES
MINIBATCH_SCORES = 2**22
STEPS = 200
CHECK_EVERY = 25  # steps between checks on the held-out examples
PATIENCE = 4  # checks without a better head before the fit stops
LEARNING_RATE = 0.1  # in units of the first pivots' spread

SLICE_EXAMPLES = 64  # the products of candidates are summed over
SLICE_ROWS = 64  # queries of an example
CANDIDATES = 256  # directions a head chooses from, at least twice its slices
MULTIPLIERS = tuple(2 ** (step / 2) for step in range(-6, 7))  # of a fitted loop's scores
HALVINGS = 6  # of the distance to the neighbours of the best of them, which is then half a per cent

RIDGE = 1e-4  # of a convolution's normal equations, times their mean diagonal

INVERSE_TEMPERATURES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # over the norm of a typical token


@dataclass(frozen=True)
class _Piece:
    """A few examples: the site's inputs, with zeros for padded keys, and the teacher's output
    [B, H, N, E]."""

    tensors: SiteTensors
    target: Tensor

    def __len__(self) -> int:
        return self.target.shape[0]

    def all_tensors(self) -> dict[str, Tensor]:
        inputs = {name: x for name, x in vars(self.tensors).items() if isinstance(x, Tensor)}
        return {"target": self.target, **inputs}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> _Piece:
        """Inverse of all_tensors."""
        others = {name: tensor for name, tensor in tensors.items() if name != "target"}
        return cls(SiteTensors(**others), tensors["target"])  # type: ignore[arg-type]

    def error(self, student: Distilled) -> Tensor:
        """|student - target|^2 / |target|^2 of every head and example: [B, H]."""
        out = apply_distilled(student, self.tensors, self.tensors.v)
        scale = self.target.square().sum((-2, -1)).clamp(min=torch.finfo(out.dtype).tiny)
        return (out - self.target).square().sum((-2, -1)) / scale


class Distiller:
    """Keeps a sample of one site's activations and fits the recipe's operator to the teacher on it.

    name: the site, for messages.  recipe: of the site.  Raises InputError where the convention does not
    allow what the recipe asks for.
    """

    def __init__(self, name: str, convention: Convention, recipe: Recipe) -> None:
        problem = refusal(name, convention, recipe.fit_settings())
        if problem is not None:
            raise problem
        self.name = name
        self.convention = convention
        self.plan = None  # as SiteStatistics: no dual is predicted
        self.recipe = recipe
        self.seconds = 0.0
        self._kept, self._held_out = Kept[_Piece](KEPT_BYTES), Kept[_Piece](HELD_OUT_BYTES)

    def keep_at_most(self, size: int) -> None:
        """Limit the bytes of activations, an eighth of which decide when to stop."""
        self._kept.limit = min(KEPT_BYTES, size * 7 // 8)
        self._held_out.limit = min(HELD_OUT_BYTES, size // 8)

    def prepare(self, tensors: SiteTensors) -> None:
        """As SiteStatistics: nothing is made from the first batch alone."""

    def add(self, teacher: TeacherDuals) -> None:
        """As SiteStatistics: one piece of a batch to fit on, up to KEPT_BYTES.

        Raises InputError if an output of the teacher is NaN or infinite.
        """
        self._add(self._kept, teacher.tensors)

    def hold_out(self, tensors: SiteTensors) -> None:
        """Add one batch that decides when to stop. Without any, a tenth of what was added is held out."""
        check_finite(self.name, tensors)
        for piece in pieces(tensors):
            self._add(self._held_out, piece)

    def _add(self, kept: Kept[_Piece], piece: SiteTensors) -> None:
        if not kept.full:
            for few in _split(piece, self._minibatch(piece)):
                kept.add(self._piece(few))

    def end_batch(self) -> None:
        """As SiteStatistics."""
        self._kept.end_batch()

    def part(self) -> Part:
        """As SiteStatistics: the activations."""
        tensors, facts = self._kept.part()
        return tensors, {"kept": facts, "seconds": self.seconds}

    def gather(self, parts: Sequence[Part]) -> None:
        """As SiteStatistics."""
        self._kept.take_turns([(tensors, facts["kept"]) for tensors, facts in parts], _Piece.of)
        self.seconds = sum(facts["seconds"] for _, facts in parts)

    def _minibatch(self, t: SiteTensors) -> int:
        _, heads, queries, _ = t.q.shape
        partners = t.k.shape[2] if self.recipe.operator == "fitted_sinkhorn" else self.recipe.pivots
        scores = heads * (queries + t.k.shape[2]) * partners
        return min(MINIBATCH, max(1, MINIBATCH_SCORES // scores))

    def _piece(self, t: SiteTensors) -> _Piece:
        if t.v is None and self.recipe.depthwise:
            raise InputError(
                f"{self.name}: a convolution on the values adds to A v and leaves no map",
                got="a layer whose attention map is returned, or used otherwise",
                help="set `drop_attention_maps: true`, or leave `depthwise` out for this site",
            )
        v = t.k if t.v is None else t.v  # the keys stand in where the map itself is returned
        q, k, v = (x.detach().float() for x in (t.q, t.k, v))
        bias = None if t.bias is None else t.bias.float()
        inputs = SiteTensors(q, clean_values(k, t.keep), t.keep, bias, None, clean_values(v, t.keep))
        with torch.no_grad():
            target = apply_lossless(self.convention, inputs, inputs.v)
        if not bool(target.isfinite().all()):
            raise InputError(
                f"{self.name}: the teacher's outputs must be finite",
                got="nan or inf",
                help="check the scale of this layer's queries, keys, values and score bias",
            )
        known = inputs.bias if self.recipe.operator == "fitted_sinkhorn" else None
        piece = _Piece(SiteTensors(inputs.q, inputs.k, inputs.keep, known, None, inputs.v), target)
        return self._others(piece) if self.recipe.beside() else piece

    def _others(self, piece: _Piece) -> _Piece:
        """Without the summary tokens: the rows of the others, and what those see of each other."""
        t, count, what = piece.tensors, self.recipe.summary_tokens, asked(self.recipe.fit_settings())
        queries, keys = t.q.shape[2], t.k.shape[2]
        if queries != keys:
            raise InputError(
                f"{self.name}: {what} is for attention of tokens to themselves",
                got=f"{queries} queries and {keys} keys",
                help="leave it out for this site, under `sites`",
            )
        terms = factor_terms(self.convention.output_factor)
        factor = factor_value(terms, queries, keys, t.keep)
        if not bool(((torch.as_tensor(factor) / queries - 1).abs() < ROUNDING).all()):
            raise InputError(
                f"{self.name}: {what} is for softmax attention, whose rows sum to 1",
                got=f"the output factor {self.convention.output_factor}",
                help="leave it out for this site, under `sites`",
            )
        if queries <= count:
            raise InputError(
                f"{self.name}: there must be tokens besides the summary tokens",
                got=f"{queries} tokens, `summary_tokens: {count}`",
                help="calibrate on longer examples, or name fewer summary tokens",
            )
        q, k, v = (None if x is None else x[:, :, count:] for x in (t.q, t.k, t.v))
        assert q is not None and k is not None
        keep = None if t.keep is None else t.keep[:, count:]
        inputs = SiteTensors(q, k, keep, without_first(t.bias, count), None, v)
        return _Piece(inputs, piece.target[:, :, count:])

    def calibration(self) -> SiteDistillation:
        """The fit.  Raises InputError without examples, and where the operator cannot have the mass
        of the teacher's map."""
        start = time.perf_counter()
        if not self._kept.pieces:
            raise InputError(
                f"{self.name}: calibration saw no examples",
                help="pass a data set in which this layer runs",
            )
        train, held_out = self._parts()
        square = all(p.tensors.q.shape[2] == p.tensors.k.shape[2] for p in train)
        make = maker_of(self.name, self.convention, self.recipe.fit_settings(), square)
        if self.recipe.operator == "lot":
            fit = fit_lot(train, held_out, make, self.recipe.pivots, self.recipe.seed, STEPS)
        elif self.recipe.operator == "esp_hard":
            fit = fit_slices(train, held_out, make, self.recipe.slices, self.recipe.seed)
        else:
            fit = fit_loop(train, held_out, make)
        if self.recipe.beside():
            fit = self._beside_softmax(fit, train, held_out)
        if not bool(fit.errors.isfinite().all()):
            raise InputError(
                f"{self.name}: {self.recipe.operator} cannot be fitted to this layer",
                got="errors that are not finite",
                help="the layer's activations are extreme: use `operator: sinkhorn` for it",
            )
        self.seconds += time.perf_counter() - start
        return SiteDistillation(
            convention=self.convention,
            distilled=fit.distilled,
            errors=tuple(fit.errors.sqrt().tolist()),
            steps=fit.steps,
            examples=sum(map(len, train)),
            held_out=sum(map(len, held_out)),
            tokens=sum(len(p) * p.tensors.q.shape[2] for p in train),
            fit_seconds=self.seconds,
            settings=self.recipe.fit_settings(),
        )

    def _beside_softmax(self, fit: _Fit, train: Sequence[_Piece], held_out: Sequence[_Piece]) -> _Fit:
        """The hybrid form of the fit, with a convolution where the recipe asks for one."""
        multiplier, errors, kernel = self.convention.score_multiplier, fit.errors, None
        if self.recipe.depthwise:
            kernel = fit_depthwise(train, fit.distilled, self.recipe.depthwise)
            convolved = _mean_errors(hybrid_of(fit.distilled, 0, multiplier, kernel), held_out)
            better = convolved < errors  # [H]
            kernel = torch.where(better[:, None, None], kernel, 0.0) if bool(better.any()) else None
            errors = torch.minimum(convolved, errors)
        hybrid = hybrid_of(fit.distilled, self.recipe.summary_tokens, multiplier, kernel)
        return _Fit(hybrid, errors, fit.steps)

    def _parts(self) -> tuple[list[_Piece], list[_Piece]]:
        """The pieces to fit on and those that decide when to stop; the same if there is but one."""
        kept = self._kept.pieces
        if self._held_out.pieces:
            return kept, self._held_out.pieces
        order = np.random.default_rng(self.recipe.seed).permutation(len(kept))
        aside = set(order[: max(1, len(kept) // 10)].tolist()) if len(kept) > 1 else set()
        train = [piece for index, piece in enumerate(kept) if index not in aside]
        return train, [kept[index] for index in sorted(aside)] or kept


def _split(t: SiteTensors, size: int) -> Iterator[SiteTensors]:
    return (select(t, part) for part in torch.arange(len(t.q), device=t.q.device).split(size))


@dataclass(frozen=True)
class _Fit:
    """errors: mean squared relative error of each head's output, held out, [H] float64."""

    distilled: Distilled
    errors: Tensor
    steps: tuple[int, ...]


def fit_lot(
    train: Sequence[_Piece],
    held_out: Sequence[_Piece],
    make: Maker,
    count: int,
    seed: int,
    steps: int = STEPS,
) -> _Fit:
    """Pivots and masses by Adam with a cosine schedule; each head keeps what did best on the held-out
    examples."""
    random = np.random.default_rng(seed)
    device = train[0].target.device
    pivots = moved(kmeans(_tokens(train, random), count, random).float(), device)
    spread = pivots.flatten(1).std(1).clamp(min=torch.finfo(pivots.dtype).tiny)[:, None, None]
    scaled, logits = (pivots / spread).requires_grad_(), pivots.new_zeros(pivots.shape[:2])
    logits.requires_grad_()

    def student() -> Distilled:
        return make(scaled * spread, torch.softmax(logits, -1))

    optimiser = torch.optim.Adam([scaled, logits], lr=LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    best, errors = [x.detach().clone() for x in (scaled, logits)], _mean_errors(student(), held_out)
    kept, stale = torch.zeros(len(errors), dtype=torch.long), 0
    queue: list[int] = []
    for step in range(1, steps + 1):
        queue = queue or random.permutation(len(train)).tolist()
        optimiser.zero_grad()
        train[queue.pop()].error(student()).mean().backward()
        optimiser.step()
        schedule.step()
        if step % CHECK_EVERY and step < steps:
            continue
        now = _mean_errors(student(), held_out)
        better = now < errors  # [H]
        for whole, current in zip(best, (scaled, logits), strict=True):
            whole[better] = current.detach()[better]
        errors, kept = torch.where(better, now, errors), torch.where(better, step, kept)
        stale = 0 if bool(better.any()) else stale + 1
        if stale == PATIENCE:
            break
    final = moved(make(best[0] * spread, torch.softmax(best[1], -1)), CPU)
    return _Fit(final, errors, tuple(kept.tolist()))


def fit_loop(train: Sequence[_Piece], held_out: Sequence[_Piece], make: Maker) -> _Fit:
    """The multiplier of each head's scores, by which a loop comes closest.

    The best of MULTIPLIERS, then of the two beside it, at a distance that is halved every time: where 1
    is exact, as for a softmax layer's own half-step, it stays 1.
    """
    heads = train[0].target.shape[1]
    best = torch.ones(heads, dtype=torch.float64)
    least = torch.full_like(best, math.inf)
    distance = MULTIPLIERS[1] / MULTIPLIERS[0]
    for halving in range(HALVINGS + 1):
        around = [distance ** (side / 2**halving) for side in (-1, 1)]
        for tried in [best * factor for factor in (around if halving else MULTIPLIERS)]:
            errors = _mean_errors(make(tried.float()), train)
            best, least = torch.where(errors < least, tried, best), torch.minimum(errors, least)
    final = make(best.float())
    return _Fit(final, _mean_errors(final, held_out), (HALVINGS,) * heads)


def fit_depthwise(pieces: Sequence[_Piece], fitted: Distilled, width: int) -> Tensor:
    """[H, E, w]: the convolution of each channel of the values that comes closest to what is left.

        min_c sum_n (r_n - sum_t c_t v_(n + t - (w - 1)/2))^2 / |target|^2 + RIDGE mean(diag) |c|^2

    with the residual r = target - A v; by the normal equations, in float64. Padded tokens count as 0, and
    nothing is asked of their rows.
    """
    _, heads, _, channels = pieces[0].target.shape
    gram = torch.zeros(heads, channels, width, width, dtype=torch.float64)
    moment = torch.zeros(heads, channels, width, dtype=torch.float64)
    for piece in pieces:
        t, target = piece.tensors, piece.target.double()
        with torch.no_grad():
            left = target - apply_distilled(moved(fitted, target.device), t, t.v)
        assert t.v is not None
        padding = (0, 0, width // 2, width // 2)
        shifted = functional.pad(clean_values(t.v, t.keep).double(), padding).unfold(2, width, 1)
        rows = clean_values(shifted.flatten(3), t.keep).view(shifted.shape)  # [B, H, N, E, w]
        weight = 1 / target.square().sum((-2, -1)).clamp(min=torch.finfo(torch.float32).tiny)
        weighted = rows * weight[:, :, None, None, None]
        gram += moved(torch.einsum("bhnes,bhnet->hest", weighted, rows), CPU)
        moment += moved(torch.einsum("bhnes,bhne->hes", weighted, left), CPU)
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = ridge.clamp(min=torch.finfo(torch.float64).tiny)[..., None, None]
    regular = gram + ridge * torch.eye(width, dtype=torch.float64)
    return torch.linalg.solve(regular, moment[..., None])[..., 0].float()


def _tokens(pieces: Sequence[_Piece], random: np.random.Generator) -> Tensor:
    """Of each head, up to SAMPLE_POINTS of its queries and active keys, [H, n, D] float64 on the CPU."""
    rows = []
    for t in (piece.tensors for piece in pieces):
        q, k = t.q.transpose(0, 1), t.k.transpose(0, 1)
        rows += [q.flatten(1, 2), k.flatten(1, 2) if t.keep is None else k[:, t.keep]]
    points = torch.cat(rows, 1)
    chosen = random.permutation(points.shape[1])[:SAMPLE_POINTS]
    return moved(points[:, moved(torch.from_numpy(chosen), points.device)].double(), CPU)


def _mean_errors(student: Distilled, pieces: Sequence[_Piece]) -> Tensor:
    """Mean squared relative error of each head, [H] float64 on the CPU."""
    there = moved(student, pieces[0].target.device)
    with torch.no_grad():
        return moved(torch.cat([piece.error(there) for piece in pieces]).double().mean(0), CPU)


def fit_slices(
    train: Sequence[_Piece], held_out: Sequence[_Piece], make: Maker, count: int, seed: int
) -> _Fit:
    """Slices chosen greedily among candidates, then tau of each head on the held-out examples."""
    random = np.random.default_rng(seed)
    candidates, norms = _directions(train, max(CANDIDATES, 2 * count), random)
    gram, moment = _products(train, make, candidates, random)
    chosen = torch.stack([_greedy(g, m, count) for g, m in zip(gram, moment, strict=True)])  # [H, L]
    slices = candidates.gather(1, chosen[..., None].expand(-1, -1, candidates.shape[2]))
    best = torch.zeros(len(slices), dtype=torch.float64)
    errors = torch.full_like(best, math.inf)
    for level in INVERSE_TEMPERATURES:
        tau = level / norms
        now = _mean_errors(make(slices, tau), held_out)
        best, errors = torch.where(now < errors, tau, best), torch.minimum(now, errors)
    return _Fit(make(slices, best), errors, (count,) * len(slices))


def _directions(
    pieces: Sequence[_Piece], count: int, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Unit vectors [H, count, D], principal ones first, then normal ones of the same covariance; and
    the root mean square norm of each head's tokens [H]."""
    directions, norms = [], []
    for rows in _tokens(pieces, random).numpy():
        centred = rows - rows.mean(0)
        values, vectors = np.linalg.eigh(centred.T @ centred / len(rows))  # ascending
        scale = np.sqrt(np.maximum(values, values[-1] * 1e-6))
        drawn = random.standard_normal((count, len(values))) * scale @ vectors.T
        stacked = np.concatenate([vectors.T[::-1], drawn])[:count]
        norm = np.linalg.norm(stacked, axis=1, keepdims=True)
        directions.append(stacked / np.where(norm > 0, norm, 1.0))
        norms.append(max(np.linalg.norm(rows) / math.sqrt(len(rows)), np.finfo(np.float32).tiny))
    return torch.from_numpy(np.stack(directions)).float(), torch.tensor(norms)


def _products(
    pieces: Sequence[_Piece], make: Maker, candidates: Tensor, random: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """<o_c, o_d> [H, C, C] and <o_c, target> [H, C] of the candidates' outputs on a few queries of a
    few examples, relative to |target|^2; float64."""
    heads, count, _ = candidates.shape
    gram = torch.zeros(heads, count, count, dtype=torch.float64)
    moment, examples = torch.zeros(heads, count, dtype=torch.float64), 0
    for index in random.permutation(len(pieces)):
        piece = pieces[index]
        order = random.permutation(piece.target.shape[2])[:SLICE_ROWS]
        rows = moved(torch.from_numpy(order), piece.target.device)
        singles = zip(_split(piece.tensors, 1), piece.target[:, :, rows].split(1), strict=True)
        for t, target in singles:
            single = _single_plans(t, moved(candidates, rows.device), rows, make)
            outputs = single.flatten(2)  # [H, C, rows * E]
            y = target[0].flatten(1)[..., None]
            scale = y.square().sum(1, keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
            gram += moved((outputs @ outputs.transpose(1, 2) / scale).double(), CPU)
            moment += moved((outputs @ y / scale)[..., 0].double(), CPU)
        examples += len(piece)
        if examples >= SLICE_EXAMPLES:
            break
    return gram / examples, moment / examples


def _single_plans(t: SiteTensors, slices: Tensor, rows: Tensor, make: Maker) -> Tensor:
    """What every slice alone gives to some queries of one example, ties in order: [H, C, rows, E]."""
    assert t.v is not None
    clouds = clouds_of(t.q, t.k, t.keep, None, slices)
    matching, table = match(clouds, *orders_of(clouds, "descending"), COUPLING), t.v.flatten(0, 2)
    result = t.v.new_zeros(())
    for index, keys in enumerate(matching.keys):
        values = table[keys[..., rows]]
        share = None if matching.shares is None else matching.shares[index][..., rows, None]
        result = result + (values if share is None else values * share)
    single = make(slices, slices.new_zeros(len(slices)))
    result = result * single.settings["output_factor"]
    return (times_share(result, t.keep) if single.share else result)[0]


def _greedy(gram: Tensor, moment: Tensor, count: int) -> Tensor:
    """Indices [count] whose outputs' mean comes close to the target, each the best one to add.

    |sum_S o / n - y|^2 = sum_{c, d in S} gram_cd / n^2 - 2 sum_{c in S} moment_c / n + |y|^2
    """
    chosen: list[int] = []
    with_chosen = torch.zeros_like(moment)  # sum over the chosen d of gram_cd
    quadratic = linear = 0.0
    for n in range(1, count + 1):
        quadratics = quadratic + 2 * with_chosen + gram.diagonal()
        costs = quadratics / n**2 - 2 * (linear + moment) / n
        costs[chosen] = math.inf
        index = int(costs.argmin())
        chosen.append(index)
        quadratic, linear = float(quadratics[index]), linear + float(moment[index])
        with_chosen = with_chosen + gram[:, index]
    return torch.tensor(chosen)
