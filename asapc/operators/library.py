"""Registration of the operators as torch.ops.asapc.*: kernels, fakes and gradients.

The plain functions in operators/ are the meaning, kernels/ their fast twins; kernels/dispatch.py says
which of them runs. Gradients differentiate the meaning, except where the GPU kernels have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asapc.ir import Side
from asapc.kernels import dispatch, key_closure
from asapc.kernels.cpu import dual as cpu_dual
from asapc.kernels.cpu import sinkhorn as cpu_sinkhorn
from asapc.kernels.loop import Loop
from asapc.operators import asap as asap_meaning
from asapc.operators import sinkhorn as sinkhorn_meaning


@torch.library.custom_op("asapc::sinkhorn", mutates_args=())
def sinkhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Sequence[float],
) -> Tensor:
    backend = dispatch.attention_backend("sinkhorn", q, k, v, keep, bias, score_multiplier)
    if backend == "plain":
        return sinkhorn_meaning.sinkhorn(
            q, k, v, keep, bias, score_multiplier, half_steps, rows_first, output_factor
        )
    side: Side = "row" if rows_first else "column"
    loop = Loop(score_multiplier, half_steps, side, output_factor)
    return _loop(backend, q, k, v, keep, bias, None, loop)


@torch.library.custom_op("asapc::sinkhorn_attention", mutates_args=())
def sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Sequence[float],
) -> Tensor:
    backend = dispatch.attention_backend(
        "sinkhorn_attention", q, k, None, keep, bias, score_multiplier
    )
    if backend == "plain":
        return sinkhorn_meaning.sinkhorn_attention(
            q, k, keep, bias, score_multiplier, half_steps, rows_first, output_factor
        )
    side: Side = "row" if rows_first else "column"
    loop = Loop(score_multiplier, half_steps, side, output_factor)
    return _loop(backend, q, k, None, keep, bias, None, loop)


@torch.library.custom_op("asapc::asap", mutates_args=())
def asap(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    source_dual: Tensor | None,
    target_dual: Tensor | None,
    score_multiplier: float,
    closures: int,
    output_factor: Sequence[float],
) -> Tensor:
    side = asap_meaning.first_closure(source_dual, target_dual, closures)
    some = q.shape[2] > 0 and k.shape[2] > 0
    backend = dispatch.attention_backend(
        "asap", q, k, v, keep, bias, score_multiplier, closures, side == "row" and some
    )
    if backend == "softmax" and target_dual is not None:
        opened_dual = asap_meaning.open_dual(target_dual, keep)
        q, keep, bias = sinkhorn_meaning.open_empty(q, keep, bias)
        return key_closure.key_closure(
            q, k, v, keep, bias, opened_dual, score_multiplier, output_factor
        )
    if backend == "plain":
        return asap_meaning.asap(
            q, k, v, keep, bias, source_dual, target_dual, score_multiplier, closures, output_factor
        )
    loop = Loop(score_multiplier, closures, side, output_factor)
    start = source_dual if side == "column" else target_dual
    return _loop(backend, q, k, v, keep, bias, start, loop)


@torch.library.custom_op("asapc::asap_attention", mutates_args=())
def asap_attention(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    source_dual: Tensor | None,
    target_dual: Tensor | None,
    score_multiplier: float,
    closures: int,
    output_factor: Sequence[float],
) -> Tensor:
    side = asap_meaning.first_closure(source_dual, target_dual, closures)
    backend = dispatch.attention_backend(
        "asap_attention", q, k, None, keep, bias, score_multiplier, closures, side == "row"
    )
    if backend == "plain":
        return asap_meaning.asap_attention(
            q, k, keep, bias, source_dual, target_dual, score_multiplier, closures, output_factor
        )
    loop = Loop(score_multiplier, closures, side, output_factor)
    start = source_dual if side == "column" else target_dual
    return _loop(backend, q, k, None, keep, bias, start, loop)


def _loop(
    backend: dispatch.Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    start: Tensor | None,
    loop: Loop,
) -> Tensor:
    start = None if start is None else asap_meaning.open_dual(start, keep)
    q, keep, bias = sinkhorn_meaning.open_empty(q, keep, bias)
    v = None if v is None else sinkhorn_meaning.clean_values(v, keep)
    if backend == "gpu" and v is not None:
        from asapc.kernels.gpu import sinkhorn as gpu

        return gpu.sinkhorn_loop(q, k, v, keep, bias, start, loop)
    return cpu_sinkhorn.sinkhorn_loop(q, k, v, keep, bias, start, loop)


def _dual_twin(backend: dispatch.Backend) -> Any:
    if backend == "plain":
        return asap_meaning
    if backend == "gpu":
        from asapc.kernels.gpu import dual as gpu_dual

        return gpu_dual
    return cpu_dual


@torch.library.custom_op("asapc::dual", mutates_args=())
def dual(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    coefficients: Tensor,
    features: str,
    side: str,
    score_multiplier: float,
    half_steps: int,
    starts_on_x: bool,
) -> Tensor:
    twin = _dual_twin(dispatch.dual_backend("dual", q, k, features))
    result: Tensor = twin.dual(
        q, k, keep, bias, parameters, coefficients, features, side, score_multiplier, half_steps,
        starts_on_x,
    )  # fmt: skip
    return result


@torch.library.custom_op("asapc::dual_and_row_mass", mutates_args=())
def dual_and_row_mass(
    q: Tensor,
    k: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    coefficients: Tensor,
    features: str,
    score_multiplier: float,
    half_steps: int,
    starts_on_x: bool,
) -> tuple[Tensor, Tensor]:
    twin = _dual_twin(dispatch.dual_backend("dual_and_row_mass", q, k, features))
    result: tuple[Tensor, Tensor] = twin.dual_and_row_mass(
        q, k, keep, bias, parameters, coefficients, features, score_multiplier, half_steps,
        starts_on_x,
    )  # fmt: skip
    return result


@sinkhorn.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return v.new_empty((*q.shape[:3], v.shape[3]))


@asap.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Tensor:
    return v.new_empty((*q.shape[:3], v.shape[3]))


@sinkhorn_attention.register_fake
def _(q: Tensor, k: Tensor, *_rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], k.shape[2]))


@asap_attention.register_fake
def _(q: Tensor, k: Tensor, *_rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], k.shape[2]))


@dual.register_fake
def _(
    q: Tensor,
    k: Tensor,
    _keep: Tensor | None,
    _bias: Tensor | None,
    _parameters: Sequence[Tensor],
    _coefficients: Tensor,
    _features: str,
    side: str,
    *_rest: Any,
) -> Tensor:
    return _float_like(q, q if side == "source" else k)


@dual_and_row_mass.register_fake
def _(q: Tensor, k: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return _float_like(q, k), _float_like(q, q)


def _float_like(q: Tensor, points: Tensor) -> Tensor:
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return q.new_empty(points.shape[:3], dtype=dtype)


@torch.library.custom_op("asapc::loop_gradients", mutates_args=())
def loop_gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    start: Tensor | None,
    score_multiplier: float,
    half_steps: int,
    rows_first: bool,
    output_factor: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of A v with respect to q, k, v and start (empty without one), by the GPU kernels."""
    from asapc.kernels.gpu.backward import sinkhorn_backward

    side: Side = "row" if rows_first else "column"
    loop = Loop(score_multiplier, half_steps, side, output_factor)
    opened = None if start is None else asap_meaning.open_dual(start, keep)
    open_q, open_keep, open_bias = sinkhorn_meaning.open_empty(q, keep, bias)
    values = sinkhorn_meaning.clean_values(v, open_keep)
    dq, dk, dv, dual_grad = sinkhorn_backward(
        grad_out, open_q, k, values, open_keep, open_bias, opened, loop
    )
    if keep is not None:
        dq = dq.masked_fill(~keep.any(-1)[:, None, None, None], 0.0)
    if dual_grad is None:
        return dq, dk, dv, q.new_empty(0)
    return dq, dk, dv, asap_meaning.open_dual(dual_grad, keep)


