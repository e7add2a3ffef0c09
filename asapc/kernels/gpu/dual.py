"""Triton twins of operators.asap.dual and dual_and_row_mass.

Families with a kernel run it, the others their reference on the device; `_finish` centres the sum
and goes to score coordinates in one launch. `supported` says which calls these functions take.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asapc.features import CLUSTERED, Feature
from asapc.features.clouds import Clouds
from asapc.kernels.dual import Backend
from asapc.kernels.gpu import coarse, gaussian, sliced, tiles
from asapc.kernels.gpu.launch import keep_arguments, padded
from asapc.kernels.gpu.tiles import load_rows, with_mass


def supported(q: Tensor, k: Tensor, features: str) -> str | None:
    """None where dual and dual_and_row_mass can run these inputs, else why not, in one sentence."""
    reason = tiles.supported(q, k, None, None)
    if reason is not None:
        return reason
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[2] == 0:
            return f"the GPU kernels take at least one token, and {name} has none"
    for feature in map(Feature.parse, features.split()):
        if feature.family in CLUSTERED and feature.count > coarse.MAX_PIVOTS:
            return f"the GPU kernels hold up to {coarse.MAX_PIVOTS} pivots, and {feature} has more"
    return None


def finish(total: Tensor, clouds: Clouds) -> Tensor:
    """centre(total) - |x|^2 / 2: [B, H, N], a predicted dual in score coordinates."""
    x = clouds.x
    batch, heads, num_x, dim = x.shape
    out = x.new_empty(batch, heads, num_x)
    if out.numel() == 0:
        return out
    deep = padded(dim)
    block = min(max(16, 4096 // deep), padded(num_x))
    _finish[(batch * heads, triton.cdiv(num_x, block))](
        total, *total.stride(), x, *x.stride(), *keep_arguments(clouds.x_keep, x),
        out, num_x, dim, heads, KEEP=clouds.x_keep is not None, DEEP=deep,
        BLOCK_ALL=min(1024, padded(num_x)), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _finish(
    p_total, stride_tb, stride_th, stride_tn, p_x, stride_xb, stride_xh, stride_xn, stride_xd,
    p_keep, stride_kb, stride_kn, p_out, num_x, dim, heads,
    KEEP: tl.constexpr, DEEP: tl.constexpr, BLOCK_ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean over the points with mass, which every program forms, is subtracted from a block of them;
    the others become 0."""
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // heads, i_bh % heads
    p_total += i_b * stride_tb + i_h * stride_th
    p_x += i_b * stride_xb + i_h * stride_xh
    p_keep += i_b * stride_kb
    b_sum = tl.zeros([BLOCK_ALL], tl.float32)
    b_count = tl.zeros([BLOCK_ALL], tl.float32)
    for start in range(0, num_x, BLOCK_ALL):
        o_n = start + tl.arange(0, BLOCK_ALL).to(tl.int64)
        m_n = with_mass(p_keep, stride_kn, o_n, num_x, KEEP)
        b_sum += tl.load(p_total + o_n * stride_tn, mask=m_n, other=0.0)
        b_count += m_n.to(tl.float32)
    mean = tl.sum(b_sum, 0) / tl.maximum(tl.sum(b_count, 0), 1.0)
    o_d = tl.arange(0, DEEP)
    o_n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < num_x
    b_x = load_rows(p_x, o_n, m_n, o_d, dim, stride_xn, stride_xd, True)
    m_mass = with_mass(p_keep, stride_kn, o_n, num_x, KEEP)
    b_own = tl.load(p_total + o_n * stride_tn, mask=m_mass, other=0.0)
    b_own = tl.where(m_mass, b_own - mean, 0.0)
    tl.store(p_out + i_bh * num_x + o_n, b_own - tl.sum(b_x * b_x, 1) * 0.5, mask=m_n)


_BACKEND = Backend(
    {"gaussian": gaussian.contribution, "sliced": sliced.contribution},
    coarse.dual_and_mass,
    finish,
)
dual = _BACKEND.dual  # on `supported` inputs
dual_and_row_mass = _BACKEND.dual_and_row_mass
