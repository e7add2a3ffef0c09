"""Triton twin of operators/plan.py for small matrices: many of them in the registers of one program.

A mixer of 4 streams has one 4 x 4 matrix a token. Each is read once, goes through all half-steps and is
written once; a half-step is a reduction of a [G, N, M] tile over one axis, in the log domain. A constant
in the divisions of a plan keeps its arithmetic: the plan is divided by its sums, as its teacher does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asapc.kernels.gpu.tiles import finite_or_zero, strides_of
from asapc.kernels.plan import Task, is_small
from asapc.operators.plan import of_heads

ENTRIES = 2048  # of a program's tile, padding included
STARTS = {"plain": 0, "row": 1, "matrix": 2, "softmax": 3}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supported(scores: Tensor, task: Task) -> str | None:
    """Why the kernel cannot run; None if it can."""
    if scores.dtype not in DTYPES:
        return f"the kernels do not support {str(scores.dtype).removeprefix('torch.')}"
    if not is_small(scores):
        return "the kernel is for small matrices"
    if task.settings["half_steps"] < 1 or scores.numel() == 0:
        return "there is nothing to do"
    if task.as_written:
        return "what is left of hidden rows and columns depends on the order of the sums"
    stabiliser = task.stabiliser
    if stabiliser is not None and (stabiliser.form != "plan" or stabiliser.start not in STARTS):
        return "the kernel keeps a constant in the divisions of a plan alone"
    if stabiliser is not None and task.has_masses:
        return "the kernel keeps a constant where masses are alike"
    return None


def plan(scores: Tensor, task: Task) -> Tensor:
    """[B, H, N, M] in the dtype of the scores, see operators.plan; what `supported` allows."""
    batch, heads, queries, keys = scores.shape
    out = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    log_mu = None if task.log_mu is None else task.log_mu.broadcast_to(batch, heads, queries)
    log_nu = None if task.log_nu is None else task.log_nu.broadcast_to(batch, heads, keys)
    by_head = task.settings["by_head"]
    scales = None if by_head is None else of_heads(by_head, scores).float()
    stabiliser = task.stabiliser
    shares = stabiliser is not None and stabiliser.shares
    block_n, block_m = (triton.next_power_of_2(size) for size in (queries, keys))
    block_g = max(1, ENTRIES // (block_n * block_m))
    count = batch * heads
    _side_by_side[(triton.cdiv(count, block_g),)](
        scores, log_mu, log_nu, scales, out, count, heads, queries, keys,
        *scores.stride(), *strides_of(log_mu, 3), *strides_of(log_nu, 3),
        task.settings["score_multiplier"], task.factor(queries, keys), *task.damping,
        0.0 if stabiliser is None else stabiliser.constant,
        1.0 / queries if shares else 1.0, 1.0 / keys if shares else 1.0,
        task.settings["half_steps"],
        ROWS_FIRST=task.rows_first,
        LOG=bool(task.settings["log"]),
        HAS_MU=log_mu is not None,
        HAS_NU=log_nu is not None,
        HAS_SCALES=scales is not None,
        DAMPED=task.settings["damping"] is not None,
        STABILISED=stabiliser is not None,
        ADDED=stabiliser is not None and stabiliser.kind == "add",
        START=0 if stabiliser is None else STARTS[stabiliser.start],
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        BLOCK_M=block_m,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _closed(logits, log_mass, AXIS: tl.constexpr):
    """log mass - logsumexp over an axis; 0 where there is nothing."""
    maximum = tl.max(logits, AXIS)
    total = tl.sum(tl.exp(logits - tl.expand_dims(finite_or_zero(maximum), AXIS)), AXIS)
    return tl.where(total == 0.0, 0.0, log_mass - maximum - tl.log(total))


@triton.jit
def _closed_plan(log_plan, log_mass, AXIS: tl.constexpr):
    """See operators.c_transforms.closed_log_plan."""
    shifted = log_plan - tl.expand_dims(finite_or_zero(tl.max(log_plan, AXIS)), AXIS)
    total = tl.sum(tl.exp(shifted), AXIS)
    change = tl.where(total == 0.0, 0.0, log_mass - tl.log(tl.where(total == 0.0, 1.0, total)))
    return shifted + tl.expand_dims(change, AXIS)


@triton.jit
def _divided(plan, mass, constant, exact, ADDED: tl.constexpr, AXIS: tl.constexpr):
    """A plan whose sums over an axis are brought to a mass, but for the constant."""
    total = tl.sum(plan, AXIS)
    kept = total + constant if ADDED else tl.maximum(total, constant)
    kept = tl.where(exact, total, kept)
    ratio = tl.where(total == 0.0, 1.0, mass / tl.where(total == 0.0, 1.0, kept))
    return plan * tl.expand_dims(ratio, AXIS)


@triton.jit
def _side_by_side(
    p_scores, p_mu, p_nu, p_scales, p_out,
    count, heads, queries, keys,
    stride_b, stride_h, stride_n, stride_m, stride_mu_b, stride_mu_h, stride_mu_n, stride_nu_b,
    stride_nu_h, stride_nu_m,
    multiplier, factor, damping_rows, damping_columns, constant, row_mass, column_mass, half_steps,
    ROWS_FIRST: tl.constexpr, LOG: tl.constexpr, HAS_MU: tl.constexpr, HAS_NU: tl.constexpr,
    HAS_SCALES: tl.constexpr, DAMPED: tl.constexpr, STABILISED: tl.constexpr, ADDED: tl.constexpr,
    START: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    o_g = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    o_n = tl.arange(0, BLOCK_N).to(tl.int64)
    o_m = tl.arange(0, BLOCK_M).to(tl.int64)
    i_b, i_h = o_g // heads, o_g % heads
    m_g, m_n, m_m = o_g < count, o_n < queries, o_m < keys
    here = m_g[:, None, None] & m_n[None, :, None] & m_m[None, None, :]
    lead = i_b * stride_b + i_h * stride_h
    places = lead[:, None, None] + o_n[None, :, None] * stride_n + o_m[None, None, :] * stride_m
    scores = tl.load(p_scores + places, mask=here, other=0.0).to(tl.float32) * multiplier
    if HAS_SCALES:
        scores *= tl.load(p_scales + i_h, mask=m_g, other=1.0)[:, None, None]
    scores = tl.where(here, scores, float("-inf"))
    turn = tl.zeros([], tl.int32) + (1 if ROWS_FIRST else 0)  # 1: the rows' half-step
    if STABILISED:
        if START == 1 or START == 3:
            scores -= finite_or_zero(tl.max(scores, 2))[:, :, None]
        elif START == 2:
            scores -= finite_or_zero(tl.max(tl.max(scores, 2), 1))[:, None, None]
        plan = tl.exp(scores)
        for step in range(half_steps):
            exact = (step == 0) & (START == 3)
            if turn == 1:
                plan = _divided(plan, row_mass, constant, exact, ADDED, 2)
            else:
                plan = _divided(plan, column_mass, constant, exact, ADDED, 1)
            turn = 1 - turn
        plan *= factor
        result = tl.log(plan) if LOG else plan
    else:
        log_mu = tl.zeros([BLOCK_G, BLOCK_N], tl.float32) - tl.log(queries * 1.0)
        log_nu = tl.zeros([BLOCK_G, BLOCK_M], tl.float32) - tl.log(keys * 1.0)
        if HAS_MU:
            places = (i_b * stride_mu_b + i_h * stride_mu_h)[:, None] + o_n[None, :] * stride_mu_n
            inside = m_g[:, None] & m_n[None, :]
            log_mu = tl.load(p_mu + places, mask=inside, other=0.0).to(tl.float32)
        if HAS_NU:
            places = (i_b * stride_nu_b + i_h * stride_nu_h)[:, None] + o_m[None, :] * stride_nu_m
            inside = m_g[:, None] & m_m[None, :]
            log_nu = tl.load(p_nu + places, mask=inside, other=0.0).to(tl.float32)
        f = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
        g = tl.zeros([BLOCK_G, BLOCK_M], tl.float32)
        for _ in range(half_steps):
            if DAMPED:
                if turn == 1:
                    f = _closed(scores + g[:, None, :], log_mu, 2) * damping_rows
                else:
                    g = _closed(scores + f[:, :, None], log_nu, 1) * damping_columns
            elif turn == 1:
                scores = _closed_plan(scores, log_mu, 2)
            else:
                scores = _closed_plan(scores, log_nu, 1)
            turn = 1 - turn
        result = scores + f[:, :, None] + g[:, None, :]
        result = result + tl.log(factor) if LOG else tl.exp(result) * factor
    flat = (o_g[:, None, None] * queries + o_n[None, :, None]) * keys + o_m[None, None, :]
    tl.store(p_out + flat, result.to(p_out.dtype.element_ty), mask=here)
