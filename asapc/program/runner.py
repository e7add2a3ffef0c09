"""Running a model with some of its computation replaced by captured or rewritten graphs."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asapc.device import CPU, settle
from asapc.errors import AsapcError, SizeError
from asapc.formats.limits import MOST
from asapc.inputs.data import Batch, output_of
from asapc.inputs.faults import argument_names, batch_fault, data_fault, device_fault
from asapc.ir import Program, SiteTensors
from asapc.program.call import Tensors, known_of, other_size
from asapc.program.calls import tapped
from asapc.program.code import traced_places


class Runner:
    """Calls a model on batches: as it is, or with the programs' graphs in place.

    A program of the whole model (name "") is called itself.  Programs of modules stand in `model` during
    a call only: the user's model is left as it was.  What a rewrite has put into a graph is moved to the
    device of the batch, where the model is (asapc.device).
    gradients: outputs can be differentiated, unless the caller has switched that off.
    """

    def __init__(
        self, model: nn.Module | None, programs: Sequence[Program] = (), gradients: bool = False
    ) -> None:
        self.model = model
        self.gradients = gradients
        self.graphs: dict[str, nn.Module] = {p.name: p.graph for p in programs}
        self.sizes = [(program, Sizes.of(program)) for program in programs]
        self._device = CPU
        if model is None and "" not in self.graphs:
            raise ValueError("a program of the whole model, or a model, is needed")

    def __call__(self, batch: Batch) -> Any:
        """Raises InputError if the model fails, naming the example where one makes it."""
        try:
            return self._call(batch)
        except AsapcError:
            raise
        except Exception as error:
            lost = device_fault(error)
            if lost is not None:
                raise lost from error
            called = self.graphs.get("") or self.model
            assert called is not None
            fault = data_fault(error, batch, self._call, argument_names(called))
            if fault is None and self.graphs:  # where it may be ours
                raise
            raise fault or batch_fault(error, len(batch)) from error

    def _call(self, batch: Batch) -> Any:
        device = batch.device
        if device != self._device:
            for graph in self.graphs.values():
                settle(graph, device)
            self._device = device
        grad = torch.set_grad_enabled(self.gradients and torch.is_grad_enabled())
        with grad, contextlib.ExitStack() as stack:
            for program, sizes in self.sizes:
                check = partial(sizes.check, program.name)
                hook = program.graph.register_forward_pre_hook(check, prepend=True, with_kwargs=True)
                stack.callback(hook.remove)
            if "" in self.graphs:
                return output_of(self.graphs[""], batch)
            assert self.model is not None
            with installed(self.model, self.graphs):
                return output_of(self.model, batch)


@dataclass(frozen=True)
class Sizes:
    """What the tensors that a program takes are like.

    names: of its inputs.  limits: of the free sizes among those of its tensors.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensors, ...]
    limits: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, program: Program) -> Sizes:
        nodes = traced_places(program.graph)
        return cls(tuple(node.name for node in nodes), *known_of([node.meta["val"] for node in nodes]))

    def __str__(self) -> str:
        """ "x [any, 6 to 25, 64], mask [any, 6 to 25]" """
        pairs = zip(self.names, self.tensors, strict=True)
        return ", ".join(f"{name} [{', '.join(map(self._text, like.sizes))}]" for name, like in pairs)

    def _text(self, size: int | str) -> str:
        if isinstance(size, int):
            return str(size)
        low, high = self.limits.get(size, (0, MOST))
        if high < MOST:
            return f"{low} to {high}" if low else f"up to {high}"
        return f"from {low}" if low else "any"

    def check(self, program: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: `x * math.log(x.shape[1])` is traced with a number for the length, and
        nothing in its graph would fail at another."""
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if len(inputs) != len(self.names):
            return
        sizes: dict[str, Any] = {}
        for name, like, tensor in zip(self.names, self.tensors, inputs, strict=True):
            if tensor.dim() != len(like.sizes):
                continue  # the program itself says what it takes
            problem = other_size(like, tensor, self.limits, sizes)
            if problem is not None:
                raise SizeError(
                    f"{program}{': ' if program else ''}the program holds for {self}",
                    got=f"{name}: {problem}",
                    help="the code branches on a size, or computes a number from it, and a "
                    "program follows one branch: keep to these sizes",
                )


class Tap:
    """Runs lifted programs and returns the tensors at the named sites, in the order of the names."""

    def __init__(self, model: nn.Module | None, lifted: Sequence[Program], sites: Sequence[str]) -> None:
        self._see: See = _unseen
        self.sites = tuple(sites)
        programs = [replace(program, graph=tapped(program, self._record)) for program in lifted]
        self._run = Runner(model, programs)

    def __call__(self, batch: Batch) -> tuple[Any, list[SiteTensors]]:
        """(the model's output, one SiteTensors per site)."""
        activations: dict[str, SiteTensors] = {}
        output = self.watch(batch, activations.__setitem__)
        return output, [activations[site] for site in self.sites]

    def watch(self, batch: Batch, see: See) -> Any:
        """The model's output. `see` is called at every site in turn; nothing is kept."""
        self._see = see
        try:
            return self._run(batch)
        except _OfWatcherError as wrapped:
            raise wrapped.error from wrapped.error.__cause__
        finally:
            self._see = _unseen

    def _record(self, site: str, q: Tensor, k: Tensor | None, **others: Tensor | None) -> None:
        points = SiteTensors.of_scores(q) if k is None else SiteTensors(q, k)
        try:
            with torch.autocast(q.device.type, enabled=False):  # the model's own is not the watcher's
                self._see(site, replace(points, **others))  # type: ignore[arg-type]
        except Exception as error:  # which is no fault of the model or its data
            raise _OfWatcherError(error) from error


class _OfWatcherError(BaseException):
    """No Exception, so that neither the runner nor the model takes it for an error of the model."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


See = Callable[[str, SiteTensors], None]
_PLAYED = ("forward", "_forward_hooks", "_forward_pre_hooks")  # what a program replaces in a module


def _unseen(site: str, seen: SiteTensors) -> None:
    """Ignores a site: nobody watches between two runs."""


@contextlib.contextmanager
def installed(model: nn.Module, modules: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let programs stand for the modules of these names, which keep all that others read from them.

    A program has the hooks of its module.
    """
    changed = [(vars(model.get_submodule(name)), program) for name, program in modules.items()]
    before = [{name: own[name] for name in _PLAYED if name in own} for own, _ in changed]
    try:
        for own, program in changed:
            own.update({name: OrderedDict() for name in _PLAYED[1:]}, forward=partial(program))
        yield
    finally:
        for (own, _), held in zip(changed, before, strict=True):
            own.pop("forward", None)
            own.update(held)
