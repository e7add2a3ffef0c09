"""docs/extending.md is true: an operator and its family are four source files, and everything has them.

The toy is put into a copy of the package, where nothing else is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TOY = Path(__file__).parent / "toy"
ENTRY = '        Operator("asap", '
NEW_ENTRY = '''        Operator(
            "softmax", "asapc.operators.softmax", SCORES,
            convention="asapc.operators.softmax:SoftmaxConvention", plain="it is a toy",
        ),
'''
MATCHERS = "(find_lot, find_banded, find_sinkhorn, find_esp, find_plan)"
IMPORT = "from asapc.passes.site import Find\n"
NEW_IMPORT = "from asapc.passes.softmax import find_softmax\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy, without the demo's data."""
    for name in ("asapc", "asapc.passes", "asapc.calibration"):
        spec = find_spec(name)
        assert spec is not None and spec.submodule_search_locations
        ignored = shutil.ignore_patterns("__pycache__", "demo_data")
        to = tmp_path.joinpath(*name.split("."))
        shutil.copytree(spec.submodule_search_locations[0], to, ignore=ignored, dirs_exist_ok=True)
    return tmp_path / "asapc"


def changed(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_an_operator_and_its_family_are_four_files(package: Path) -> None:
    shutil.copy(TOY / "operator.py", package / "operators/softmax.py")
    changed(package / "operators/catalogue.py", ENTRY, NEW_ENTRY + ENTRY)
    shutil.copy(TOY / "family.py", package / "passes/softmax.py")
    families = package / "passes/families.py"
    changed(families, IMPORT, IMPORT + NEW_IMPORT)
    changed(families, MATCHERS, MATCHERS.replace(")", ", find_softmax)"))
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TOY / "check.py")], capture_output=True, text=True,
        cwd=package.parent, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "softmax, score multiplier 0.500"
