"""The engine in C++ that runs finite loops and sliced plans on a CPU: what engine.cpp computes, and
whether it is here.

It is compiled where asapc is installed and there is a compiler, once for each instruction set. Which of
them runs is torch's own choice, that of torch.backends.cpu.get_cpu_capability(). ASAPC_NATIVE=0 has the
plain PyTorch of operators/ run instead; it may also name another build.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from asapc.features.clouds import Budget, Clouds
from asapc.features.gaussian import brenier_matrix
from asapc.ir import Coupling, Side, Stabiliser, Ties
from asapc.kernels.loop import Loop, Tail, precision
from asapc.kernels.plan import Task
from asapc.operators import lot as lot_reference
from asapc.operators.banded import within
from asapc.operators.ranks import Clouds as SlicedClouds
from asapc.operators.ranks import clouds_of
from asapc.operators.sinkhorn import clean_values, masked

BUILDS = {"AVX512": "engine_avx512", "AVX2": "engine_avx2"}  # any other CPU has "engine"
PROBLEM = Struct("9P27q7d4q3d")  # of engine.cpp, its Rule last
SLOPES = Struct("8Pqd")
PLAN, OF_PLANS = Struct("6P4qdq"), Struct("=13q8d4q3d")  # of a call; of all with its settings and sizes
ESP, ESP_SLOPES, FEATURE = Struct("10P15q2d"), Struct("8P"), Struct("8P18q")
RESIDENT_BYTES = 1 << 26  # the largest K of a head that is kept; others are formed again in every pass
FORMS = ("scaling", "plan")  # after the loop without a constant
Band = tuple[int, int]  # low and high
FAMILIES = ("coarse", "sliced", "moments", "gaussian")


@cache
def missing() -> str | None:
    """Why the engine does not run here; None where it does."""
    if os.environ.get("ASAPC_NATIVE") == "0":
        return "ASAPC_NATIVE=0"
    if _build() is None:
        return "the C++ engine was not built: no compiler was found"
    return None if _engine() else "the C++ engine was built from another version: install asapc again"


def described() -> str:
    """The engine in a word or two, for people to read."""
    reason = missing()
    if reason is not None:
        return f"no C++ engine: {reason.removeprefix('the C++ engine was ')}"
    return f"C++ engine, {torch.backends.cpu.get_cpu_capability()}"


@cache
def _build() -> Path | None:
    """The build for this CPU, None without one."""
    name = BUILDS.get(torch.backends.cpu.get_cpu_capability(), "engine")
    paths = [Path(__file__).with_name(name + suffix) for suffix in EXTENSION_SUFFIXES]
    given = os.environ.get("ASAPC_NATIVE")
    return next((path for path in ([Path(given)] if given else paths) if path.exists()), None)


@cache
def _engine() -> Any:
    """The build, loaded; None without one, and for one of another version."""
    path = _build()
    if path is None:
        return None
    library = ctypes.CDLL(str(path.absolute()))  # whose calls release the interpreter's lock
    structs = (PROBLEM, SLOPES, PLAN, ESP, ESP_SLOPES, FEATURE)
    own = [struct.size + (OF_PLANS.size if struct is PLAN else 0) for struct in structs]
    try:
        if [*(ctypes.c_int64 * len(own)).in_dll(library, "asapc_layout")] != own:
            return None
    except ValueError:  # of a version that had no such list
        return None
    library.asapc_sinkhorn.restype = ctypes.c_double
    for name in ("plan", "feature"):
        getattr(library, f"asapc_{name}").restype = ctypes.c_int64
    for name in ("sinkhorn", "plan", "esp", "feature"):
        slopes = name in ("sinkhorn", "esp")
        getattr(library, f"asapc_{name}").argtypes = [ctypes.c_char_p] * (1 + slopes)
    return library


def runs(stabiliser: Stabiliser) -> bool:
    """Whether sinkhorn_loop takes it: scores, less their row's largest or not; scalings from 1."""
    return stabiliser.start in ("plain", "row", "softmax") and not stabiliser.start_share


