"""The data that passes between stages: conventions, sites, programs.

Units: scores and duals are divided by epsilon throughout. Only the ratio scale / epsilon of a
teacher can be identified from its behaviour, so the score multiplier carries both and every formula
below is the textbook one at epsilon = 1. A dual times the teacher's own epsilon is in cost units.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch
from torch.fx import GraphModule, Node

from asapc.formats.records import OPTIONAL, Record, optional

Side = Literal["row", "column"]
Mask = Literal["none", "key", "query", "both"]
Coupling = Literal["interpolated", "monotone"]  # of sorted clouds with different sizes
Ties = Literal["shared", "descending", "ascending"]  # mass shared, or the token order of a stable sort


@dataclass(frozen=True)
class OutputFactor(Record):
    """Attention = factor * P, where a query row of P weighs 1/N and an active key column 1/M.

    factor = coefficient * N^queries * M^keys * n^active * n_q^shown, with N queries, M keys (padding
    included), n active keys and n_q queries that no mask hides; shown: None where queries and keys do
    not have masks of their own.  The released Sinkformers multiply by M: OutputFactor(keys=1).
    """

    coefficient: float = 1.0
    queries: float = 0
    keys: float = 0
    active: float = 0
    shown: float | None = optional()

    def value(self, queries: int, keys: int, active: float = 1.0) -> float:
        """Of numbers of tokens, without that of shown queries."""
        return float(self.coefficient * queries**self.queries * keys**self.keys * active**self.active)

    def __str__(self) -> str:
        powers = (("N", self.queries), ("M", self.keys), ("n", self.active), ("n_q", self.shown))
        names = [name if power == 1 else f"{name}^{power:g}" for name, power in powers if power]
        if self.coefficient != 1.0 or not names:
            names.insert(0, f"{self.coefficient:g}")
        return "*".join(names)


@dataclass(frozen=True)
class Stabiliser(Record):
    """A constant that keeps a loop in the exp domain from dividing by 0, see operators.stabilised.

    form:        "scaling" vectors a and b multiply exp(S) at the end, or the "plan" itself is divided.
    kind:        the constant is added to a sum ("add") or is its least value ("clamp").
    start:       what is subtracted before exp: nothing ("plain"), the maximum of the "row", of the
                 "matrix" or of the whole "tensor"; "softmax": the first half-step has no constant.
    shares:      rows are brought to 1/N and columns to 1/M, not to 1.
    start_share: scaling vectors start at 1/N and 1/M, not at 1.
    """

    form: Literal["scaling", "plan"]
    kind: Literal["add", "clamp"]
    constant: float
    start: Literal["plain", "row", "matrix", "tensor", "softmax"] = "plain"
    shares: bool = False
    start_share: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.constant < math.inf:
            raise ValueError("constant must be positive and finite")

    def __str__(self) -> str:
        sign = "+" if self.kind == "add" else "at least"
        return f"sums {sign} {self.constant:g}"

    @classmethod
    def of(
        cls, form: str, kind: str, constant: float, start: str, shares: bool, start_share: bool
    ) -> Stabiliser:
        """From what a file or an operator call holds. Raises ValueError for anything unknown."""
        return cls(form, kind, constant, start, bool(shares), bool(start_share))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Written(Record):
    """The order in which a loop in the log domain adds its terms. It decides what becomes of scores so
    low that nothing else keeps a digit next to them, see operators.plan.

    form:   every half-step is a log_softmax ("softmax") or subtracts a logsumexp from scores ("logs");
            duals that are formed anew and added in the end, those of the rows first ("duals") or last
            ("reversed") or with one another ("summed"), or that are changed ("increments").
    shares: uniform masses are 1/N and 1/M, not 1.
    """

    form: Literal["softmax", "logs", "duals", "reversed", "summed", "increments"]
    shares: bool = False


WRITTEN: tuple[Any, ...] = get_args(get_type_hints(Written)["form"])


@dataclass(frozen=True)
class Ending(Record):
    """Where a loop ends before its half-steps are done, for all examples of a call at once.

    moves:     what a half-step on rows changes: their "duals" f, or their "scalings" exp(f).
    threshold: the loop ends after a half-step that changes them by at most this, in the mean over
               examples, heads and rows. A NaN ends nothing.
    summed:    the change is the mean over examples and heads of the sums over rows.
    after:     half-steps that still follow.
    ones:      the duals are those of masses of 1 where none are given, not of 1/N and 1/M.
    """

    moves: Literal["duals", "scalings"]
    threshold: float
    summed: bool = False
    after: int = 0
    ones: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.threshold < math.inf or self.after < 0:
            raise ValueError("threshold and after must be at least 0, and finite")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Ending | None:
        """From an operator's settings by name; None without a threshold. Raises ValueError or TypeError
        for anything unknown."""
        if settings["threshold"] is None:
            return None
        return cls(*(settings[each.name] for each in fields(cls)))

    def masses(
        self, log_mu: torch.Tensor | None, log_nu: torch.Tensor | None, scores: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The logarithms of the masses with which the duals are formed, None for uniform ones."""
        one = scores.new_zeros(1) if self.ones else None
        return one if log_mu is None else log_mu, one if log_nu is None else log_nu

    def change(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The change of f [B, H, N] by a half-step on rows, to be compared with the threshold."""
        if self.moves == "scalings":
            before, after = before.exp(), after.exp()
        return (after - before).abs().mean() * (before.shape[-1] if self.summed else 1)


MOVES: tuple[Any, ...] = get_args(get_type_hints(Ending)["moves"])


class Kind(Record, ABC):
    """A convention: what a teacher computes at a site, see also operators.banded.

    shown: what its JSON has besides its fields, in words.
    """

    shown: ClassVar[tuple[str, ...]] = ("operator",)

    @property
    @abstractmethod
    def mask(self) -> Mask: ...

    @property
    @abstractmethod
    def operator(self) -> str:
        """The lossless one, see operators.catalogue."""

    def to_json(self) -> dict[str, Any]:
        return {**{name: str(getattr(self, name)) for name in self.shown}, **super().to_json()}


FACTOR: Mapping[str, Any] = {"key": "output_factor_terms"}  # JSON has the readable formula, too


@dataclass(frozen=True)
class FiniteLoop(Kind):
    """The settings that all finite loops have.

    half_steps:       T, number of dual updates; the first one is on first_side.
    score_multiplier: scale / epsilon, by which scores are multiplied.
    """

    shown: ClassVar[tuple[str, ...]] = ("operator", "last_side", "output_factor")

    half_steps: int
    first_side: Side
    score_multiplier: float

    @property
    def last_side(self) -> Side:
        if self.half_steps % 2 == 1:
            return self.first_side
        return "column" if self.first_side == "row" else "row"

@dataclass(frozen=True)
class Convention(FiniteLoop):
    """The exact finite loop a teacher runs: sides, half-steps, scores and mass.

    score_multiplier: scale / epsilon, so that scores are score_multiplier * q k^T + bias.
    mask:             "key": padded keys get no attention, padded queries keep their mass. "query":
                      padded queries get nothing and do not count in the sums of columns. "both": queries
                      and keys are hidden, by one mask or two.
    bias:             there is an additive [B|1, H|1, N, M] score bias.
    early_stop:       the teacher's code stops early on a small residual; what the stop leaves out was
                      tried, see passes.early_stop.
    stabiliser:       a constant in the divisions of a loop in the exp domain, None if there is none. The
                      lossless operator keeps it; duals are predicted as if it were not there, which is
                      measured like every other error.
    """

    operator: ClassVar[str] = "sinkhorn"

    output_factor: OutputFactor = field(default_factory=OutputFactor, metadata=FACTOR)
    mask: Mask = "none"
    bias: bool = False
    early_stop: bool = False
    stabiliser: Stabiliser | None = field(default=None, metadata=OPTIONAL)

    @property
    def hides_queries(self) -> bool:
        return self.mask in ("query", "both")


@dataclass(frozen=True)
class EspConvention(Kind):
    """The exact sliced-plan map an ESP teacher computes (ESPFormer, Algorithm 1).

    softsort_temperature: t of SoftSort, in squared units of the projections; None for exact sorting.
    inverse_temperature:  tau of the slice weights softmax(-tau D_l).
    squared_cost:         D_l sums |q - k|^2 (the paper) instead of |q - k| (the released code).
    mean_cost:            D_l is divided by the number of queries.
    slices:               L, number of learnt or frozen directions; None for the coordinate axes.
    output_factor:        multiplies the map, whose rows otherwise sum to 1.
    query_power, key_power: powers of N and M, padding included, that also multiply it.
    slice_weights:        the slices have their own weights, which multiply exp(-tau D_l).
    mask:                 "key" if a mask takes padded tokens out of the sort.
    coupling:             of unequal numbers of queries and keys, see operators.ranks; None where the
                          layer always has as many of either, and every coupling is the same.
    ties:                 what exact sorting does with equal projections: their tokens share the mass
                          (Eq. 5, as soft sorts do), or keep the order of the tokens in a stable sort,
                          largest or smallest first.
    """

    softsort_temperature: float | None
    inverse_temperature: float
    squared_cost: bool = False
    mean_cost: bool = False
    slices: int | None = None
    output_factor: float = 1.0
    mask: Mask = "none"
    coupling: Coupling | None = None
    ties: Ties = "shared"
    query_power: int = 0
    key_power: int = 0
    slice_weights: bool = False

    @property
    def operator(self) -> str:
        return "esp_hard" if self.softsort_temperature is None else "esp_soft"


@dataclass(frozen=True)
class HalfPlan(Record):
    """One of the two entropic problems of a LOT layer, tokens against pivots.

    half_steps, tokens_first: the finite loop from zero duals.  score_multiplier: of token . pivot.
    """

    half_steps: int
    tokens_first: bool
    score_multiplier: float


@dataclass(frozen=True)
class LotConvention(Kind):
    """The exact glued plan a LOT teacher computes (LOTFormer, Eqs. 1-4).

    queries, keys: the plans between queries and pivots and between pivots and keys.
    pivots:        R, the rank.
    output_factor: of the glued plan, whose entries sum to 1; queries and keys count active tokens.
    mask:          "key" if a mask takes the mass of padded tokens away.
    """

    operator: ClassVar[str] = "lot"
    shown: ClassVar[tuple[str, ...]] = ("operator", "output_factor")

    queries: HalfPlan
    keys: HalfPlan
    pivots: int
    output_factor: OutputFactor = field(default_factory=lambda: OutputFactor(queries=1), metadata=FACTOR)
    mask: Mask = "none"


Marginal = Literal["uniform", "constant", "input"]


def is_damping(value: Any) -> bool:
    """Whether it is a number above 0 and at most 1 for rows, and one for columns."""
    return (
        isinstance(value, list | tuple) and len(value) == 2
        and all(isinstance(x, int | float) and 0.0 < x <= 1.0 for x in value)
    )  # fmt: skip


@dataclass(frozen=True)
class PlanConvention(FiniteLoop):
    """The finite loop that makes a teacher's plan from scores or costs, wherever they come from.

    score_multiplier, half_steps, first_side, output_factor, stabiliser: as in Convention. The multiplier
                     applies to the scores as they are given, and is negative for costs.
    by_head:         a factor of the score multiplier for every head, if each has its own epsilon; None if
                     they share one.
    log:             the loop returns the logarithm of factor * P, not factor * P.
    source_marginal, target_marginal: mu and nu are uniform, depend on parameters and sizes alone
                     ("constant", such as those of a dustbin), or on what the model is given ("input").
                     Where one is given, factor = 1 is the plan with these very marginals.
    damping:         factors of the new duals of rows and columns in an unbalanced loop; None if every
                     half-step closes its side.
    mask:            "none": what a teacher hides has low scores, or no mass.
    ending:          where the loop may end early, if that changes the plan.
    """

    operator: ClassVar[str] = "plan"

    output_factor: OutputFactor = field(default_factory=OutputFactor, metadata=FACTOR)
    log: bool = False
    source_marginal: Marginal = "uniform"
    target_marginal: Marginal = "uniform"
    stabiliser: Stabiliser | None = field(default=None, metadata=OPTIONAL)
    by_head: tuple[float, ...] | None = field(default=None, metadata=OPTIONAL)
    damping: tuple[float, float] | None = field(default=None, metadata=OPTIONAL)
    mask: Mask = "none"
    written: Written | None = field(default=None, metadata=OPTIONAL)
    ending: Ending | None = field(default=None, metadata=OPTIONAL)

    @property
    def balanced(self) -> bool:
        """Whether both marginals are uniform, and every half-step closes its side."""
        return self.source_marginal == self.target_marginal == "uniform" and self.damping is None

    @property
    def loop(self) -> Convention:
        """The loop on the scores, if both marginals are uniform."""
        return Convention(
            self.half_steps, self.first_side, self.score_multiplier, self.output_factor,
            stabiliser=self.stabiliser,
        )  # fmt: skip


@dataclass(frozen=True)
class SiteTensors:
    """The tensors of one attention site on one batch.

    q: [B, H, N, D]; k: [B, H, M, D]; keep: [B, M] bool (True = active key) or None;
    bias: broadcastable to [B, H, N, M], in units of epsilon, or None.
    query_keep: [B, N] bool, the queries that carry mass, or None for all. A Sinkhorn layer's padded
    queries keep theirs; those of ESP and LOT layers do not.
    v: [B, H, M, E], or None where the model returns the map itself and multiplies elsewhere.
    log_mu, log_nu: broadcastable to [B, H, N] and [B, H, M], or None where marginals are uniform.
    scored: a site that is given its scores has them as q and the unit vectors as k: q k' are the scores.
    """

    q: torch.Tensor
    k: torch.Tensor
    keep: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    query_keep: torch.Tensor | None = None
    v: torch.Tensor | None = None
    log_mu: torch.Tensor | None = None
    log_nu: torch.Tensor | None = None
    scored: bool = False

    @classmethod
    def of_scores(cls, scores: torch.Tensor) -> SiteTensors:
        """Of a site that is given its scores [B, H, N, M]."""
        batch, heads, _, keys = scores.shape
        units = torch.eye(keys, dtype=scores.dtype, device=scores.device)
        return cls(scores, units.expand(batch, heads, -1, -1), scored=True)


@dataclass(frozen=True)
class Distilled:
    """Another operator fitted to a site, with its settings by name; the others have their defaults.

    A tensor among the settings becomes a buffer of the graph.
    operator: a fitted one, or its hybrid form, see operators.catalogue.
    share: the result is multiplied by the share of active keys, which is the mass of a padded loop that
    ends on columns; the operator's own plan has mass 1.
    """

    operator: str
    settings: Mapping[str, Any]
    share: bool = False


@dataclass(frozen=True)
class Stop:
    """A place where a teacher's loop may end early: if the residual is at most the threshold.

    threshold: None if the code does not show it.  number: among all comparisons in a trace.
    """

    residual: Node
    threshold: float | None
    number: int


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module in a captured graph.

    name:            of the module, dotted, within the captured one; "" for the captured one itself.
    args, kwargs, output: as in the trace; their tensors are fake.
    inputs, outputs: the nodes of their tensors, in the order of pytree.
    start, end:      places of the graph's nodes that were traced in the call.
    hooked:          it includes the module's hooks; a module that has any is also listed without them.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    start: int
    end: int
    hooked: bool = False


@dataclass
class Program:
    """A captured computation: the whole model (name "") or one of its modules (dotted name).

    graph:          functional ATen graph with the original calling convention.
    args, kwargs:   the example call it was captured with.
    dynamic_shapes: as passed to torch.export, to capture a rewritten graph again.
    stops:          data-dependent stops that were traced with the full budget, in order.
    calls:          the calls of modules inside, by nodes of this graph; none in graphs made from it.
    captured:       the program as it was captured, if a pass has rewritten it before matching.
    softmax:        attention that only normalises rows is a site, too: a loop of one half-step.
    """

    name: str
    graph: GraphModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    stops: tuple[Stop, ...] = ()
    calls: tuple[ModuleCall, ...] = ()
    captured: Program | None = None
    softmax: bool = False

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The tensors in its graph that are not trained, by name."""
        attributes = vars(self.graph).items()
        tensors = {name: value for name, value in attributes if isinstance(value, torch.Tensor)}
        return dict(self.graph.named_buffers()) | tensors

    @property
    def untouched(self) -> Program:
        """As it was captured."""
        return self.captured or self
