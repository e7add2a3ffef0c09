"""Gradients of the operators: of the reference, except where the loop's kernels have their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from asapc.ir import Side
from asapc.kernels import band, dispatch
from asapc.kernels.cpu.gradients import sinkhorn_backward as cpu_backward
from asapc.kernels.library import fakes
from asapc.kernels.library.registration import Plain, bound, operator, register_fake, without_autocast
from asapc.kernels.loop import Loop, Tail
from asapc.operators import asap as asap_reference
from asapc.operators import sinkhorn as sinkhorn_reference


@operator
def loop_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None,
    start: Tensor | None, score_multiplier: float, half_steps: int, rows_first: bool,
    output_factor: Sequence[float], tail: int, tolerance: float, low: int | None = None,
    high: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of A v with respect to q, k, v and start (empty without one), by the kernels, and the half-steps
    that every head's gradient passed through [B, H].  low, high: of a loop on a band."""
    side: Side = "row" if rows_first else "column"
    loop, through = Loop(score_multiplier, half_steps, side, output_factor), Tail(tail, tolerance)
    if low is not None and high is not None:
        dq, dk, dv, _, depth = band.banded_backward(grad_out, q, k, v, keep, loop, low, high, through)
        return dq, dk, dv, q.new_empty(0), depth
    opened = None if start is None else asap_reference.open_dual(start, keep)
    open_q, open_keep, open_bias = sinkhorn_reference.open_empty(q, keep, bias)
    values = sinkhorn_reference.clean_values(v, open_keep)
    given = (grad_out, open_q, k, values, open_keep, open_bias, opened, loop, through)
    backward = cpu_backward
    if not _on_cpu(q):
        from asapc.kernels.gpu.backward import sinkhorn_backward as backward
    dq, dk, dv, dual_grad, depth = backward(*given)
    dq = sinkhorn_reference.masked(dq, keep, None)
    if dual_grad is None:
        return dq, dk, dv, q.new_empty(0), depth
    return dq, dk, dv, asap_reference.open_dual(dual_grad, keep), depth