def sinkhorn_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    bias: Tensor | None,
    dual: Tensor | None,
    loop: Loop,
    stabiliser: Stabiliser | None = None,
    mass: Tensor | None = None,
    to_columns: bool = False,
    slopes: bytes | None = None,
    band: Band | None = None,
) -> tuple[Tensor, float]:
    """A v [B, H, N, E], or the map A [B, H, N, M] where v is None; the widest range of a row's scores.

    Shapes and what an example without an active key gets are those of operators/.  dual: where the loop
    starts, None for zero: the source dual [B, H, N] where columns are closed first, the target dual
    [B, H, M] where rows are.  At least one half-step.  stabiliser: one that `runs`; where a row spans
    more than float64 holds, what is returned means nothing then.
    mass: [B, H, N], of rows, by N times which the output is divided.
    to_columns: A^T v [B, H, M, E] instead, for v [B, H, N, E] of the rows: 0 at columns not kept, and
    of the plan as it is where there are masses.
    slopes: of sinkhorn_gradients; then there is no A v.  band: low and high of operators.banded.
    """
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    width = keys if v is None else v.shape[3]
    out_dtype = q.dtype if v is None else v.dtype
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    bias = None if bias is None else bias.to(dtype).expand(batch, heads, queries, keys)
    out = q.new_empty((batch, heads, keys if to_columns else queries, width), dtype=dtype)
    if keys == 0 or out.numel() == 0:
        return out.zero_().to(out_dtype), 0.0
    shown = None if bias is None else _shown(bias)
    low, high = (-queries, keys) if band is None else within(queries, keys, *band)
    q, k, v = _rows(q, dtype), _rows(k, dtype), None if v is None else _rows(v, dtype)
    keep, shown = _masks(q, k, v, keep, shown, to_columns)
    if mass is not None:
        mass = mass.to(dtype).expand(batch, heads, queries).contiguous()
    if dual is not None:
        starts = queries if loop.first_side == "column" else keys
        dual = dual.to(dtype).expand(batch, heads, starts).contiguous()
    given = (q, k, v, keep, bias, dual, out, shown, mass)
    problem = PROBLEM.pack(
        *[0 if x is None else x.data_ptr() for x in given], batch, heads, queries, keys, dim, width,
        *q.stride()[:3], *k.stride()[:3], *((0, 0, 0) if v is None else v.stride()[:3]),
        *((0, 0, 0, 0) if bias is None else bias.stride()), loop.half_steps, loop.first_side == "row",
        to_columns, dtype is torch.float64, RESIDENT_BYTES, torch.get_num_threads(),
        low, high, loop.score_multiplier, *loop.output_factor,
        *((1.0 / queries, 1.0 / keys) if stabiliser is not None and stabiliser.shares else (1.0, 1.0)),
        *_rule(stabiliser, queries, keys),
    )  # fmt: skip
    widest = _engine().asapc_sinkhorn(problem, slopes)
    if widest < 0:
        raise MemoryError(f"asapc: the loop on {keys} keys and {queries} queries does not fit the memory")
    return out if dtype is out_dtype else out.to(out_dtype), widest


def sinkhorn_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None,
    dual: Tensor | None, loop: Loop, tail: Tail, outs: Sequence[Tensor | None], depth: Tensor,
    **others: Any,
) -> None:  # fmt: skip
    """Gradients of A v for grad_out of its size, written where the linear domain holds a head.

    outs: of q, k, v, the dual, the mass and the bias [B, H, N, M], as far as they go, None for one that
    is not wanted; 0 before, in float32 or float64.  depth: [B, H] int64, the half-steps that they passed
    through.  Other arguments as of sinkhorn_loop.
    """
    own = torch.float64 if q.dtype is torch.float64 else torch.float32
    given = [grad_out.to(own).contiguous(), *outs, *[None] * (6 - len(outs))]
    pointers = [0 if x is None else x.data_ptr() for x in given]
    slopes = SLOPES.pack(*pointers, depth.data_ptr(), tail.most, tail.tolerance)
    sinkhorn_loop(q, k, v, keep, bias, dual, loop, slopes=slopes, **others)


