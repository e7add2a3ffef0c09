"""resident.cu on a CPU, where cuda_block.h runs a block's threads in turn, against float64."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_env import DEVICE
from torch import Tensor

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
    made: dict[block.Shape, ctypes.CDLL] = {}

    def built(shape: block.Shape) -> ctypes.CDLL:
        if shape not in made:
            folder = tmp_path_factory.mktemp("block")
            (folder / "resident.cu").write_text(shape.source)
            (folder / "block.cpp").write_text(
                shape.source.split("\n//")[0] + f'\n#define SOURCE "{folder}/resident.cu"\n'
                f"#define SHARED {shape.shared}\n"
                + (Path(__file__).parent / "cuda_block.h").read_text()
            )  # fmt: skip
            checks = ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")
            command = (str(COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *checks)
            subprocess.run([*command, "-o", folder / "block.so", folder / "block.cpp"], check=True)
            made[shape] = ctypes.CDLL(str(folder / "block.so"))
        return made[shape]

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
        built(shape).run(len(done), places, (ctypes.c_int * len(numbers))(*numbers))
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
        sizes = ((n, d), (m, d), (m, e))
        q, k, v = (torch.empty(1, 1, *size, dtype=dtype, device="meta") for size in sizes)
        return block.shape_of(q, k, v.to(of.get("values", dtype)), of.get("shared", SHARED))

    assert shape(256, 256) is not None and shape(256, 256, 128, 128, torch.bfloat16) is not None
    beyond: tuple[dict[str, Any], ...] = (
        {"n": 257}, {"m": 257}, {"d": 129}, {"e": 129}, {"n": 0}, {"m": 0}, {"dtype": torch.float64},
        {"values": torch.bfloat16}, {"n": 256, "m": 256, "shared": 64 << 10},
    )  # fmt: skip
    assert all(shape(**given) is None for given in beyond)


def test_the_blocks_loop_runs_where_it_holds_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(1, 1, 64, 64)
    fits = [resident.fits(q, q, q, Loop(1.0, steps, "row", [])) for steps in (4, 5)]
    monkeypatch.setattr(block, "shape_for", lambda q, k, v: block.shape_of(q, k, v, SHARED))
    fits += [resident.fits(q, q, q, Loop(1.0, steps, "row", [])) for steps in (4, 5)]
    assert fits == [False, False, False, True]


def test_values_take_the_place_of_keys_and_part_of_the_matrix_is_shared(
    emulated: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((1, 2, 20, 40, 16, 24))
    whole = block.shape_of(case.q, case.k, case.v, SHARED)
    assert whole is not None and not whole.late and whole.held == whole.tiles
    assert_loop(case, in_range(emulated, shared=whole.shared - 1), LOOPS["RCRCRC"])
    monkeypatch.setitem(block.OTHER_REGISTERS, 4, 247)
    monkeypatch.setattr(block, "_shape", block._shape.__wrapped__)
    part = block.shape_of(case.q, case.k, case.v, SHARED)
    assert part is not None and 0 < part.held < part.tiles
    assert_loop(case, in_range(emulated), LOOPS["CRCRC"])
    assert block.shape_of(case.q, case.k, case.v, 1 << 10) is None


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
    far = torch.zeros(2, 1, 18)
    far[1, 0, :9] = -600.0
    assert done(dual=far) == done(dual=far, side="column") == [1, 0]