def _loop_gradients_fake(arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    q = arguments["q"]
    depth = q.new_empty(q.shape[:2], dtype=torch.int64)
    return (*fakes.gradients(arguments, ("q", "k", "v", "start")), depth)


register_fake(loop_gradients, _loop_gradients_fake)

AsLoop = Callable[[Mapping[str, Any]], tuple[str | None, Loop]]
"""An operator's arguments as a loop: the name of the dual it starts from, None for zero, and the loop."""


def from_zero(arguments: Mapping[str, Any]) -> tuple[str | None, Loop]:
    """Of an operator whose loop starts from zero duals."""
    side: Side = "row" if arguments["rows_first"] else "column"
    multiplier, factor = arguments["score_multiplier"], arguments["output_factor"]
    return None, Loop(multiplier, arguments["half_steps"], side, factor)


_listening: ContextVar[list[Tensor] | None] = ContextVar("asapc_depths", default=None)


@contextmanager
def depths() -> Iterator[list[Tensor]]:
    """Collects, of every loop that runs inside, the half-steps that its gradient passed through, [B, H]:
    known once backward has run."""
    found: list[Tensor] = []
    token = _listening.set(found)
    try:
        yield found
    finally:
        _listening.reset(token)


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _by_kernels(
    name: str, arguments: Mapping[str, Any], needed: Mapping[str, bool], grad: Tensor, as_loop: AsLoop,
    told: list[Tensor] | None,
) -> dict[str, Tensor] | None:  # fmt: skip
    """Gradients of q, k, v and the dual; None where the kernels do not have them.

    told: where the half-steps that they passed through are added.
    """
    start, loop = as_loop(arguments)
    q, k, v, keep, bias = (arguments.get(key) for key in ("q", "k", "v", "keep", "bias"))
    assert q is not None and k is not None
    if v is None or loop.half_steps == 0 or needed.get("bias"):
        return None
    low, high = arguments.get("low"), arguments.get("high")
    if low is None and not _on_cpu(q) and (
        dispatch.attention_backend(name, q, k, v, bias, loop.half_steps) != "gpu"
    ):
        return None
    most = arguments.get("tail")
    dq, dk, dv, dual_grad, depth = loop_gradients(
        grad, q, k, v, keep, bias, None if start is None else arguments[start], loop.score_multiplier,
        loop.half_steps, loop.first_side == "row", loop.output_factor,
        loop.half_steps if most is None else max(0, most), arguments.get("tolerance", 0.0),
        low, high,
    )  # fmt: skip
    if told is not None:
        told.append(depth)
    found = {"q": dq, "k": dk, "v": dv}
    return found if start is None else found | {start: dual_grad}


def _through(arguments: Mapping[str, Any], as_loop: AsLoop) -> Tensor:
    """The half-steps that the reference's gradient passes through, [B, H]: it certifies nothing."""
    _, loop = as_loop(arguments)
    most = arguments.get("tail")
    depth = loop.half_steps if most is None else min(most, loop.half_steps)
    return torch.full(arguments["q"].shape[:2], depth)


def save(ctx: Any, inputs: Sequence[Any]) -> None:
    """Keeps an operator's arguments for its gradient."""
    ctx.save_for_backward(*[x for x in inputs if isinstance(x, Tensor)])
    ctx.layout = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def saved(ctx: Any, registered: CustomOpDef) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments by name, and whether a gradient is needed, of those that the call was given."""
    tensors = iter(ctx.saved_tensors)  # read once: under checkpointing they are recomputed for one reader
    inputs = [next(tensors) if constant is None else constant[0] for constant in ctx.layout]
    arguments = bound(registered, inputs)
    return arguments, dict(zip(arguments, ctx.needs_input_grad, strict=False))


class ByKernels(NamedTuple):
    """Kernels for an operator's gradient: an operator, too, asapc::<its name>_gradients.

    run: (gradient of the output, **arguments) -> gradients by name, None where there is no kernel: then
    the reference has them.  takes: whether arguments by name go to it, and are not traced.  constants:
    tensors without a gradient.
    """

    run: Callable[..., Mapping[str, Tensor | None] | None]
    takes: Callable[[Mapping[str, Any]], bool]
    constants: tuple[str, ...] = ()

    def registered(self, reference: Callable[..., Any]) -> Callable[..., dict[str, Tensor]]:
        signature, kinds = inspect.signature(reference), get_type_hints(reference)
        others, tensors = {"keep", "query_keep", "return", *self.constants}, (Tensor, Tensor | None)
        names = [name for name, kind in kinds.items() if kind in tensors and name not in others]

        def gradients(grad_out: Tensor, **arguments: Any) -> list[Tensor]:
            found = of_reference(reference, arguments, dict.fromkeys(names, True), [grad_out])
            return fakes.gradients(arguments, names, found)

        @torch.inference_mode(False)  # which an operator's kernel may not record gradients without
        @torch.no_grad()
        def run(plain: Plain, grad_out: Tensor, **arguments: Any) -> list[Tensor]:
            found = self.run(grad_out, **arguments)
            return plain() if found is None else fakes.gradients(arguments, names, found)

        first = inspect.signature(gradients).parameters["grad_out"]
        parameters = [first, *signature.parameters.values()]
        gradients.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        gradients.__name__ = f"{reference.__name__}_gradients"
        gradients.__annotations__ = {"grad_out": Tensor, **kinds, "return": list[Tensor]}
        own = operator(gradients, run)
        register_fake(own, lambda arguments: fakes.gradients(arguments, names))
        return lambda grad_out, arguments: dict(zip(names, own(grad_out, **arguments), strict=True))


def differentiate(
    registered: CustomOpDef,
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    as_loop: AsLoop | None = None,
    by_kernels: ByKernels | None = None,
    twice: Callable[..., Tensor] | None = None,
) -> None:
    """Register the gradient, recomputed in backward: only inputs are saved.

    as_loop: of an operator whose gradient the loop's kernels may have.  by_kernels: of others that have
    kernels for it.  twice: in place of the reference, where it has no second derivative.
    """
    kernels = by_kernels and by_kernels.registered(reference)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A list of tensors (fitted parameters) is a constant: nothing in it is differentiated.
        save(ctx, inputs)
        ctx.told = _listening.get()

    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        arguments, needed = saved(ctx, registered)
        with without_autocast(arguments.values()):
            found = gradients(arguments, needed, output_grads, ctx.told)
        lists = {
            name: [None] * len(value) for name in needed
            if isinstance(value := arguments[name], list | tuple)
            and all(isinstance(x, Tensor) for x in value)
        }  # fmt: skip
        return tuple(lists.get(name, found.get(name) if need else None) for name, need in needed.items())

    def gradients(
        arguments: Mapping[str, Any], needed: Mapping[str, Any], output_grads: Sequence[Tensor],
        told: list[Tensor] | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        values = arguments.get("v")  # of no keys' values the output is 0, whatever else is given
        no_values = isinstance(values, Tensor) and not values.numel()
        if no_values or all(x is None or not x.numel() for x in output_grads):
            return {n: x.new_zeros(x.shape) for n, x in arguments.items() if isinstance(x, Tensor)}
        if not torch.is_grad_enabled():
            grad, found = output_grads[0], None
            if as_loop is not None:
                found = _by_kernels(reference.__name__, arguments, needed, grad, as_loop, told)
            elif by_kernels is not None and kernels is not None and by_kernels.takes(arguments):
                found = kernels(grad, arguments)
            if found is not None:
                return found
            if as_loop is not None and told is not None:
                told.append(_through(arguments, as_loop))
        again = twice if twice is not None and torch.is_grad_enabled() else reference
        return of_reference(again, arguments, needed, output_grads)

    registered.register_autograd(backward, setup_context=setup_context)


def of_reference(
    reference: Callable[..., Any], arguments: Mapping[str, Any], needed: Mapping[str, Any],
    output_grads: Sequence[Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """The gradients of what is needed; they can be differentiated where gradients are recorded, as they
    are in a backward pass with create_graph=True."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = {
            name: _leaf(x, bool(needed.get(name)), again) if isinstance(x, Tensor) else x
            for name, x in arguments.items()
        }
        output = reference(**leaves)
    wanted = {n: x for n, x in leaves.items() if isinstance(x, Tensor) and needed.get(n)}
    outputs = [output] if isinstance(output, Tensor) else list(output)
    # An output that depends on nothing differentiable (n / N) has no gradient to give.
    pairs = [
        (result, grad)
        for result, grad in zip(outputs, output_grads, strict=True)
        if result.requires_grad and grad is not None
    ]
    grads = torch.autograd.grad(
        [result for result, _ in pairs], [*wanted.values()], [grad for _, grad in pairs],
        allow_unused=True, create_graph=again,
    )  # fmt: skip
    return dict(zip(wanted, grads, strict=True))


def _leaf(x: Tensor, needed: bool, again: bool) -> Tensor:
    """What the reference is differentiated by; still of the graph of x, for second derivatives."""
    return x.view_as(x) if again and needed else x.detach().requires_grad_(needed)
