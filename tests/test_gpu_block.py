"""resident.cu on a CPU, where cuda_block.h runs a block's threads in turn, against float64."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_env import DEVICE
from torch import Tensor
from torch.utils import cpp_extension

pytest.importorskip("triton")

from test_gpu_loops import LOOPS, Case, assert_loop, scored

from asapc.kernels.gpu import block, resident, tiles
from asapc.kernels.loop import Loop

COMPILER = shutil.which("g++")
SHARED = 227 << 10  # bytes that a block may take on an H100
pytestmark = pytest.mark.skipif(COMPILER is None or DEVICE != "cpu", reason="needs g++ and no GPU")
Runner = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """The kernel's output and which heads stayed in range; out of bounds it ends the process."""
    made: dict[tuple[str, int], ctypes.CDLL] = {}

    def built(shape: block.Shape, keys: int) -> ctypes.CDLL:
        source, shared = shape.source, shape.shared(keys)
        if (source, shared) not in made:
            folder = tmp_path_factory.mktemp("block")
            (folder / "resident.cu").write_text(source)
            (folder / "block.cpp").write_text(
                source.split("\n//")[0] + f'\n#define SOURCE "{folder}/resident.cu"\n'
                f"#define SHARED {shared}\n" + (Path(__file__).parent / "cuda_block.h").read_text()
            )  # fmt: skip
            checks = ("-fsanitize=bounds,alignment", "-fsanitize-undefined-trap-on-error")
            command = (str(COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *checks)
            subprocess.run([*command, "-o", folder / "block.so", folder / "block.cpp"], check=True)
            made[source, shared] = ctypes.CDLL(str(folder / "block.so"))
        return made[source, shared]

    def run(
        scores: tiles.Scores, v: Tensor, dual: Tensor | None, loop: Loop, shared: int = SHARED
    ) -> tuple[Tensor, Tensor]:
        q, k, keep, bias, _ = scores
        shape = block.shape_of(q, k, v, shared)
        assert shape is not None
        out = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=v.dtype)
        done = torch.full((q.shape[0] * q.shape[1],), -1, dtype=torch.int32)
        bias = tiles.spread_bias(None if bias is None else bias.float(), q, k)
        factor, factors = tiles.split_factor(loop.output_factor, q.shape[2], k.shape[2], keep)
        tensors, numbers = block.arguments(
            q, k, v, keep, bias, dual, factors, out, done, loop, factor / max(1, q.shape[2])
        )
        places = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
        built(shape, k.shape[2]).run(len(done), places, (ctypes.c_int * len(numbers))(*numbers))
        return out, done

    return run


def in_range(emulated: Runner, shared: int = SHARED) -> Callable[..., Tensor]:
    def run(*given: Any) -> Tensor:
        out, done = emulated(*given, shared=shared)
        assert bool((done == 1).all())
        return out

    return run


@pytest.mark.parametrize(("case", "loops"), [
    ({"shape": (2, 2, 33, 70, 16, 16)}, ("RCRCR from g", "CRCRC", "RCRCRC")),
    ({"shape": (2, 2, 17, 19, 5, 48), "masked": True, "bias": (1, 2)}, ("RCRCR from g", "CRCR from f")),
    ({"dtype": torch.float16, "masked": True, "bias": ()}, ("CRCRC", "RCRCRC")),
    ({"dtype": torch.bfloat16, "strided": True, "masked": True}, ("CRCR from f", "RCRCRC")),
    ({"shape": (1, 1, 129, 20, 16, 8), "dtype": torch.bfloat16}, ("RCRCR from g", "CRCRC")),  # two strips
    ({"shape": (2, 2, 17, 20, 8, 7), "dtype": torch.bfloat16}, ("RCRCRC",)),
    ({"shape": (1, 1, 1, 1, 8, 8)}, ("CRCRC",)),
    ({"shape": (2, 1, 1, 20, 16, 16), "masked": True}, ("RCRCR from g", "CRCRC")),
    ({"shape": (2, 1, 20, 1, 16, 16), "masked": True}, ("RCRCRC",)),
], ids=str)  # fmt: skip
def test_it_is_the_loop(case: dict[str, Any], loops: tuple[str, ...], emulated: Runner) -> None:
    for name in loops:
        assert_loop(Case(**case), in_range(emulated), LOOPS[name])


