"""asapc.explain: what became of the graphs that torch.compile(model, backend="asapc") was given."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._guards import CompileContext
from torch.fx import GraphModule

from asapc.inputs.teacher import uncompiled
from asapc.passes.analyse import LeftAlone, Site
from asapc.passes.branches import text_of
from asapc.passes.dynamo import running_forwards
from asapc.report.tables import convention_text


@dataclass(frozen=True)
class Facts:
    """What became of one of Dynamo's graphs.

    sites: operators now, by the modules that they are in; left: loops that stay the model's own code.
    reason: why all of it does.  broken_at: the line of the model at which Dynamo breaks the graph;
    broken_for: why a loop there could not be replaced, if that was tried.
    """

    inner: str
    sites: tuple[Site, ...] = ()
    left: tuple[LeftAlone, ...] = ()
    reason: str | None = None
    broken_at: str | None = None
    broken_for: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner,
            "sites": [
                {"name": x.name, "replay_error": x.replay_error, "convention": x.convention.to_json()}
                for x in self.sites
            ],
            "left": [{"name": x.name, "reason": x.reason} for x in self.left],
            "reason": self.reason,
            "broken_at": self.broken_at,
            "broken_for": self.broken_for,
        }

    def lines(self) -> Iterator[str]:
        for site in self.sites:
            convention = site.convention.to_json()
            yield f"  {site.name}: asapc::{convention['operator']}, {convention_text(convention)}"
        for left in self.left:
            yield f"  {left.name}: left as it is: {left.reason}"
        if self.reason is not None:
            yield f"  all of it is left as it is: {self.reason}"
        elif not self.sites and not self.left:
            yield "  no loop of rows and columns, and no attention"
        if self.broken_at is not None:
            instead = " here; torch.compile(asapc.compile(model, data).model) replaces it"
            why = instead if self.broken_for is None else f": {self.broken_for}"
            yield (
                f"  ends at a graph break, {self.broken_at}: a loop that crosses it stays as it is{why}"
            )


def broken_at(graph: GraphModule) -> str | None:
    """The line of the model at which Dynamo could not go on; None if the graph is whole."""
    why = getattr(graph, "compile_subgraph_reason", None)
    if why is None or not why.graph_break or not why.user_stack:
        return None
    frame = why.user_stack[-1]
    return text_of((frame.filename, frame.lineno))


@dataclass(frozen=True)
class Explanation:
    """What the backend did with every graph it got from Dynamo, in the order of the calls."""

    graphs: tuple[Facts, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"graphs": [facts.to_dict() for facts in self.graphs]}

    def __str__(self) -> str:
        if not self.graphs:
            return (
                'no graph: compile with torch.compile(model, backend="asapc") and call it first. If you '
                "did, Dynamo skips its code, and torch.compile(asapc.compile(model, data).model) does not"
            )
        blocks = [
            "\n".join([f"graph {number}, compiled by {facts.inner}", *facts.lines()])
            for number, facts in enumerate(self.graphs, 1)
        ]
        return "\n".join(blocks)

    __repr__ = __str__


@dataclass(frozen=True)
class _Seen:
    """tensors: that the graph was given; modules: whose forwards were running; kinds: of the modules that
    its code is in."""

    facts: Facts
    tensors: tuple[weakref.ref[Tensor], ...]
    modules: tuple[weakref.ref[nn.Module], ...]
    kinds: frozenset[type]

    def belongs_to(self, model: nn.Module) -> bool:
        """Whether the graph is the model's: it ran in its forward, or holds its weights; if neither has
        weights, by its modules."""
        own = {*model.modules()}
        if any(ref() in own for ref in self.modules):
            return True
        weights = {id(x) for x in (*model.parameters(), *model.buffers())}
        alive = [x for x in (ref() for ref in self.tensors) if x is not None]
        if weights or any(isinstance(x, nn.Parameter) for x in alive):
            return any(id(x) in weights for x in alive)
        return bool(self.kinds & {*map(type, own)})


_SEEN: dict[Any, _Seen] = {}  # by Dynamo's number of the compilation, which it may begin anew


def note(facts: Facts, graph: GraphModule, inputs: Sequence[Any], model: nn.Module | None = None) -> None:
    """Keep what became of a graph, for explain.  model: whose loop broke it."""
    stacks = [(node.meta.get("nn_module_stack") or {}).values() for node in graph.graph.nodes]
    kinds = frozenset(kind for stack in stacks for _, kind in stack if isinstance(kind, type))
    if model is not None:
        kinds, inputs = kinds | {type(model)}, [*inputs, *model.parameters()]
    tensors = tuple(weakref.ref(x) for x in inputs if isinstance(x, Tensor))
    number = CompileContext.current_compile_id() or object()
    _SEEN.pop(number, None)
    running = tuple(weakref.ref(given["self"]) for given in running_forwards())
    _SEEN[number] = _Seen(facts, tensors, running, kinds)


def explain(model: nn.Module | None = None) -> Explanation:
    """Explain what torch.compile(model, backend="asapc") did to a model after its first call.

    model: the module, or the result of torch.compile; all models if None. Print the result, or call its
    to_dict().
    """
    module = None if model is None else uncompiled(model)
    graphs = [x for x in _SEEN.values() if module is None or x.belongs_to(module)]
    return Explanation(tuple(x.facts for x in graphs))
