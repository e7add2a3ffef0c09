"""Constants: weights whose values are compiled in, and gradients that a compiled forward lacks.

A convention is found by experiments. What the code takes from a weight, such as a temperature that every
step of a loop divides by, becomes a number of the operator: only the original follows when the weight
changes, and only the original has its gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from asapc.errors import InputError

COMPARED = 1 << 14  # entries on a CPU compared at every call: p.data.copy_() leaves no trace


class Compiled:
    """The value that a tensor had when code was compiled for it, and the tensor that last had it."""

    def __init__(self, tensor: Tensor) -> None:
        self.value = tensor.detach().cpu().clone()
        self.known: tuple[Tensor, int, int] | None = None

    def is_of(self, tensor: Tensor | None) -> bool:
        """Whether a tensor has the compiled value, rounded to its present dtype."""
        if tensor is None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        small = tensor.is_cpu and tensor.numel() <= COMPARED
        version = -1 if tensor.is_inference() else tensor._version
        if not small and self.known is not None:
            last, at_version, address = self.known
            if last is tensor and (at_version, address) == (version, tensor.data_ptr()):
                return True
        try:
            same = torch.equal(tensor.detach().cpu(), self.value.to(tensor.dtype))
        except (RuntimeError, TypeError):  # a tensor that is no longer numbers in memory
            same = False
        self.known = (tensor, version, tensor.data_ptr()) if same and not small else None
        return same


class _Held:
    """A weight, by its name, with its compiled value."""

    def __init__(self, root: nn.Module, name: str) -> None:
        path, _, self.leaf = name.rpartition(".")
        self.owner, self.name = root.get_submodule(path), name
        tensor = self.tensor
        if tensor is None:
            raise AttributeError(name)
        self.compiled = Compiled(tensor)

    @property
    def tensor(self) -> Tensor | None:
        tensor = self.owner._parameters.get(self.leaf)
        return self.owner._buffers.get(self.leaf) if tensor is None else tensor


class Constants:
    """The weights that a compiled forward holds as constants, with the values that they have now.

    names: of the weights, from `root`.  no_gradient: why the gradients of the compiled code are not the
    original's, None if they are.  Raises AttributeError for a name that the root does not have.
    """

    def __init__(
        self, root: nn.Module | None = None, names: Iterable[str] = (), no_gradient: str | None = None
    ) -> None:
        self.held = [_Held(root, name) for name in sorted(set(names))] if root is not None else []
        self.no_gradient = no_gradient

    def of_copy(self, module: nn.Module, copied: nn.Module) -> Constants:
        """The same for a shallow copy of a module, which has weights of its own."""
        constants = copy.copy(self)
        constants.held = [copy.copy(held) for held in self.held]
        for held in constants.held:
            held.owner = copied if held.owner is module else held.owner
        return constants

    def difference(self) -> str | None:
        """Which weight has changed.  What torch.export makes holds for the values of its trace."""
        return self._other() if self.held and not torch.compiler.is_exporting() else None

    @torch.compiler.disable
    def _other(self) -> str | None:
        """Run at every call, also when the caller is compiled."""
        other = next((held.name for held in self.held if not held.compiled.is_of(held.tensor)), None)
        return other and f"{other} no longer has the value that was compiled in as a constant"

    def missing(self, module: nn.Module, given: Sequence[Any]) -> str | None:
        """Which gradient the caller may ask for and the compiled code does not have."""
        if not torch.is_grad_enabled():
            return None
        for held in self.held:
            tensor = held.tensor
            if tensor is not None and tensor.requires_grad:
                return f"{held.name} requires a gradient, but is a constant of the compiled code"
        if self.no_gradient is not None and any(x.requires_grad for x in _tensors(module, given)):
            return f"it is compiled for inference only: {self.no_gradient}"
        return None

    def refusing(self, outputs: Sequence[Any], missing: str) -> tuple[Any, ...]:
        """The outputs, with an error on a backward pass."""
        tensors = [held.tensor for held in self.held]
        trained = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]

        def refused(output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return output
            return _NoGradient.apply(missing, output, *trained)

        return tuple(refused(output) for output in outputs)


def _tensors(module: nn.Module, given: Sequence[Any]) -> Iterator[Tensor]:
    yield from (x for x in given if isinstance(x, Tensor))
    yield from module.parameters()


class _NoGradient(torch.autograd.Function):
    """output -> output, and an InputError where its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, missing: str, output: Tensor, *trained: Tensor) -> Tensor:
        ctx.missing = missing
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InputError(
            "a compiled model has the gradients of the original", got=ctx.missing,
            help="load it with model=, so that the original's code can run, or set requires_grad_(False)",
        )  # fmt: skip


def transformed() -> str | None:
    """The transform of torch around a call that operators do not support, in words, or None."""
    if forward_ad._current_level >= 0:
        return "it is called in forward-mode differentiation (torch.func.jvp, dual numbers)"
    names = _transforms()
    if "grad" in names and torch.compiler.is_compiling():  # whose trace cannot stop for a warning there
        raise InputError(
            "a compiled model has no transform of torch.func inside torch.compile", got=names,
            help="leave torch.compile out, or call backward() instead",
        )  # fmt: skip
    return f"it is called under a transform of torch.func ({names})" if names else None


@torch.compiler.assume_constant_result
def _transforms() -> str:
    """The names of the transforms; torch.compile asks once, and traces again under others."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    kinds = [str(transform.key()).rpartition(".")[2] for transform in stack]
    return ", ".join(name for name in kinds if name in ("Vmap", "Grad", "Jvp")).lower()
