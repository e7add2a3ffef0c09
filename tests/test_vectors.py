"""vectors.h, the engine's own exp, log and powers, of hostile numbers too: against extended precision."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
EXPORTS = """#include "{header}"
#define EXPORT(name, T, value) extern "C" void name(const T* x, int64_t size, double p, T* to) {{ \\
  for (int64_t i = 0; i < size; i += kLanes<T>) store(to + i, value); }}
EXPORT(exp_double, double, exponential<double>(load(x + i) + 0 * p))
EXPORT(exp_float, float, exponential<float>(load(x + i) + 0 * float(p)))
EXPORT(log_double, double, log_of<double>(load(x + i) + 0 * p))
EXPORT(log_float, float, log_of<float>(load(x + i) + 0 * float(p)))
EXPORT(power_double, double, power_of<double>(load(x + i), p))
EXPORT(power_float, float, power_of<float>(load(x + i), p))
"""
Numbers = NDArray[np.floating]
Compute = Callable[[str, Numbers, float], Numbers]


@pytest.fixture(scope="module", params=[(), ("-march=native",)], ids=["any", "native"])
def compute(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compute:
    """A function's values, by the flags with which the engine is built."""
    folder = tmp_path_factory.mktemp("vectors")
    header = Path(__file__).parents[1] / "asapc/kernels/native/vectors.h"
    (folder / "vectors.cpp").write_text(EXPORTS.format(header=header))
    flags = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
    command = (str(COMPILER), *flags, *request.param, "-o", folder / "vectors.so", folder / "vectors.cpp")
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "vectors.so"))

    def run(name: str, x: Numbers, p: float) -> Numbers:
        padded = np.concatenate([x, np.ones(-len(x) % 16, x.dtype)])
        found = np.full_like(padded, np.nan)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (padded, found)]
        kind = "double" if x.dtype == np.float64 else "float"
        getattr(library, f"{name}_{kind}")(
            pointers[0], ctypes.c_int64(len(padded)), ctypes.c_double(p), pointers[1]
        )
        return found[: len(x)]

    return run


def positive(dtype: type) -> Numbers:
    """Of every size, many of them next to 1; and 0, subnormal, the ends of the format, infinite, nan."""
    limits, random = np.finfo(dtype), np.random.default_rng(0)
    sizes = [random.uniform(limits.minexp, limits.maxexp - 1, 4000), random.uniform(-2, 2, 2000)]
    near = [1 + random.normal(size=2000) * 1e-3, 1 + np.arange(-200, 200) * limits.eps]
    ends = [0, -0.0, limits.smallest_subnormal, limits.tiny / 8, limits.tiny, limits.max, np.inf, np.nan]
    exact = [1, 0.5, 2, 0.5**0.5, 2**0.5]
    return np.concatenate([*map(np.exp2, sizes), *near, ends, exact]).astype(dtype)


def largest_error(found: Numbers, exact: Numbers) -> float:
    """Relative, of results that are normal; any other is what it must be."""
    limits = np.finfo(found.dtype)
    size = np.abs(exact)
    normal = (size >= limits.tiny * 2) & (size <= limits.max)
    with np.errstate(over="ignore"):
        others = exact[~normal].astype(found.dtype)
    least = limits.smallest_subnormal
    np.testing.assert_allclose(found[~normal], others, rtol=limits.eps * 2, atol=least)
    return float((np.abs(found[normal] - exact[normal]) / size[normal]).max())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("p", [0.0, 1.0, 0.5, 0.4926108368373428, 0.01, 1e-300, 1 - 1e-6, -0.5, 3.7])
def test_powers(compute: Compute, dtype: type, p: float) -> None:
    """As exact as exp is in float64; to half a place and the rest of float64 in float32."""
    x = positive(dtype)
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.longdouble), np.longdouble(p))
    error = largest_error(compute("power", x, p), exact)
    assert error <= (2.5e-16 if dtype is np.float64 else 5.97e-8)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_logarithms(compute: Compute, dtype: type) -> None:
    x = positive(dtype)
    with np.errstate(all="ignore"):
        exact = np.log(x.astype(np.longdouble))
    one = x == 1  # whose logarithm is 0
    assert bool((compute("log", x, 0.0)[one] == 0).all())
    error = largest_error(compute("log", x[~one], 0.0), exact[~one])
    assert error <= (2.5e-16 if dtype is np.float64 else 5.97e-8)


@pytest.mark.parametrize(
    ("dtype", "low", "error"), [(np.float64, -708.0, 3e-16), (np.float32, -87.0, 1.5e-7)]
)
def test_exponentials(compute: Compute, dtype: type, low: float, error: float) -> None:
    x = np.linspace(low, 80.0, 20001).astype(dtype)
    assert largest_error(compute("exp", x, 0.0), np.exp(x.astype(np.longdouble))) <= error
    beyond = np.array([-np.inf, -1e300 if dtype is np.float64 else -1e30, 2 * low, np.nan], dtype)
    np.testing.assert_array_equal(compute("exp", beyond, 0.0), np.array([0, 0, 0, np.nan], dtype))
