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

import torch
from torch import Tensor

from asapc.kernels.cpu.workers import SAFE_ROW_RANGE
from asapc.kernels.plan import Task
from asapc.kernels.thresholds import thresholds
from asapc.operators.sinkhorn import score_matrix, widen

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


def attention_backend(
    operator: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
    c_transforms: int | None = None,
    from_key: bool = False,
) -> Backend:
    """Of the finite loop and of c-transforms.

    v: None where the dense map is wanted.  c_transforms, from_key: their number and whether they start
    from the keys' dual; None for the teacher's own loop, unless that is one half-step on rows. One of
    them is softmax attention with a key bias, which torch runs wherever Triton does not.
    """
    choices = _listening.get()
    one_pass = c_transforms == 1 and from_key and v is not None
    softmax = "one c-transform from the keys' dual is softmax attention with a key bias"
    if operator.startswith("sinkhorn"):
        softmax = "one half-step on rows is softmax attention"

    def choose(backend: Backend, kernel: str, reason: str) -> Backend:
        if choices is not None:
            choices.append(_choice(operator, q, k, kernel, reason))
        return backend

    if c_transforms == 0:
        return choose("plain", "plain PyTorch", "no c-transform: two duals alone are an ablation")
    if q.device.type == "cpu":
        if one_pass:
            return choose("softmax", "scaled_dot_product_attention", softmax)
        measured = ("", "") if choices is None else _cpu_path(q, k, v, keep, bias, score_multiplier)
        return choose("cpu", *measured)
    reason = _why_no_gpu(q)
    if reason is None and v is None:
        reason = "the dense attention map is wanted"
    if reason is None:
        from asapc.kernels.gpu.tiles import supported

        reason = supported(q, k, v, bias)
    if reason is None:
        return choose("gpu", "Triton", "the tensors are on a GPU")
    if one_pass:
        return choose("softmax", "scaled_dot_product_attention", f"{softmax}; {reason}")
    return choose("plain", "plain PyTorch", reason)


def dual_backend(operator: str, q: Tensor, k: Tensor, features: str) -> Backend:
    """Of a predicted dual."""
    choices = _listening.get()
    if q.device.type == "cpu":
        if choices is not None:
            choices.append(_choice(operator, q, k, f"CPU, {features}", "the tensors are on the CPU"))
        return "cpu"
    reason = _why_no_gpu(q)
    if reason is None:
        from asapc.kernels.gpu.dual import supported

        reason = supported(q, k, features)
    if choices is not None:
        kernel = f"Triton, {features}" if reason is None else "plain PyTorch"
        choices.append(_choice(operator, q, k, kernel, reason or "the tensors are on a GPU"))
    return "gpu" if reason is None else "plain"


def token_backend(
    operator: str, q: Tensor, k: Tensor, v: Tensor | None, describe: Callable[[], tuple[str, str]]
) -> Backend:
    """Of operators without an N x M matrix.  v: None where the dense map is wanted.

    describe: what the CPU kernel runs and why; called only where that is collected.
    """
    choices = _listening.get()
    reason = None if q.device.type == "cpu" else f"there are no kernels for {q.device.type} devices"
    if v is None:
        reason = "the dense attention map is wanted"
    if choices is not None:
        choices.append(_choice(operator, q, k, *(("plain PyTorch", reason) if reason else describe())))
    return "plain" if reason else "cpu"


def plan_backend(
    operator: str, scores: Tensor, task: Task, describe: Callable[[], tuple[str, str]]
) -> Backend:
    """Of a loop on scores that are given.  describe: what the CPU kernel runs and why; called only where
    that is collected."""
    choices = _listening.get()
    backend: Backend = "cpu"
    reason = None
    if scores.device.type != "cpu":
        reason = _why_no_gpu(scores)
        if reason is None:
            from asapc.kernels.gpu.plan import supported

            reason = supported(scores, task)
        backend = "gpu" if reason is None else "plain"
    if choices is not None:
        on_gpu = ("Triton, matrices side by side", "the tensors are on a GPU")
        kernel, why = ("plain PyTorch", reason) if reason else describe() if backend == "cpu" else on_gpu
        shape = "B{} H{} N{} M{}".format(*scores.shape)
        choices.append(Choice(operator, shape, str(scores.dtype).removeprefix("torch."), kernel, why))
    return backend


def note_plain(operator: str, q: Tensor, k: Tensor, reason: str) -> None:
    """Of an operator that has no kernel."""
    note(operator, q, k, "plain PyTorch", reason)


def note(operator: str, q: Tensor, k: Tensor, kernel: str, reason: str) -> None:
    """What runs, where there is no choice."""
    choices = _listening.get()
    if choices is not None:
        choices.append(_choice(operator, q, k, kernel, reason))


def _choice(operator: str, q: Tensor, k: Tensor, kernel: str, reason: str) -> Choice:
    batch, heads, queries, dim = q.shape
    shape = f"B{batch} H{heads} N{queries} M{k.shape[2]} D{dim}"
    return Choice(operator, shape, str(q.dtype).removeprefix("torch."), kernel, reason)


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


def _cpu_path(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    score_multiplier: float,
) -> tuple[str, str]:
    """Measures the scores, which the kernel itself avoids: this is for people to read."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    size = q.shape[2] * k.shape[2] * dtype.itemsize
    mib = f"a head's scores take {size / 2**20:.2f} MiB"
    limits = thresholds(q, k)
    if v is not None and size > limits.resident_bytes:
        kept = f"{limits.resident_bytes / 2**20:g}"
        path, why = "streamed", f"{mib}, more than the {kept} MiB that are kept"
    elif 2 * size > limits.tile_bytes:
        path, why = "one head a tile", f"{mib}: two would leave no room in a private cache"
    else:
        path, why = "heads stacked", f"{mib}, several fit a private cache"
    scores = score_matrix(widen(q), widen(k), keep, widen(bias), score_multiplier)
    top = scores.amax(-1)
    low = scores if keep is None else scores.masked_fill(~keep[:, None, None, :], torch.inf)
    reach = float((top - low.amin(-1)).nan_to_num(0.0).amax()) if scores.numel() else 0.0
    safe, wide = SAFE_ROW_RANGE[dtype], SAFE_ROW_RANGE[torch.float64]
    if reach > safe and reach <= wide and not path.startswith("streamed"):
        return f"CPU, {path}, linear domain in float64", (
            f"{why}; a row of scores spans {reach:.0f}: more than {safe:.0f}, at most {wide:.0f}"
        )
    if reach > safe:
        return f"CPU, {path}, log domain", f"{why}; a row of scores spans {reach:.0f} > {safe:.0f}"
    return f"CPU, {path}, linear domain", f"{why}; rows of scores span at most {reach:.1f}"
