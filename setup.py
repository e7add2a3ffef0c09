"""What pyproject.toml cannot say: the C++ engine, once for each instruction set.

Without a compiler, or for another processor, asapc installs all the same and runs plain PyTorch.
"""

import platform

from setuptools import Extension, setup

BUILDS: dict[str, list[str]] = {"engine": []}
if platform.machine() in ("x86_64", "AMD64"):  # what torch asks of a CPU by these names
    BUILDS["engine_avx2"] = ["-mavx2", "-mfma"]
    BUILDS["engine_avx512"] = ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma"]

setup(
    ext_modules=[
        Extension(
            f"asapc.kernels.native.{name}",
            ["asapc/kernels/native/engine.cpp"],
            extra_compile_args=["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", *flags],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name, flags in BUILDS.items()
    ]
)