@loop_gradients.register_fake
def _(
    _grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _keep: Tensor | None,
    _bias: Tensor | None,
    start: Tensor | None,
    *_rest: Any,
) -> tuple[Tensor, ...]:
    own = q.new_empty(0) if start is None else torch.empty_like(start)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), own


# The inputs of an operator as a loop: the position of the dual it starts from, None for zero, and
# the half-steps, whether rows come first and the output factor.
LoopOf = Callable[[Sequence[Any]], tuple[int | None, int, bool, Sequence[float]]]


def _sinkhorn_as_loop(inputs: Sequence[Any]) -> tuple[int | None, int, bool, Sequence[float]]:
    return None, inputs[6], inputs[7], inputs[8]


def _asap_as_loop(inputs: Sequence[Any]) -> tuple[int | None, int, bool, Sequence[float]]:
    return (5 if inputs[6] is None else 6), inputs[8], inputs[5] is None, inputs[9]


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _by_kernels(
    operator: str, inputs: Sequence[Any], needed: Sequence[bool], grad: Tensor, loop_of: LoopOf
) -> tuple[Any, ...] | None:
    """Gradients of q, k, v and the dual; None where the kernels do not have them."""
    start, half_steps, rows_first, factor = loop_of(inputs)
    q, k, v, keep, bias = inputs[:5]
    if half_steps == 0 or needed[4] or _on_cpu(q):
        return None
    multiplier = inputs[5] if start is None else inputs[7]
    if dispatch.attention_backend(operator, q, k, v, keep, bias, multiplier) != "gpu":
        return None
    dual = None if start is None else inputs[start]
    *own, dual_grad = loop_gradients(
        grad, q, k, v, keep, bias, dual, multiplier, half_steps, rows_first, factor
    )
    result: list[Any] = [*own, *[None] * (len(inputs) - 3)]
    if start is not None:
        result[start] = dual_grad
    return tuple(x if need else None for x, need in zip(result, needed, strict=True))