def _shown(bias: Tensor) -> Tensor | None:
    """[B, N], the queries that a bias [B, H, N, M] of one number for each query shows: those of -inf,
    which a mask of both sides hides, are no rows of the loop's problem."""
    of_queries = bias.shape[3] > 1 and bias.stride(3) == 0 and (bias.shape[1] == 1 or bias.stride(1) == 0)
    return bias[:, 0, :, 0] != -math.inf if of_queries else None


def lot(keep: Tensor | None, query_keep: Tensor | None, **given: Any) -> tuple[Tensor, float]:
    """As operators.lot.lot, of at least one half-step each; the widest range of a pivot's scores."""
    parts, to_keys, to_queries = _lot_parts(keep=keep, query_keep=query_keep, **given)
    z, mass, q, k, v, bias, weight = parts.values()
    mixed, widest = sinkhorn_loop(z, k, v, keep, bias, None, to_keys, mass=mass)
    mixed = masked(mixed * weight, keep, None)
    given_too = (z, q, mixed, query_keep, None, None, to_queries)
    out, wider = sinkhorn_loop(*given_too, mass=mass, to_columns=True)
    return out.to(given["v"].dtype), max(widest, wider)


def lot_gradients(
    grad_out: Tensor, keep: Tensor | None, query_keep: Tensor | None, **given: Any
) -> dict[str, Tensor] | None:
    """Of operators.lot.lot by name, for grad_out [B, H, N, E]; None where the linear domain does not hold
    a head. The engine has those of both loops, and torch goes on from there."""
    given |= {name: clean_values(given[name], keep) for name in ("k", "v")}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    with torch.enable_grad():
        parts, to_keys, to_queries = _lot_parts(keep=keep, query_keep=query_keep, **given | leaves)
    made = {name: x for name, x in parts.items() if isinstance(x, Tensor) and x.requires_grad}
    z, mass, q, k, v, bias, weight = (x.detach() if isinstance(x, Tensor) else x for x in parts.values())
    mixed, _ = sinkhorn_loop(z, k, v, keep, bias, None, to_keys, mass=mass)

    def zeros(x: Any) -> Any:
        return None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format)

    of_z, of_mass, of_q, of_k, of_v, of_bias = map(zeros, (z, mass, q, k, v, bias))
    z_too, mass_too, of_mixed = map(zeros, (z, mass, mixed))
    depth, tail = torch.full((2, *q.shape[:2]), -1), Tail(max(to_keys.half_steps, to_queries.half_steps))
    sinkhorn_gradients(
        masked(grad_out, keep, None), z, q, mixed * weight, query_keep, None, None, to_queries, tail,
        (z_too, of_q, of_mixed, None, mass_too), depth[0], mass=mass, to_columns=True,
    )  # fmt: skip
    sinkhorn_gradients(
        of_mixed * weight, z, k, v, keep, bias, None, to_keys, tail,
        (of_z, of_k, of_v, None, of_mass, of_bias), depth[1], mass=mass,
    )  # fmt: skip
    if query_keep is not None:
        depth[0].masked_fill_(~query_keep.any(-1)[:, None], 0)  # nothing to do
    if bool((depth < 0).any()):
        return None
    of_weight = (of_mixed * mixed).sum(-1, keepdim=True)
    of_parts = (of_z + z_too, of_mass + mass_too, of_q, of_k, of_v, of_bias, of_weight)
    of_made = [x for name, x in zip(parts, of_parts, strict=True) if name in made]
    found = torch.autograd.grad([*made.values()], [*leaves.values()], of_made)
    return dict(zip(leaves, found, strict=True))