def test_keys_that_a_bias_hides(emulated: Runner) -> None:
    """From all queries, or all from one, and a NaN of the bias where the mask hides a key."""
    case = Case((1, 2, 20, 24, 16, 16), bias=(1, 2), masked=True)
    assert case.bias is not None and case.keep is not None
    case.bias[..., 3] = -math.inf
    case.bias[:, 1, 5] = -math.inf
    assert_loop(case, in_range(emulated), LOOPS["RCRCRC"])
    given = [*case.given()]
    given[4] = torch.where(case.keep[:, None, None], case.bias, math.nan)
    out = in_range(emulated)(*scored(*given), None, Loop(0.4, 6, "column", case.factors()))
    assert bool(out.isfinite().all())


def test_what_a_block_holds() -> None:
    def shape(
        n: int = 64, m: int = 64, d: int = 64, e: int = 64, dtype: torch.dtype = torch.float32, **of: Any
    ) -> block.Shape | None:
        sizes = ((of.get("batch", 1), 8, *size) for size in ((n, d), (m, d), (m, e)))
        q, k, v = (torch.empty(size, dtype=dtype, device="meta") for size in sizes)
        v, shared = v.to(of.get("values", dtype)), of.get("shared", SHARED)
        return block.shape_of(q, k, v, shared, of.get("blocks", block.MOST_BLOCKS))

    def of(n: int, dtype: torch.dtype, **given: Any) -> tuple[int, int, int] | None:
        own = shape(n, n, dtype=dtype, **given)
        return own and (own.warps, own.cluster, own.blocks)

    halves, batch = torch.bfloat16, {"batch": 32}
    assert of(197, halves, **batch) == (13, 1, 2) and of(197, torch.float32, **batch) == (13, 1, 1)
    assert of(256, halves, **batch) == (16, 1, 1) and of(256, torch.float32, **batch) == (8, 2, 1)
    assert of(512, halves, **batch) == (11, 3, 1) and of(512, halves) == (4, 8, 2)
    assert of(144, halves)[:2] == (2, 5)  # where 8 blocks have two warps, too, and three of them no rows
    assert of(880, halves) == (7, 8, 1) and of(640, torch.float32, d=16, e=16) == (5, 8, 1)
    beyond: tuple[dict[str, Any], ...] = (
        {"n": 1024, "m": 1024, "dtype": halves}, {"m": 641}, {"d": 129}, {"e": 129},
        {"n": 0}, {"m": 0}, {"d": 0}, {"e": 0}, {"dtype": torch.float64},
        {"values": halves}, {"n": 256, "m": 256, "shared": 32 << 10},
    )  # fmt: skip
    assert all(shape(**given) is None for given in beyond)
    assert shape(256, 256, blocks=1) is None  # before sm_90


@pytest.mark.parametrize("error", [None, ImportError("no setuptools")], ids=str)
def test_it_compiles_without_a_toolkit_or_warns(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own function looks for a toolkit's headers before it compiles."""

    def compile_kernel(*_: str) -> Any:
        if error is not None:
            raise error
        assert cpp_extension.include_paths("cuda")
        return SimpleNamespace(set_shared_memory_config=lambda size: None)

    own = SimpleNamespace(shared_memory_per_block_optin=SHARED)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "device": nullcontext, "is_current_stream_capturing": bool, "_compile_kernel": compile_kernel,
        "get_device_capability": lambda _: (9, 0), "get_device_properties": lambda _: own,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(block, "compiled", block.compiled.__wrapped__)
    with nullcontext() if error is None else pytest.warns(UserWarning, match="kernels run: no setup"):
        assert block._compiles.__wrapped__(torch.device("cuda", 0)) is (error is None)
    assert cpp_extension.CUDA_HOME is None


def test_the_blocks_loop_runs_where_it_holds_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 1, 64, 64)
    fits = [resident.fits(q, q, q, Loop(1.0, steps, "row", [])) for steps in (4, 5)]
    monkeypatch.setattr(block, "shape_for", lambda q, k, v: block.shape_of(q, k, v, SHARED))
    fits += [resident.fits(q, q, q, Loop(1.0, steps, "row", [])) for steps in (4, 5)]
    assert fits == [False, False, False, True]


CLUSTERS: tuple[dict[str, Any], ...] = (
    {"shape": (2, 2, 33, 70, 16, 16), "masked": True},
    {"shape": (1, 1, 66, 270, 16, 24), "masked": True, "bias": (1, 1)},
    {"shape": (1, 2, 40, 90, 20, 16), "dtype": torch.float16},
    {"shape": (2, 1, 70, 140, 48, 40), "dtype": torch.bfloat16, "masked": True, "bias": ()},
)


