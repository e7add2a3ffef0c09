"""What the GPU's loops compile to for sm_90, by the compiler that Triton ships."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent.parent / "benchmarks" / "sm90.py"


def built_of(only: str, folder: Path, spills: bool = False) -> list[dict[str, Any]]:
    """spills: whether some may, which the script's exit code tells."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--only", only, "-o", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "CUOBJDUMP" in done.stderr:
        pytest.skip("Triton ships no cuobjdump here")
    assert done.returncode <= spills, done.stdout + done.stderr
    built: list[dict[str, Any]] = json.loads((folder / "sm90.json").read_text())["built"]
    assert not [own for own in built if own["unset"]]
    return built


def test_loops_are_short_and_spill_nothing(tmp_path: Path) -> None:
    """A half-step that is shifted by an older dual, and one with a maximum; the products with values."""
    built = built_of("loop bfloat16 N2048 D64 row", tmp_path)
    most = {"_half_step": 8.0, "_attend": 8.0}
    assert {own["kernel"] for own in built} == set(most)
    assert all(0 < own["an_entry"] <= most[own["kernel"]] for own in built)
    assert min(own["an_entry"] for own in built if own["kernel"] == "_half_step") <= 6.5
    assert all(own["waits"] <= 0.25 for own in built)  # products of a tile overlap


def test_the_resident_loop_reads_no_register_unset(tmp_path: Path) -> None:
    """As it did with one warp group."""
    built = built_of("resident bfloat16 N197 D64", tmp_path, spills=True)
    assert {own["kernel"] for own in built} == {"_resident", "_by_products"}
    assert all(own["shared"] < 160 << 10 and own["spilled"] < 1 << 9 for own in built)