def _lot_parts(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None,
    key_bias: Tensor | None, pivots: Tensor, pivot_mass: Tensor, query_multiplier: float,
    key_multiplier: float, query_half_steps: int, queries_first: bool, key_half_steps: int,
    keys_first: bool, output_factor: Sequence[float], interleaved: bool = False,
    pivot_weight: Tensor | None = None,
) -> tuple[dict[str, Any], Loop, Loop]:  # fmt: skip
    """Pivots [B, H, R, D], masses, q, k, v, bias [B, H, R, M] and what Gamma2 v / sigma is multiplied by,
    in one dtype; and the loops from pivots to keys and to queries."""
    batch, heads, count = q.shape[0], *pivots.shape[:2]
    dtype = lot_reference.work_dtype(q)

    def each(x: Tensor) -> Tensor:
        x = x.to(dtype)
        return lot_reference.by_example(x, batch) if interleaved else x.expand(batch, heads, count)

    def loop(multiplier: float, half_steps: int, tokens_first: bool, power: float) -> Loop:
        active = float(tokens_first == (half_steps % 2 == 1))  # where it ends on the tokens
        side: Side = "column" if tokens_first else "row"
        return Loop(multiplier, half_steps, side, [1.0, power, active, -active])

    weight = lot_reference.token_factor(output_factor, q, k, keep, query_keep)
    weight = weight if pivot_weight is None else weight * each(pivot_weight)[..., None]
    bias = None if key_bias is None else key_bias.to(dtype).expand(batch, heads, count, k.shape[2])
    parts = {
        "z": pivots.to(dtype).expand(batch, -1, -1, -1), "mass": each(pivot_mass), "q": q.to(dtype),
        "k": k.to(dtype), "v": v.to(dtype), "bias": bias, "weight": weight,
    }  # fmt: skip
    to_keys = loop(key_multiplier, key_half_steps, keys_first, 1.0)
    return parts, to_keys, loop(query_multiplier, query_half_steps, queries_first, 0.0)


STARTS = {"plain": 0, "tensor": 0, "matrix": 1, "row": 2, "softmax": 2, "column": 3}
WRITTEN = {"duals": 1, "reversed": 2, "summed": 3, "increments": 4, "logs": 5, "softmax": 6}