@pytest.mark.parametrize("case", CLUSTERS, ids=str)
def test_a_head_is_shared_among_blocks(
    case: dict[str, Any], emulated: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "FEW_KEYS", 0)
    monkeypatch.setattr(block, "_shape", block._shape.__wrapped__)
    own = Case(**case)
    shape = block.shape_of(own.q, own.k, own.v, SHARED)
    assert shape is not None and shape.cluster > 2
    for name in ("RCRCR from g", "CRCRC", "RCRCRC"):
        assert_loop(own, in_range(emulated), LOOPS[name])


@pytest.mark.parametrize("where", ["auto join =", "auto close =", "in_range(exp2_of(LOG2_E * dual"])
def test_threads_that_do_not_wait_are_found(
    where: str, emulated: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation lets warps run in any order: without one of its barriers, the kernel is wrong."""
    case, source = Case((1, 1, 66, 100, 16, 16), dtype=torch.bfloat16), block.Shape.source.fget

    def without(shape: block.Shape) -> str:
        before, after = source(shape).split(where, 1)
        return before + where + after.replace("__syncthreads();", "", 1)

    assert_loop(case, in_range(emulated), LOOPS["RCRCR from g"])
    monkeypatch.setattr(block.Shape, "source", property(without))
    with pytest.raises(AssertionError):
        for _ in range(5):
            assert_loop(case, in_range(emulated), LOOPS["RCRCR from g"])


def test_heads_that_leave_the_range_are_told(emulated: Runner) -> None:
    """Those of one example, whose scores spread or whose start lies too far apart; or NaN."""
    case = Case((2, 1, 18, 18, 8, 8))
    loop = Loop(0.4, 5, "row", case.factors())

    def done(**changed: Any) -> list[int]:
        q, asked = changed.get("q", case.q), loop._replace(first_side=changed.get("side", "row"))
        inputs = scored(q, case.k, case.v, None, None)
        flags: list[int] = emulated(*inputs, changed.get("dual"), asked)[1].tolist()
        return flags

    assert done() == [1, 1]
    assert done(q=case.q * torch.tensor([1.0, 600.0])[:, None, None, None]) == [1, 0]
    made_by_a_gpu = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for nan in (torch.tensor(math.nan), made_by_a_gpu):
        assert done(q=torch.where(torch.arange(8) == 0, nan, case.q)) == [0, 0]
        v = torch.where(torch.arange(8) == 0, nan, case.v)
        out, _ = emulated(*scored(case.q, case.k, v, None, None), None, loop)
        assert bool(out[..., 0].isnan().all()) and bool(out[..., 1:].isfinite().all())
    for dtype, most in ((torch.float32, math.inf), (torch.bfloat16, 3e38)):  # 3e38 b is infinite
        q, k, v = (x.to(dtype) for x in (case.q, case.k, case.v))
        v[1, 0, :, 2] = most
        assert emulated(*scored(q, k, v, None, None), None, loop)[1].tolist() == [1, 0]
    far = torch.zeros(2, 1, 18)
    far[1, 0, :9] = -600.0
    assert done(dual=far) == done(dual=far, side="column") == [1, 0]


def test_a_kernel_that_gives_other_numbers_than_tritons_is_not_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, kernel = Case(), block.Kernel(None)

    def launch(shape: block.Shape, tensors: list[Tensor], *_: Any) -> None:
        tensors[-2].fill_(7.0)
        tensors[-1].fill_(1)

    given = (*scored(*case.given()), None, Loop(0.4, 5, "row", case.factors()))
    right = resident.resident_loop(*given)
    monkeypatch.setattr(block, "shape_for", lambda q, k, v: block.shape_of(q, k, v, SHARED))
    monkeypatch.setattr(block, "compiled", lambda *_: kernel)
    monkeypatch.setattr(block, "launch", launch)
    with pytest.warns(UserWarning, match="other numbers than Triton"):
        out = resident.resident_loop(*given)
    assert kernel.agrees is False and torch.equal(out, right)
    kernel.agrees = None
    monkeypatch.setattr(block, "launch", lambda shape, tensors, *_: tensors[-1].fill_(0))
    resident.resident_loop(*given)
    assert kernel.agrees is True
