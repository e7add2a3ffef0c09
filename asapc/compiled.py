"""The compiled model: an nn.Module that is called, copied, moved and trained as the teacher was.

    CompiledModel(nn.Module)      a whole program, its weights under the teacher's names
    Forward                       what is called: arguments to tensors, the graph, tensors to outputs
    Operators(nn.Module)          what the operators were fitted with, under the name `asapc`

Forward is the `forward` of a compiled model and, see asapc.live, of a patched module. It has the
teacher's signature, and says so where a call is another than the captured one: what was a constant of
the trace cannot be changed by a caller.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from asapc.call import Call, rebuilt, types_at_hand
from asapc.code import GraphCode
from asapc.errors import InputError

OPERATORS = "asapc"  # of a module: what its operators were fitted with


class OwnCodeWarning(UserWarning):
    """A patched module was called in another way than the captured one, and ran its own code."""


class Operators(nn.Module):
    """Coefficients, pivots, slices: buffers of the operators that stand for `sites`.

    They move with the module around them, and keep their own dtype: fits are made in float32 or wider,
    and the operators take any dtype of activations beside them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sites: Sequence[str]) -> None:
        super().__init__()
        self.sites = tuple(sites)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Operators:
        own = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        super()._apply(fn, recurse)
        for name, tensor in own.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(moved.device)
        return self

    def __repr__(self) -> str:
        return "; ".join(self.sites)


class Forward:
    """forward(*args, **kwargs) of a module, computed by a graph.

    live: the module has code of its own, which runs, with a warning, where the call is not the captured
    one. Without it that is an InputError.  before: what its instance had in place of its class's forward.
    """

    def __init__(
        self, module: nn.Module, code: GraphCode, call: Call, name: str, live: bool = False
    ) -> None:
        self.module = module
        self.code = code
        self.call = call
        self.name = name
        self.live = live
        self.before: Callable[..., Any] | None = module.__dict__.get("forward") if live else None
        self.types = types_at_hand(call.output)
        self.warned: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Without the classes of the outputs: another process may not have them."""
        return {name: own for name, own in vars(self).items() if name != "types"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.types = types_at_hand(self.call.output)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original) if self.live else self.call.signature()

    @property
    def __code__(self) -> CodeType:
        """torch.export names the code that it traces."""
        return type(self).__call__.__code__

    @property
    def original(self) -> Callable[..., Any]:
        """The module's own forward.  Not kept: pickled, it would be taken for what replaces it."""
        own: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return own if self.before is None else self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, problem = self.call.flat(args, kwargs)
        if problem is not None:
            return self._otherwise(problem, args, kwargs)
        return rebuilt(self.call.output, self.code(self.module, flat), self.types)

    def _otherwise(self, problem: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self.live:
            raise InputError(
                f"{self.name}: a compiled model takes the arguments it was captured with",
                got=problem,
                help="call it as the calibration data did, or compile it on data with these arguments",
            )
        if problem not in self.warned:
            self.warned.add(problem)
            warnings.warn(
                f"{self.name}: the module's own code runs, not the compiled one: {problem}",
                OwnCodeWarning,
                stacklevel=3,
            )
        return self.original(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<compiled forward of {self.name}>"


class CompiledModel(nn.Module):
    """A compiled model, rebuilt from an artefact alone.

    weights: the module tree whose attributes the graph reads.  teacher: what it was compiled from, in
    words.  sites: one line each, for repr.
    """

    forward: Forward

    def __init__(
        self, weights: nn.Module, code: GraphCode, call: Call, teacher: str, sites: Sequence[str]
    ) -> None:
        super().__init__()
        for own, theirs in (
            (self._parameters, weights._parameters), (self._buffers, weights._buffers),
            (self._modules, weights._modules),
        ):  # fmt: skip
            own.update(theirs)  # type: ignore[arg-type]
        self._non_persistent_buffers_set.update(weights._non_persistent_buffers_set)
        self.__dict__["forward"] = Forward(self, code, call, teacher)
        self._sites: tuple[str, ...]
        self.__dict__["_sites"] = tuple(sites)
        self.eval()

    @property
    def code(self) -> str:
        """The source of the compiled forward."""
        return self.forward.code.code

    @property
    def graph(self) -> torch.fx.Graph:
        return self.forward.code.graph

    def __repr__(self) -> str:
        lines = [f"CompiledModel of {self.forward.name}{self.forward.__signature__}", *self._sites]
        return "\n  ".join(lines)


def site_line(site: Mapping[str, Any]) -> str:
    """A site of the manifest in one line: its name, and what runs there."""
    operator = str(site["operator"])
    convention = site["convention"]
    facts = []
    if operator == "teacher":
        facts.append("the teacher's own code")
    elif operator == "asap":
        if site.get("side") is not None:
            facts.append(f"{site['side']} dual")
        if site.get("closures") is not None:
            facts.append(f"{site['closures']} closure{'s' if site['closures'] != 1 else ''}")
        facts += [str(name) for name in site.get("features") or ()]
    elif "half_steps" in convention:
        facts.append(f"{convention['half_steps']} half-steps")
    return f"{site['name']}: {operator}" + (f" ({', '.join(facts)})" if facts else "")
