"""Which kernel runs an operator, and why: the one place that decides, for kernels/library/ to
follow and for `asapc bench --explain` to print.

Where a kernel cannot run, the plain PyTorch reference runs instead, and that is reported; it is never a
crash. Triton is imported only when a tensor on a GPU asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Literal

from torch import Tensor

from asapc.kernels import native
from asapc.kernels.plan import Task

Backend = Literal["cpu", "gpu", "softmax", "plain"]


@dataclass(frozen=True)
class Choice:
    """operator: registered name; shape: B x H x N x M x D; kernel: what ran; reason: why that one."""

    operator: str
    shape: str
    dtype: str
    kernel: str
    reason: str


_listening: ContextVar[list[Choice] | None] = ContextVar("asapc_choices", default=None)


@contextmanager
def explained() -> Iterator[list[Choice]]:
    """Collects a Choice from every operator that runs inside, in this thread."""
    choices: list[Choice] = []
    token = _listening.set(choices)
    try:
        yield choices
    finally:
        _listening.reset(token)


def listening() -> bool:
    """Whether choices are collected."""
    return _listening.get() is not None


def attention_backend(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    bias: Tensor | None,
    half_steps: int,
    from_key: bool = False,
) -> Backend:
    """Of the finite loop and of c-transforms.

    v: None where the dense map is wanted.  from_key: the first closes rows; one such half-step is softmax
    attention with a key bias, which torch runs wherever Triton does not. What the CPU's engine made of
    the call is noted once it has run.
    """
    one_pass = half_steps == 1 and from_key and v is not None
    softmax = "one c-transform from the keys' dual is softmax attention with a key bias"
    if operator.startswith("sinkhorn"):
        softmax = "one half-step on rows is softmax attention"

    def choose(backend: Backend, kernel: str, reason: str) -> Backend:
        note(operator, q, k, lambda: (kernel, reason))
        return backend

    if half_steps == 0:
        return choose("plain", "plain PyTorch", "there are no half-steps to run")
    on_cpu = q.device.type == "cpu"
    some = q.shape[2] > 0 and k.shape[2] > 0  # else the engine is not asked
    reason = (native.missing() if some else None) if on_cpu else _why_no_gpu(q)
    if on_cpu and one_pass:
        return choose("softmax", "scaled_dot_product_attention", softmax)
    if on_cpu:
        return "cpu" if reason is None else choose("plain", "plain PyTorch", reason)
    if reason is None and v is None:
        reason = "the dense attention map was requested"
    if reason is None:
        from asapc.kernels.gpu.tiles import supported

        reason = supported(q, k, v, bias)
    if reason is None:
        return choose("gpu", "GPU kernels", "the tensors are on a GPU")
    if one_pass:
        return choose("softmax", "scaled_dot_product_attention", f"{softmax}; {reason}")
    return choose("plain", "plain PyTorch", reason)


def dual_backend(operator: str, q: Tensor, k: Tensor, features: str) -> Backend:
    """Of a predicted dual."""
    if q.device.type == "cpu":
        note(operator, q, k, lambda: (f"CPU, {features}", "the tensors are on the CPU"))
        return "cpu"
    reason = _why_no_gpu(q)
    if reason is None:
        from asapc.kernels.gpu.dual import supported

        reason = supported(q, k, features)
    kernel = f"Triton, {features}" if reason is None else "plain PyTorch"
    note(operator, q, k, lambda: (kernel, reason or "the tensors are on a GPU"))
    return "gpu" if reason is None else "plain"


def token_backend(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    describe: Callable[[], tuple[str, str]] | None,
    maps: bool = False,
) -> Backend:
    """Of operators without an N x M matrix, by the engine.  v: None where the dense map is wanted.

    describe: what the CPU kernel runs and why; called only where that is collected; None where that is
    noted once it has run.  maps: it gives dense maps, too.
    """
    reason = native.missing()
    if q.device.type != "cpu":
        reason = f"there are no kernels for {q.device.type} devices"
    if v is None and not maps:
        reason = "the dense attention map was requested"
    if reason is not None:
        note_plain(operator, q, k, reason)
    elif describe is not None:
        note(operator, q, k, describe)
    return "plain" if reason else "cpu"


def plan_backend(
    operator: str, scores: Tensor, task: Task, describe: Callable[[], tuple[str, str]]
) -> Backend:
    """Of a loop on scores that are given.  describe: what the CPU kernel runs and why; called only where
    that is collected."""
    choices = _listening.get()
    on_cpu = scores.device.type == "cpu"
    reason = native.missing() if on_cpu else _why_no_gpu(scores)
    if reason is None and not on_cpu:
        from asapc.kernels.gpu.plan import supported

        reason = supported(scores, task)
    backend: Backend = "plain" if reason else "cpu" if on_cpu else "gpu"
    if choices is not None:
        on_gpu = ("Triton, matrices side by side", "the tensors are on a GPU")
        kernel, why = ("plain PyTorch", reason) if reason else describe() if backend == "cpu" else on_gpu
        shape = "B{} H{} N{} M{}".format(*scores.shape)
        choices.append(Choice(operator, shape, str(scores.dtype).removeprefix("torch."), kernel, why))
    return backend


def note_plain(operator: str, q: Tensor, k: Tensor, reason: str) -> None:
    """Of an operator whose kernel does not run here."""
    note(operator, q, k, lambda: ("plain PyTorch", reason))


def note(operator: str, q: Tensor, k: Tensor, describe: Callable[[], tuple[str, str]]) -> None:
    """What ran, where there was no choice, and why; called only where that is collected."""
    choices = _listening.get()
    if choices is not None:
        batch, heads, queries, dim = q.shape
        shape = f"B{batch} H{heads} N{queries} M{k.shape[2]} D{dim}"
        choices.append(Choice(operator, shape, str(q.dtype).removeprefix("torch."), *describe()))


@cache
def _triton_missing() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return None


def _why_no_gpu(q: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"there are no kernels for {q.device.type} devices"
    return _triton_missing()
