"""Triton twin of features/sliced.py: project, then sort, scan and scatter a few slices at a time.

Up to MAX_POINTS points a cloud is sorted in registers: the projection's bits, in an order-preserving
form, above the token's index make one int64 key. Launches: `_project` for either cloud,
`_potentials` with one program per (b, h) and block of slices, and `_weigh` for the sum over slices,
whose order is fixed. Larger clouds run the reference itself, which sorts on the device.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asapc.features import sliced
from asapc.features.clouds import Budget, Clouds
from asapc.kernels.gpu.launch import keep_arguments, padded
from asapc.kernels.gpu.tiles import products, with_mass

MAX_POINTS = 1024
SORTED = 2048  # keys that a program sorts at once
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32: points without mass sort last


def contribution(clouds: Clouds, theta: Tensor, weights: Tensor, budget: Budget) -> Tensor:
    """sliced.columns @ weights, not centred: [B, H, N].  theta: [L, D]; weights: [1|H, L].

    Without gradients. Clouds in float32; N, M >= 1.
    """
    x, y = clouds.x, clouds.y
    batch, heads, num_x, _ = x.shape
    num_y, slices = y.shape[2], theta.shape[0]
    if max(num_x, num_y) > MAX_POINTS:
        values = sliced.potentials(clouds, theta)
        return (weights[:, None] @ values)[:, :, 0]
    out = x.new_empty(batch, heads, num_x)
    if out.numel() == 0:
        return out
    lines_x = _lines(x, theta)
    lines_y = _lines(y, theta)
    width_x, width_y = padded(num_x), padded(num_y)
    block = max(1, min(triton.next_power_of_2(slices), SORTED // max(width_x, width_y)))
    _potentials[(batch * heads, triton.cdiv(slices, block))](
        lines_x, lines_y, *keep_arguments(clouds.x_keep, x), *keep_arguments(clouds.y_keep, x),
        num_x, num_y, slices, heads,
        X_KEEP=clouds.x_keep is not None, Y_KEEP=clouds.y_keep is not None, PAIRED=num_x == num_y,
        BLOCK_L=block, BLOCK_X=width_x, BLOCK_Y=width_y, num_warps=8 if block * width_x > 1024 else 4,
    )  # fmt: skip
    wide = min(128, width_x)
    _weigh[(batch * heads, triton.cdiv(num_x, wide))](
        lines_x, weights, weights.stride(0) if weights.shape[0] > 1 else 0, weights.stride(1),
        out, num_x, slices, heads, BLOCK_L=16, BLOCK_N=wide, num_warps=4,
    )  # fmt: skip
    return out


def _lines(points: Tensor, theta: Tensor) -> Tensor:
    """theta . x: [B, H, L, N]."""
    batch, heads, count, dim = points.shape
    slices = theta.shape[0]
    lines = points.new_empty(batch, heads, slices, count)
    block_l, block_n = min(32, padded(slices)), min(64, padded(count))
    grid = (batch * heads, triton.cdiv(slices, block_l) * triton.cdiv(count, block_n))
    _project[grid](
        points, *points.stride(), theta, *theta.stride(), lines, count, slices, dim, heads,
        BLOCK_L=block_l, BLOCK_N=block_n, BLOCK_D=16, PRECISION="ieee", num_warps=4,
    )  # fmt: skip
    return lines


@triton.jit
def _project(
    p_a, stride_ab, stride_ah, stride_an, stride_ad, p_theta, stride_tl, stride_td, p_lines,
    count, slices, dim, heads,
    BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """lines [B H, L, N] = theta a'; grid (B H, blocks of N times blocks of L)."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    blocks_n = tl.cdiv(count, BLOCK_N)
    p_a += (i_bh // heads) * stride_ab + (i_bh % heads) * stride_ah
    o_n = ((i_block % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o_l = ((i_block // blocks_n) * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
    m_n, m_l = o_n < count, o_l < slices
    b_lines = products(
        None, p_theta, p_a, o_l, o_n, m_l, m_n, dim, stride_tl, stride_td, stride_an, stride_ad, True,
        PRECISION, BLOCK_L, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip
    p_lines += i_bh * slices * count
    tl.store(p_lines + o_l[:, None] * count + o_n[None, :], b_lines, mask=m_l[:, None] & m_n[None, :])


@triton.jit
def _ordered(b_bits):
    """int32 with the order of the float32 whose bits are given; its own inverse."""
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _potentials(
    p_x, p_y, p_xkeep, stride_xkb, stride_xkn, p_ykeep, stride_ykb, stride_ykm,
    num_x, num_y, slices, heads,
    X_KEEP: tl.constexpr, Y_KEEP: tl.constexpr, PAIRED: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """The potentials of BLOCK_L slices in place of their projections p_x; grid (B H, blocks of L).

    p_x: [B H, L, N]; p_y: [B H, L, M]. The sorted clouds go back to these buffers, where every
    thread then finds its neighbours and slopes.
    """
    i_bh = tl.program_id(0).to(tl.int64)
    i_b = i_bh // heads
    p_x += i_bh * slices * num_x
    p_y += i_bh * slices * num_y
    o_l = tl.program_id(1).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    m_l = (o_l < slices)[:, None]
    o_x = tl.arange(0, BLOCK_X)
    o_y = tl.arange(0, BLOCK_Y)
    m_x = with_mass(p_xkeep + i_b * stride_xkb, stride_xkn, o_x, num_x, X_KEEP)
    m_y = with_mass(p_ykeep + i_b * stride_ykb, stride_ykm, o_y, num_y, Y_KEEP)
    n_x, n_y = tl.sum(m_x.to(tl.int32), 0), tl.sum(m_y.to(tl.int32), 0)
    p_a = p_x + o_l[:, None] * num_x
    p_b = p_y + o_l[:, None] * num_y

    # Points beyond the cloud have the largest index of all: they sort behind those without mass.
    b_a = tl.load(p_a + o_x[None, :], mask=m_l & m_x[None, :], other=LARGEST)
    b_key = (_ordered(b_a.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | o_x[None, :].to(tl.int64)
    b_key = tl.sort(b_key)
    b_order = (b_key & 0xFFFFFFFF).to(tl.int32)
    b_high = _ordered((b_key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    b_high = tl.where(m_l & (o_x < n_x)[None, :], b_high, 0.0)
    b_b = tl.load(p_b + o_y[None, :], mask=m_l & m_y[None, :], other=LARGEST)
    b_b = tl.sort(b_b)
    b_b = tl.where(m_l & (o_y < n_y)[None, :], b_b, 0.0)
    tl.debug_barrier()  # every projection is read before a sorted one takes its place
    tl.store(p_a + o_x[None, :], b_high, mask=m_l & (o_x < num_x)[None, :])
    tl.store(p_b + o_y[None, :], b_b, mask=m_l & (o_y < num_y)[None, :])
    tl.debug_barrier()

    # The step into rank r + 1 comes from the one before: potentials are inclusive sums of steps.
    m_step = m_l & ((o_x > 0) & (o_x < num_x))[None, :]
    b_low = tl.load(p_a + (o_x - 1)[None, :], mask=m_step, other=0.0)
    if PAIRED and not X_KEEP and not Y_KEEP:
        b_slope = tl.load(p_b + (o_x - 1)[None, :], mask=m_step, other=0.0)
    else:  # the y of rank ceil(r n_y / n_x)
        points = tl.maximum(n_x, 1)
        b_last = (o_x * n_y + points - 1) // points - 1
        b_last = tl.maximum(tl.minimum(b_last, n_y - 1), 0)
        b_slope = tl.load(p_b + b_last[None, :], mask=m_step, other=0.0)
    b_step = (b_high - b_low) * ((b_high + b_low) * 0.5 - b_slope)
    b_rank = tl.cumsum(tl.where(m_step, b_step, 0.0), 1)
    tl.debug_barrier()  # every neighbour is read before a potential takes its place
    tl.store(p_a + b_order, b_rank, mask=m_l & (b_order < num_x))


@triton.jit
def _weigh(
    p_lines, p_weights, stride_wh, stride_wl, p_out, num_x, slices, heads,
    BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sum_l w_l f_l: [B H, N]; grid (B H, blocks of N)."""
    i_bh = tl.program_id(0).to(tl.int64)
    p_lines += i_bh * slices * num_x
    p_weights += (i_bh % heads) * stride_wh
    o_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < num_x
    b_out = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, slices, BLOCK_L):
        o_l = start + tl.arange(0, BLOCK_L).to(tl.int64)
        m_l = o_l < slices
        b_weight = tl.load(p_weights + o_l * stride_wl, mask=m_l, other=0.0)
        b_f = tl.load(
            p_lines + o_l[:, None] * num_x + o_n[None, :],
            mask=m_l[:, None] & m_n[None, :], other=0.0,
        )  # fmt: skip
        b_out += tl.sum(b_weight[:, None] * b_f, 0)
    tl.store(p_out + i_bh * num_x + o_n, b_out, mask=m_n)
