"""What pyproject.toml cannot say: the C++ engine, once for each instruction set.

Without a compiler, or for another processor, asapc installs all the same and runs plain PyTorch.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-ffp-contract=fast"]
BUILDS: dict[str, list[str]] = {"engine": []}
if platform.machine() in ("x86_64", "AMD64"):  # what torch asks of a CPU by these names
    BUILDS["engine_avx2"] = ["-mavx2", "-mfma"]
    BUILDS["engine_avx512"] = ["-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma"]


class Engine(build_ext):
    """Says so where nothing was compiled: whoever installs it waits for speed that is not there."""

    def run(self) -> None:
        super().run()
        if not all(Path(self.get_ext_fullpath(build.name)).is_file() for build in self.extensions):
            print(
                "asapc: built WITHOUT its C++ engine, for the compiler failed: plain PyTorch runs, "
                "several times slower. Install a C++17 compiler and build again.", file=sys.stderr,
            )  # fmt: skip


setup(
    cmdclass={"build_ext": Engine},
    ext_modules=[
        Extension(
            f"asapc.kernels.native.{name}",
            ["asapc/kernels/native/engine.cpp"],
            depends=["asapc/kernels/native/vectors.h"],
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name, flags in BUILDS.items()
    ]
)
