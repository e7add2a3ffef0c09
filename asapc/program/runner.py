"""Running a model with some of its computation replaced by captured or rewritten graphs."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asapc.device import CPU, settle
from asapc.errors import AsapcError, InputError
from asapc.inputs.data import Batch, output_of
from asapc.inputs.faults import argument_names, data_fault, device_fault
from asapc.ir import Program, SiteTensors
from asapc.program.call import Tensors, known_of, other_size, sizes_text
from asapc.program.calls import tapped
from asapc.program.code import traced_places


class Runner:
    """Calls a model on batches: as it is, or with the programs' graphs in place.

    A whole-model program (name "") is called itself.  Programs of modules are put into `model` for
    the length of a call and taken out again: the user's model object is left as it was.  What a rewrite
    has put into a graph is brought to where the batch is; the model is there (asapc.device).
    gradients: outputs can be differentiated, where the caller has not switched that off.
    """

    def __init__(
        self, model: nn.Module | None, programs: Sequence[Program] = (), gradients: bool = False
    ) -> None:
        self.model = model
        self.gradients = gradients
        self.graphs: dict[str, nn.Module] = {p.name: p.graph for p in programs}
        self.limited = [_Limited.of(program) for program in programs]
        self._device = CPU
        if model is None and "" not in self.graphs:
            raise ValueError("a program of the whole model, or a model, is needed")

    def __call__(self, batch: Batch) -> Any:
        """Raises InputError, which names the example, where the model fails because of one."""
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
            if fault is None:
                raise
            raise fault from error

    def _call(self, batch: Batch) -> Any:
        device = batch.device
        if device != self._device:
            for graph in self.graphs.values():
                settle(graph, device)
            self._device = device
        grad = torch.set_grad_enabled(self.gradients and torch.is_grad_enabled())
        with grad, contextlib.ExitStack() as stack:
            for limited in self.limited:
                stack.callback(limited.program.graph.register_forward_pre_hook(
                    limited, prepend=True, with_kwargs=True
                ).remove)  # fmt: skip
            if "" in self.graphs:
                return output_of(self.graphs[""], batch)
            assert self.model is not None
            with installed(self.model, self.graphs):
                return output_of(self.model, batch)


@dataclass(frozen=True)
class _Limited:
    """A forward pre-hook of a program that holds for some sizes alone: `x * math.log(x.shape[1])` is
    traced with a number for the length, and nothing in its graph would fail at another."""

    program: Program
    names: tuple[str, ...]
    tensors: tuple[Tensors, ...]
    limits: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, program: Program) -> _Limited:
        nodes = traced_places(program.graph)
        known, limits = known_of([node.meta["val"] for node in nodes])
        return cls(program, tuple(node.name for node in nodes), known, limits)

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if len(given) != len(self.names):
            return
        seen: dict[str, Any] = {}
        for name, like, tensor in zip(self.names, self.tensors, given, strict=True):
            if tensor.dim() != len(like.sizes):
                continue  # the program itself says what it takes
            problem = other_size(like, tensor, self.limits, seen)
            if problem is not None:
                where = f"{self.program.name}: " if self.program.name else ""
                raise InputError(
                    f"{where}the program holds for {sizes_text(self.names, self.tensors, self.limits)}",
                    got=f"{name}: {problem}",
                    help="the code branches on a size, or computes a number from it, and a "
                    "program follows one branch: keep to these sizes",
                )


class Tap:
    """Runs lifted programs and hands out what the named sites saw, in the order of the names."""

    def __init__(self, model: nn.Module | None, lifted: Sequence[Program], sites: Sequence[str]) -> None:
        self._see: See = _unseen
        self.sites = tuple(sites)
        programs = [replace(program, graph=tapped(program, self._record)) for program in lifted]
        self._run = Runner(model, programs)

    def __call__(self, batch: Batch) -> tuple[Any, list[SiteTensors]]:
        """(the model's output, one SiteTensors per site)."""
        seen: dict[str, SiteTensors] = {}
        output = self.watch(batch, seen.__setitem__)
        return output, [seen[site] for site in self.sites]

    def watch(self, batch: Batch, see: See) -> Any:
        """The model's output; every site is seen as it is met, and nothing is kept."""
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
    """Not an Exception, so that neither the runner nor the model takes it for one of the model's."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


See = Callable[[str, SiteTensors], None]
_PLAYED = ("forward", "_forward_hooks", "_forward_pre_hooks")  # of a module, by its program


def _unseen(site: str, seen: SiteTensors) -> None:
    """Between two runs nobody watches."""


@contextlib.contextmanager
def installed(model: nn.Module, modules: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let programs stand for the modules of these names, which keep all that others read from them.

    A program has the hooks of its module.
    """
    changed = [(vars(model.get_submodule(name)), program) for name, program in modules.items()]
    before = [{name: own[name] for name in _PLAYED if name in own} for own, _ in changed]
    try:
        for own, program in changed:
            own.update({name: OrderedDict() for name in _PLAYED[1:]}, forward=_calling(program))
        yield
    finally:
        for (own, _), known in zip(changed, before, strict=True):
            own.pop("forward", None)
            own.update(known)


def _calling(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: program(*args, **kwargs)
