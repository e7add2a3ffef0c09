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


LOOP, RESIDENT = "loop bfloat16 N2048 D64 row", "resident bfloat16 N197 D64"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What became of both: the script's exit code tells of what the resident kernels may spill."""
    folder = tmp_path_factory.mktemp("sm90")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cases = (LOOP, f"{RESIDENT} masked", f"{RESIDENT} bias")
    command = [sys.executable, str(SCRIPT), "--only", *cases, "-o", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "CUOBJDUMP" in done.stderr:
        pytest.skip("Triton ships no cuobjdump here")
    assert done.returncode <= 1, done.stdout + done.stderr
    made: list[dict[str, Any]] = json.loads((folder / "sm90.json").read_text())["built"]
    return made


def test_loops_are_short_and_spill_nothing(built: list[dict[str, Any]]) -> None:
    """A half-step that is shifted by an older dual, and one with a maximum; the products with values."""
    loops = [own for own in built if LOOP in own["case"]]
    assert {own["kernel"] for own in loops} == {"_tiles"}
    assert not any(own["unset"] or own["spilled"] for own in loops)
    assert all(0 < own["an_entry"] <= 8.0 for own in loops)
    assert min(own["an_entry"] for own in loops) <= 6.5
    assert all(own["waits"] <= 0.25 for own in loops)  # products of a tile overlap


def test_the_resident_loop_reads_no_register_unset(built: list[dict[str, Any]]) -> None:
    resident = [own for own in built if RESIDENT in own["case"]]
    assert {own["kernel"] for own in resident} == {"_resident"}
    assert not any(own["unset"] for own in resident)
    assert all(own["shared"] < 160 << 10 and own["spilled"] < 1 << 9 for own in resident)
