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
from functools import cache, partial
from typing import Any, Literal

from torch import Tensor

from asapc.kernels import native
from asapc.kernels.plan import Task

Backend = Literal["cpu", "gpu", "softmax", "plain"]
MAP = "the dense attention map was requested"  # which has no kernel of its own


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
    operator: str, q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, half_steps: int,
    from_key: bool = False,
) -> Backend:  # fmt: skip
    """Of the finite loop and of c-transforms.

    v: None where the dense map is wanted.  from_key: the first closes rows; one such half-step is softmax
    attention with a key bias, which torch runs where there is no kernel. What the CPU's engine made of a
    longer loop is noted once it has run.
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
    if on_cpu and reason is None:
        return choose("cpu", f"CPU, {native.described()}", softmax) if one_pass else "cpu"
    if reason is None and v is None:
        reason = MAP
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


def no_engine(q: Tensor) -> str | None:
    """Why the engine does not run on the device of these queries; None where it does."""
    return native.missing() if q.device.type == "cpu" else _no_kernels(q)


def plan_backend(scores: Tensor, task: Task, describe: Callable[[], tuple[str, str]]) -> Backend:
    """Of a loop on scores that are given.  describe: what the CPU kernel runs and why; called only where
    that is collected."""
    on_cpu = scores.device.type == "cpu"
    reason = native.missing() if on_cpu else _why_no_gpu(scores)
    if reason is None and not on_cpu:
        from asapc.kernels.gpu.plan import supported

        reason = supported(scores, task)
    on_gpu = ("Triton, matrices side by side", "the tensors are on a GPU")
    found = ("plain PyTorch", reason) if reason else on_gpu
    note("plan", scores, None, describe if on_cpu and not reason else lambda: found)
    return "plain" if reason else "cpu" if on_cpu else "gpu"


def plainly(plain: partial[Any], q: Tensor, k: Tensor, reason: str) -> Any:
    """The result of an operator whose kernel does not run here."""
    note(plain.func.__name__, q, k, lambda: ("plain PyTorch", reason))
    return plain()


def note(operator: str, q: Tensor, k: Tensor | None, describe: Callable[[], tuple[str, str]]) -> None:
    """What ran and why, where there was no choice; called only where that is collected.  k: None where q
    are scores that are given."""
    choices = _listening.get()
    if choices is not None:
        shape = "B{} H{} N{} M{}".format(*q.shape[:3], q.shape[3] if k is None else k.shape[2])
        shape = shape if k is None else f"{shape} D{q.shape[3]}"
        choices.append(Choice(operator, shape, str(q.dtype).removeprefix("torch."), *describe()))


@cache
def _triton_missing() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    return None


def _why_no_gpu(q: Tensor) -> str | None:
    return _triton_missing() if q.device.type == "cuda" else _no_kernels(q)


def _no_kernels(q: Tensor) -> str:
    return f"there are no kernels for {q.device.type} devices"