def plan(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, offset: float, settings: bytes
) -> tuple[Tensor, Tensor | None]:
    """(plans [.., N, M], or their logarithms; those [g] that the linear domain does not hold, if any).

    scores: [.., N, M], contiguous, G matrices.  log_mu, log_nu: [G or 1, N] and [G or 1, M], None where
    uniform.  offset: what is subtracted before exp where the start has none.  settings: of plan_settings.
    """
    queries, keys = scores.shape[-2:]
    out = torch.empty_like(scores)
    held = torch.empty(scores.numel() // (queries * keys), dtype=torch.bool)
    lost = _planned(scores, log_mu, log_nu, out, held, None, False, offset, settings)
    return out, (~held).nonzero().squeeze(1) if lost else None


def plans_of_all(scores: Tensor, settings: bytes) -> Tensor | None:
    """As `plan` without masses and offset; None where the linear domain does not hold every matrix."""
    out = torch.empty_like(scores)
    lost = _planned(scores, None, None, out, None, None, False, 0.0, settings)
    return None if lost else out


def plan_changes(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, steps: int, of_scalings: bool,
    settings: bytes,
) -> Tensor | None:  # fmt: skip
    """[G, steps] float64, what half-steps on rows change, summed over a matrix's rows: |f - f before|, or
    if of_scalings |exp(f) - exp(f before)|; None where the linear domain does not hold them all.

    steps: how many, of the settings' half-steps.  Other arguments as of `plan`.
    """
    groups = scores.numel() // (scores.shape[-2] * scores.shape[-1])
    changes = scores.new_empty((groups, steps), dtype=torch.float64)
    lost = _planned(scores, log_mu, log_nu, None, None, changes, of_scalings, 0.0, settings)
    return None if lost else changes


def _planned(
    scores: Tensor, log_mu: Tensor | None, log_nu: Tensor | None, out: Tensor | None,
    held: Tensor | None, changes: Tensor | None, of_scalings: bool, offset: float, settings: bytes,
) -> int:  # fmt: skip
    """How many matrices are not held, which are noted in `held` [G]."""
    queries, keys = scores.shape[-2:]
    given = (scores, log_mu, log_nu, out, held, changes)
    lost: int = _engine().asapc_plan(PLAN.pack(
        *[0 if x is None else x.data_ptr() for x in given], log_mu is not None and len(log_mu) > 1,
        log_nu is not None and len(log_nu) > 1, torch.get_num_threads(), of_scalings, offset,
        scores.numel() // (queries * keys),
    ) + settings)  # fmt: skip
    if lost < 0:
        raise MemoryError(f"asapc: plans of {queries} x {keys} entries do not fit the memory")
    return lost


def plan_settings(
    task: Task, queries: int, keys: int, dtype: torch.dtype, start: str, near: float, far: float,
    beside: bool, in_order: bool,
) -> bytes:  # fmt: skip
    """For plans of these sizes.

    start: what is subtracted before exp, the largest score of a matrix, row or column, or the offset.
    near: the largest score, in size, of a row or column that is held.  far: the logarithm of a mass below
    which its token has a logarithm of the plan but no part in sums.  beside: one matrix a lane.
    in_order: what is not held is computed in the order of a teacher's sums.
    """
    settings, stabiliser = task.settings, task.stabiliser
    units = stabiliser is None or stabiliser.shares
    starts_shared = stabiliser is not None and stabiliser.form == "scaling" and stabiliser.start_share
    return OF_PLANS.pack(
        queries, keys, settings["half_steps"], task.rows_first, dtype is torch.float64, beside,
        STARTS[start], starts_shared, settings["log"], settings["damping"] is not None,
        WRITTEN.get(settings["form"], 0) if in_order else 0, settings["shares"], settings["is_kernel"],
        settings["score_multiplier"], *((1.0 / queries, 1.0 / keys) if units else (1.0, 1.0)),
        *task.damping, near, far, task.factor(queries, keys),
        *_rule(stabiliser, queries, keys, least(dtype), task.has_masses),
    )  # fmt: skip


def least(dtype: torch.dtype) -> float:
    """The smallest sum that `plan` divides by, so that no scaling overflows."""
    return float(torch.finfo(dtype).tiny ** 0.75)


def esp(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, query_keep: Tensor | None,
    slices: Tensor | None, inverse_temperature: Tensor, *, slice_weight: Tensor | None = None,
    **settings: Any,
) -> Tensor:  # fmt: skip
    """As operators.esp.esp_soft, its map where v is None; or esp_hard without softsort_temperature."""
    clouds, wanted = clouds_of(q, k, keep, query_keep, slices), q if v is None else v
    out = clouds.q.new_zeros(*q.shape[:3], k.shape[2] if v is None else v.shape[3])
    if out.numel() and k.shape[2]:
        tensors = _of_slices(clouds, v, inverse_temperature, slice_weight)
        _sliced(tensors, keep, query_keep, out, None, **settings)
    return out.to(wanted.dtype)


def esp_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None,
    query_keep: Tensor | None, slices: Tensor | None, inverse_temperature: Tensor, *,
    slice_weight: Tensor | None = None, **settings: Any,
) -> Mapping[str, Tensor | None]:  # fmt: skip
    """Of esp_soft or esp_hard, by name, for grad_out [B, H, N, E or M] with some keys.

    The engine has them for projections, which exact sorts have none of, and torch goes on from there.
    """
    given = {"q": q, "k": k, "v": v, "slices": slices, "inverse_temperature": inverse_temperature,
             "slice_weight": slice_weight}  # fmt: skip
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x is not None}
    with torch.enable_grad():
        clouds = clouds_of(leaves["q"], leaves["k"], keep, query_keep, leaves.get("slices"))
        of_weights = leaves["inverse_temperature"], leaves.get("slice_weight")
        made = _of_slices(clouds, leaves.get("v"), *of_weights)
    slopes = [None if x is None else torch.zeros_like(x) for x in made]
    _sliced(made, keep, query_keep, grad_out.to(clouds.q.dtype).contiguous(), slopes, **settings)
    exact = "softsort_temperature" not in settings  # whose projections are constants
    outputs, grads = zip(*((x, slope) for i, (x, slope) in enumerate(zip(made, slopes, strict=True))
                           if x is not None and x.requires_grad and not (exact and i in (3, 4))),
                         strict=True)  # fmt: skip
    found = torch.autograd.grad(outputs, [*leaves.values()], grads, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _of_slices(
    clouds: SlicedClouds, v: Tensor | None, inverse_temperature: Tensor, slice_weight: Tensor | None
) -> list[Tensor | None]:
    """q, k, v, x, y, tau [B, H] and omega [B, H, L], as the engine reads them."""
    heads, tau = clouds.q.shape[:2], inverse_temperature.double()
    omega = tau.new_ones(1) if slice_weight is None else slice_weight.double()
    v = None if v is None else v.to(clouds.q.dtype)
    weights = tau.expand(heads), omega.expand(*heads, clouds.num_slices)
    tensors = (clouds.q, clouds.k, v, clouds.x, clouds.y, *weights)
    return [None if x is None else x.contiguous() for x in tensors]


def _sliced(
    tensors: Sequence[Tensor | None], keep: Tensor | None, query_keep: Tensor | None, out: Tensor,
    slopes: Sequence[Tensor | None] | None, *, squared_cost: bool, mean_cost: bool, output_factor: float,
    coupling: Coupling = "interpolated", ties: Ties = "shared", softsort_temperature: float | None = None,
) -> None:  # fmt: skip
    """Fills `out`; with slopes, of all the tensors and 0 before, they are filled for it as a gradient."""
    q, k, v, *_, omega = tensors
    assert q is not None and k is not None and omega is not None
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    given = [*tensors, *_masks(q, k, v, keep, query_keep), out]

    def pointers(tensors: Sequence[Tensor | None]) -> list[int]:
        return [0 if x is None else x.data_ptr() for x in tensors]

    problem = ESP.pack(
        *pointers(given), batch, heads, queries, keys, dim, out.shape[3], omega.shape[2],
        coupling == "monotone", squared_cost, mean_cost, q.dtype == torch.float64,
        torch.get_num_threads(), softsort_temperature is not None, ties == "shared", ties == "ascending",
        softsort_temperature or 0.0, output_factor,
    )  # fmt: skip
    more = None if slopes is None else ESP_SLOPES.pack(*pointers([out, *slopes]))
    if not _engine().asapc_esp(problem, more):
        raise MemoryError(f"asapc: plans of {queries} x {keys} tokens do not fit the memory")


def feature(
    family: str, clouds: Clouds, parameter: Tensor | None = None, weights: Tensor | None = None,
    count: int = 0, budget: Budget | None = None, want_mass: bool = False,
) -> tuple[Tensor, Tensor | None, bool]:  # fmt: skip
    """A column [B, H, N] of one of FAMILIES; and of coarse, if wanted, the mass [B, H, M] of points y;
    whether the linear domain holds every head.

    coarse: as features.coarse.dual_and_mass, the dual up to a constant.  sliced: features.sliced.columns
    times weights [1|H, L].  moments: of x and y the covariance and, as one row more, the mean
    [B, H, 2, D + 1, D].  gaussian: beta by the matrix A.  Potentials are 0 at points without mass.
    """
    (batch, heads, points, dim), others = clouds.x.shape, clouds.y.shape[2]
    dtype = clouds.x.dtype
    x, y = _rows(clouds.x, dtype), _rows(clouds.y, dtype)
    x_keep, y_keep = _masks(y, x, None, clouds.x_keep, clouds.y_keep)
    each = len(weights) > 1 if weights is not None else parameter is not None and parameter.dim() == 4
    if parameter is not None:
        count = parameter.shape[-2]
        leading = () if weights is not None else (batch, heads) if each else (heads,)
        parameter = parameter.detach().to(dtype).expand(*leading, count, dim).contiguous()
    if weights is not None:
        weights = weights.detach().to(dtype).expand(heads if each else 1, count).contiguous()
    of_points = (2, dim + 1, dim) if family == "moments" else (points,)
    column = x.new_empty((batch, heads, *of_points))
    mass = x.new_empty((batch, heads, others)) if want_mass else None
    given = (x, y, parameter, weights, x_keep, y_keep, column, mass)
    lost = _engine().asapc_feature(FEATURE.pack(
        *(0 if tensor is None else tensor.data_ptr() for tensor in given), batch, heads, points, others,
        dim, count, each, *x.stride()[:3], *y.stride()[:3], FAMILIES.index(family),
        budget.half_steps if budget else 0, bool(budget and budget.starts_on_x), dtype is torch.float64,
        torch.get_num_threads(),
    ))  # fmt: skip
    if lost < 0:
        raise MemoryError(f"asapc: features of {points} and {others} points do not fit the memory")
    return column, mass, not lost


def brenier_potential(clouds: Clouds) -> Tensor:
    """As of features.gaussian, 0 at points without mass."""
    moments, *_ = feature("moments", clouds)
    beta, *_ = feature("gaussian", clouds, brenier_matrix(*moments[..., :-1, :].unbind(2)))
    return beta


def _rule(
    stabiliser: Stabiliser | None, queries: int, keys: int, least: float = 0.0, given: bool = False
) -> tuple[float, ...]:
    """Rule of engine.cpp.

    Where rows and columns of another number are all brought to 1, each half-step multiplies its scaling
    by N / M or M / N, and a hundred of them overflow. So a is multiplied, and b divided, by M / N on the
    way: their product stays what it is. Not where masses are given, of which both sides have as much.
    """
    if stabiliser is None:
        return 0, 0, 0, 0, 0.0, least, 1.0
    grows = stabiliser.form == "plan" and not (stabiliser.shares or given) and queries and keys
    return (
        1 + FORMS.index(stabiliser.form), stabiliser.kind == "add", stabiliser.start == "softmax",
        stabiliser.start == "plain", stabiliser.constant, least, keys / queries if grows else 1.0,
    )  # fmt: skip


def _masks(
    q: Tensor, k: Tensor, v: Tensor | None, keep: Tensor | None, query_keep: Tensor | None,
    to_columns: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """keep [B, M] and query_keep [B, N], whole.

    Raises RuntimeError where sizes differ, as torch's own operators do: the engine would read elsewhere.
    """
    (batch, heads, queries, dim), (*of_keys, keys, keys_dim) = q.shape, k.shape
    paired = q if to_columns else k
    unlike = v is not None and v.shape[:3] != paired.shape[:3]
    if of_keys != [batch, heads] or keys_dim != dim or unlike:
        given = ", ".join(str([*x.shape]) for x in (q, k, v) if x is not None)
        raise RuntimeError(f"asapc: queries, keys and values must be of the same batch, got {given}")
    if keep is not None:
        keep = keep.to(torch.bool).expand(batch, keys).contiguous()
    if query_keep is not None:
        query_keep = query_keep.to(torch.bool).expand(batch, queries).contiguous()
    return keep, query_keep


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In dtype, the numbers of a token side by side."""
    x = x if x.dtype is dtype else x.to(dtype)
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def path(q: Tensor, k: Tensor, widest: float) -> tuple[str, str]:
    """What ran on these and why, for people to read.  widest: as sinkhorn_loop has it."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    size = q.shape[2] * k.shape[2] * dtype.itemsize
    why, streamed = f"a head's scores take {size / 2**20:.2f} MiB", ""
    if size > RESIDENT_BYTES:
        why, streamed = f"{why}, more than the {RESIDENT_BYTES / 2**20:g} MiB that are kept", ", streamed"
    domain, span = "linear domain", f"rows of scores span at most {widest:.1f}"
    needed = precision(widest, dtype)
    if needed is not dtype:
        domain = "linear domain in float64" if needed else "log domain"
        span = f"a row of scores spans {widest:.0f}"
    return f"CPU, {described()}{streamed}, {domain}", f"{why}; {span}"