def _differentiate(
    operator: Any,
    meaning: Callable[..., Tensor | tuple[Tensor, ...]],
    loop_of: LoopOf | None = None,
) -> None:
    """Register the gradient, recomputed in backward: only inputs are saved.

    loop_of: of an operator whose gradient the GPU kernels may have.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # A list of tensors (fitted parameters) is a constant: nothing in it is differentiated.
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.layout = [None if isinstance(x, Tensor) else (x,) for x in inputs]

    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if constant is None else constant[0] for constant in ctx.layout]
        if loop_of is not None:
            name, needed = meaning.__name__, ctx.needs_input_grad
            found = _by_kernels(name, inputs, needed, output_grads[0], loop_of)
            if found is not None:
                return found
        with torch.enable_grad():
            leaves = [
                x.detach().requires_grad_(bool(needed)) if isinstance(x, Tensor) else x
                for x, needed in zip(inputs, ctx.needs_input_grad, strict=True)
            ]
            output = meaning(*leaves)
        wanted = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
        outputs = [output] if isinstance(output, Tensor) else list(output)
        # An output that depends on nothing differentiable (n / N) has no gradient to give.
        pairs = [
            (own, grad)
            for own, grad in zip(outputs, output_grads, strict=True)
            if own.requires_grad and grad is not None
        ]
        grads = torch.autograd.grad(
            [own for own, _ in pairs], [leaves[i] for i in wanted], [grad for _, grad in pairs],
            allow_unused=True,
        )  # fmt: skip
        result: list[Any] = [
            [None] * len(x) if _is_tensor_list(x) else None for x in inputs
        ]
        for index, value in zip(wanted, grads, strict=True):
            result[index] = value
        return tuple(result)

    operator.register_autograd(backward, setup_context=setup_context)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(x, Tensor) for x in value)


_differentiate(sinkhorn, sinkhorn_meaning.sinkhorn, _sinkhorn_as_loop)
_differentiate(sinkhorn_attention, sinkhorn_meaning.sinkhorn_attention)
_differentiate(asap, asap_meaning.asap, _asap_as_loop)
_differentiate(asap_attention, asap_meaning.asap_attention)
_differentiate(dual, asap_meaning.dual)
_differentiate(dual_and_row_mass, asap_meaning.dual_and_row_mass)
