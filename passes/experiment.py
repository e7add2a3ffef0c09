"""Experiment: a part of a graph as a float64 function of tensors of our choosing, at any legal size."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from asapc.formats.limits import allow, fixed_size, limits_of
from asapc.passes.cut import PROBE_BATCH, PROBE_LENGTHS, Cut, evaluate
from asapc.passes.products import Canonical

EXACT = 1e-9  # relative error in float64 of what is the convention, to rounding
STABILISED = 1e-6  # the same with a constant too small to matter, such as log(1 / N + 1e-8)
MANY = 33  # examples at which what was found on a few is checked; fewer of large maps
MOST_EXAMPLES = 512  # that are tried where examples may be counted
LONGER, LONGEST = (40, 150), 520  # tokens of one example, likewise; the last or four times the data's
PROBE_WORK = 3e7  # entries of all half-steps up to which such a check goes
FARTHEST_WORK = 4e8  # the same of several examples, or past a number that positions are compared with

Result = TypeVar("Result")
Lengths = dict[Any, int]
"""A number for every size that is free, by its symbol."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operators on small tensors: several threads would wait for each other longer than they compute,
    the more so on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class NoFit(Exception):
    """Why no convention reproduces what was observed; error is that of the best one tried, if any.

    reached: how many experiments were passed before, where several explanations are tried.
    """

    def __init__(self, reason: str, error: float | None = None, reached: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.error, self.reached = reason, error, reached

    def __str__(self) -> str:
        return self.reason if self.error is None else f"{self.reason}; relative error {self.error:.2g}"


def snapped(value: float) -> float:
    """A number that somebody wrote down, if it is within 1e-7 of one of six digits."""
    if value == 0.0 or not math.isfinite(value):
        return value
    rounded = float(f"{value:.6g}")
    return rounded if abs(rounded - value) <= 1e-7 * abs(value) else value


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to their largest entry; infinite where it is not a number."""
    if not theirs.numel():
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    error = float((ours - theirs).abs().amax() / theirs.abs().amax().clamp(min=1e-300))
    return math.inf if error != error else error


def outcome(experiments: Callable[[], Result]) -> Result | NoFit:
    """What the experiments give, or why they give nothing or cannot be made."""
    try:
        return experiments()
    except NoFit as no_fit:
        return no_fit.with_traceback(None)
    except Exception as error:  # the region is the user's code: whatever it raises is a reason
        line = str(error).splitlines()[0][:200] if str(error) else ""
        if "'NoneType'" in line and line.startswith("int()"):  # of a size that SymPy has no number for
            return NoFit("a size in the region depends on the data")
        return NoFit(f"the region cannot be run on its own: {type(error).__name__}: {line}")


def once(known: dict[object, Result | NoFit], key: object, experiments: Callable[[], Result]) -> Result:
    """What the experiments give, or gave for another region with this key.  Raises NoFit."""
    result = known[key] if key in known else outcome(experiments)
    known[key] = result
    if isinstance(result, NoFit):
        raise result
    return result


def first_fit(tries: Iterable[Callable[[], Result]]) -> Result:
    """What the first try that fits gives.  Raises the NoFit of the very first where none does."""
    failures = []
    for attempt in tries:
        try:
            return attempt()
        except NoFit as no_fit:
            failures.append(no_fit)
    raise failures[0]


def assigned(sizes: Iterable[tuple[Any, int]]) -> Lengths:
    """A number for every symbol in the sizes, the first that one is given."""
    numbers: Lengths = {}
    for size, value in sizes:
        if isinstance(size, torch.SymInt):
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                numbers.setdefault(symbol, value)
    return numbers


def normal(size: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random numbers of a standard deviation of 1, float64."""
    return torch.randn(tuple(size), generator=generator, dtype=torch.float64)


class Sized:
    """What is run at sizes of our choosing.

    leads, tokens: sizes as the graph has them: of examples, and of heads that have an axis; of queries
    and keys.  sizes: numbers for all of them at which it is observed, the smallest first.
    """

    cut: Cut
    leads: Sequence[Any]
    tokens: Sequence[Any]
    sizes: list[Lengths]

    @property
    def few(self) -> Lengths:
        return self.sizes[0]

    @property
    def examples(self) -> set[Any]:
        """The symbols of what stands before rows and columns."""
        return {*assigned((size, 1) for size in self.leads)}

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def normal(self, shape: Sequence[int]) -> Tensor:
        return normal(shape, self.generator)

    def small(self, more: int = 5, examples: int = 0) -> list[Lengths]:
        """Small, different numbers for the sizes that are free, and a second time with `more` tokens and
        so many more examples; once where none is free."""
        both, free = [], _free([*self.tokens, *self.leads])
        for longer, count in ((0, PROBE_BATCH), (more, PROBE_BATCH + examples)):
            numbers = [*(length + longer for length in PROBE_LENGTHS), *[count] * len(self.leads)]
            wanted = assigned(zip([*self.tokens, *self.leads], numbers, strict=True))
            both.append(self.cut.lengths(_within(free, [wanted[symbol] for symbol in free])))
        return both if both[0] != both[1] else both[:1]

    def larger(self, depth: float) -> list[Lengths]:
        """Sizes at which what small ones show is checked: many examples of few tokens, one example of
        more and more, past every number that positions are compared with.

        depth: half-steps of all heads of one example.
        Raises ValueError where a check past such a number is too expensive to be made.
        """
        cut, lengths = self.cut, self.few
        examples, places = _free(self.leads), _free(self.tokens)
        places = {symbol: size for symbol, size in places.items() if symbol not in examples}
        limits = [limits_of(size.node.shape_env, symbol)[1] for symbol, size in places.items()]

        def of_examples(count: int) -> Lengths:
            return {**lengths, **_within(examples, [count] * len(examples))}

        def of_tokens(count: int) -> Lengths:
            unequal = [count - 3 * place for place in range(len(places))]  # of queries and keys
            return {**of_examples(1), **_within(places, unequal)}

        of_one = math.prod(evaluate(size, lengths) for size in self.tokens) * depth
        many = min(MANY, max(PROBE_BATCH + 1, int(FARTHEST_WORK / max(of_one, 1))))
        checked = [of_examples(many)] if examples else []
        most = max(limits, default=0)
        longest = min(max([LONGEST, *(4 * size.node.hint for size in places.values())]), most)
        longest = min(longest, int(math.sqrt(PROBE_WORK / depth)))
        most_work = max(PROBE_WORK, cut.largest(of_tokens(1)))  # of what has a size of its own, too
        while cut.largest(of_tokens(longest)) > most_work:  # some code forms [N, M, M]
            longest = longest * 3 // 4
        thresholds, elsewhere = cut.thresholds()
        beyond = max(thresholds, default=0) * 9 // 8
        if examples and MANY < beyond <= MOST_EXAMPLES:
            checked.append(of_examples(beyond))
        beyond = min(beyond, most)
        if beyond > longest and max(beyond**2 * depth, cut.largest(of_tokens(beyond))) > FARTHEST_WORK:
            raise ValueError(f"what it does from position {beyond} on is too expensive to be tried")
        for count in (*(n for n in LONGER if n < longest), max(longest, beyond)):
            if count > max((lengths[symbol] for symbol in places), default=count):
                checked.append(of_tokens(count))
        if elsewhere:  # nobody has seen what it does with more
            for symbol, size in (places | examples).items():
                tried = max(sizes.get(symbol, 0) for sizes in (*checked, lengths))
                allow(size.node.shape_env, symbol, max(tried, size.node.hint))
        return [sizes for sizes in checked if sizes != lengths]

    def check_larger(
        self, depth: float, error_at: Callable[[Lengths], float], limit: float, what: str
    ) -> None:
        """Hold what small sizes show against larger ones: log(1 / N + 1e-6) is log(1 / N) for a few.

        error_at: relative, at some sizes.  what: there is where it is above the limit.  Raises NoFit.
        """
        for at in self.larger(depth):
            error = error_at(at)
            if not error <= limit:
                examples, *tokens = (evaluate(x, at) for x in (*self.leads[:1], *self.tokens))
                sizes = " and ".join(map(str, tokens))
                raise NoFit(f"another {what} for {examples} examples of {sizes} tokens", error)


class Experiment(Sized):
    """inputs, masks -> output, with canonical axes.

    masks: boolean tensors of the data that enter besides the inputs, in their own layout.  hidden: what
    they are taken to say of a padded token.
    """

    hidden = True

    def __init__(
        self,
        graph: GraphModule,
        inputs: Sequence[Canonical],
        output: Canonical,
        inside: Container[Node],
        masks: Sequence[Node] = (),
        precision: torch.dtype = torch.float64,
    ) -> None:
        self.inputs, self.output = tuple(inputs), output
        self.cut = Cut(graph, [tensor.node for tensor in inputs], output.node, inside, masks, precision)

    def dims(self, tensor: Canonical, lengths: Lengths) -> tuple[int, ...]:
        """The shape with canonical axes, as many as the graph has."""
        return tuple(evaluate(size, lengths) for size in tensor.shape)

    def shape(self, tensor: Canonical, lengths: Lengths) -> tuple[int, ...]:
        """The shape [B, H, X, Y], with one head where heads are merged into the batch."""
        dims = self.dims(tensor, lengths)
        return dims if len(dims) == 4 else (dims[0], 1, *dims[1:])

    def shapes(self, lengths: Lengths) -> list[tuple[int, ...]]:
        """Of the inputs."""
        return [self.shape(tensor, lengths) for tensor in self.inputs]

    def raw(self, tensor: Canonical, value: Tensor, lengths: Lengths) -> Tensor:
        """A value with canonical axes as the graph's own tensor has them."""
        return tensor.raw(value, self.cut.shape_of(tensor.node, lengths))

    def run(self, values: Sequence[Tensor], lengths: Lengths, masks: Sequence[Tensor] = ()) -> Tensor:
        """The output with canonical axes, float64."""
        pairs = zip(self.inputs, values, strict=True)
        raw = [self.raw(tensor, value, lengths) for tensor, value in pairs]
        return self.output.canonical(self.cut.run([*raw, *masks], lengths)).double()

    def masks(self, lengths: Lengths, padded: Tensor | None = None) -> list[Tensor]:
        """The masks with these tokens padded."""
        made = []
        for node in self.cut.masks:
            mask = torch.full(self.cut.shape_of(node, lengths), not self.hidden)
            if padded is not None:
                mask[..., padded] = self.hidden
            made.append(mask)
        return made

    def observe(self, values: Sequence[Tensor], lengths: Lengths, padded: Tensor | None = None) -> Tensor:
        """The output [B, H, X, Y], with these tokens padded."""
        result = self.run(values, lengths, self.masks(lengths, padded))
        return result.reshape(self.shape(self.output, lengths))


def _free(sizes: Sequence[Any]) -> dict[Any, torch.SymInt]:
    """The symbols of sizes, each with a size that it is in."""
    return {
        symbol: size for size in sizes if isinstance(size, torch.SymInt) and fixed_size(size) is None
        for symbol in sorted(size.node.expr.free_symbols, key=str)
    }  # fmt: skip


def _within(symbols: Mapping[Any, torch.SymInt], wanted: Sequence[int]) -> Lengths:
    """The numbers, or what is next to them in the limits of the program."""
    limits = {symbol: limits_of(size.node.shape_env, symbol) for symbol, size in symbols.items()}
    return {
        symbol: min(max(number, low), high)
        for (symbol, (low, high)), number in zip(limits.items(), wanted, strict=True)
    }
