"""examples/ci: the action, the workflow and the hook, their shell lines run on a small artefact."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_text import write_data, write_teacher
from steps import calibrated, run

from asapc.report.gates import load_gates

EXAMPLES = Path(__file__).parents[1] / "examples" / "ci"


# Its drawings are half of what a report of these few examples takes.
WITHOUT_PAGE = "import sys; sys.modules['jinja2'] = None; from asapc.cli import main; sys.exit(main())"


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as examples/ci/README.md describes it, with asapc on its own PATH."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "ci").mkdir()
    shutil.copy(EXAMPLES / "gates.yaml", folder / "ci" / "gates.yaml")
    model = write_teacher(folder / "model", n_layers=1, max_iter=2)
    data = write_data(folder / "ci" / "data.npz", 900)
    calibrated(folder, model, data, {"operator": "sinkhorn", "batch_size": 64, "max_examples": 64})
    (folder / "bin").mkdir()
    python = shlex.quote(sys.executable)
    for name, command in (("asapc", f"{python} -c {shlex.quote(WITHOUT_PAGE)}"), ("python3", python)):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    assert here(folder, steps_of_workflow()["Compile"]["run"]) == 0
    given = ("--data", folder / "ci" / "data.npz", "--quiet", "--fast")
    assert run("report", folder / "compiled", *given) == 0
    baseline = json.loads((folder / "compiled" / "report.json").read_text())
    for own in (baseline["model"], *(site["metrics"] for site in baseline["sites"])):
        own.update({key: own[key] / 4 for key in own if key.startswith("speedup")})  # no timed test
    (folder / "ci" / "baseline.json").write_text(json.dumps(baseline))
    return folder


def steps_of_workflow() -> dict[str, Any]:
    steps = read("workflow.yml")["jobs"]["gate"]["steps"]
    return {step["name"]: step for step in steps if "name" in step}


def here(project: Path, line: str) -> int:
    """A line that is one call of asapc, in this process: a shell would add nothing to it."""
    program, *arguments = shlex.split(line)
    assert program == "asapc" and not set("|&;<>$`\n") & set(line.strip())
    with contextlib.chdir(project):
        return run(*arguments)


def bash(
    project: Path, programs: str, script: str, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """As GitHub runs `shell: bash`."""
    path = project / "script.sh"
    path.write_text(script)
    places = f"{project / programs}:{project / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(path)],
        cwd=project, capture_output=True, text=True,
        env={**os.environ, "PATH": places, **environment},
    )  # fmt: skip


def act(project: Path, programs: str = "bin", **inputs: str) -> tuple[int, str, str, str]:
    """Run the action with the asapc of a folder: exit code, verdict, summary page, messages."""
    action = read("action.yml")
    defaults = {name: own.get("default") for name, own in action["inputs"].items()}
    required = {name for name, own in action["inputs"].items() if own.get("required")}
    given = {name.replace("_", "-"): value for name, value in inputs.items()}
    assert required <= set(given) <= set(defaults)
    (step,) = action["runs"]["steps"]
    assert (action["runs"]["using"], step["shell"]) == ("composite", "bash")
    assert "${{" not in step["run"]
    environment = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: str({**defaults, **given}[m[1]]), text)
        for name, text in step["env"].items()
    }
    assert not any("${{" in text for text in environment.values())
    output, summary = project / "output", project / "summary"
    output.write_text("")
    summary.write_text("")
    environment.update(GITHUB_OUTPUT=str(output), GITHUB_STEP_SUMMARY=str(summary))
    done = bash(project, programs, step["run"], environment)
    verdict = dict(line.split("=", 1) for line in output.read_text().splitlines())["verdict"]
    return done.returncode, verdict, summary.read_text(), done.stderr


def test_the_gates_load_and_the_workflow_fits_the_action() -> None:
    assert load_gates(EXAMPLES / "gates.yaml")
    workflow, action = read("workflow.yml"), read("action.yml")
    assert workflow["permissions"] == {"contents": "read"}
    given = steps_of_workflow()["Gate"]["with"]
    assert {n for n, own in action["inputs"].items() if own.get("required")} <= set(given)
    assert set(given) <= set(action["inputs"])
    assert action["outputs"]["verdict"]["value"] == "${{ steps.report.outputs.verdict }}"
    assert [step["id"] for step in action["runs"]["steps"]] == ["report"]
    for name in ("workflow.yml", "action.yml", "pre-commit-config.yaml"):
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        assert "secrets." not in text and "GITHUB_TOKEN" not in text and "curl" not in text


def test_the_action_accepts_what_keeps_its_limits_and_its_baseline(project: Path) -> None:
    given = steps_of_workflow()["Gate"]["with"]
    code, verdict, summary, errors = act(project, **{k.replace("-", "_"): v for k, v in given.items()})
    assert (code, verdict) == (0, "ACCEPT"), errors
    assert summary.startswith("# asapc: ACCEPT, ") and "| baseline | ci/baseline.json |" in summary
    kept = steps_of_workflow()["Keep the report"]["with"]["path"].split()
    assert kept and all((project / path).is_file() for path in kept)


def test_the_action_tells_what_cannot_be_trusted_from_what_is_worse(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the command fails, the action fails with the verdict of the report that it wrote."""
    line = "asapc report compiled --gate ci/gates.yaml --examples 20 --data ci/data.npz --quiet --fast"
    assert here(project, line) == 1
    errors = capsys.readouterr().err
    assert "the report has 20 examples, too few (min 100)" in errors
    assert "asapc: gate failed: ANOMALOUS" in errors
    (project / "failing").mkdir()
    script = project / "failing" / "asapc"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    code, verdict, summary, _ = act(project, "failing", artifact="compiled", gate="ci/gates.yaml")
    assert (code, verdict) == (1, "ANOMALOUS") and summary.startswith("# asapc: ANOMALOUS")


def test_the_action_does_not_show_an_old_report_when_nothing_was_measured(project: Path) -> None:
    assert (project / "compiled" / "report.md").is_file()
    hostile = '"; touch pwned; $(touch pwned)'
    code, verdict, summary, errors = act(project, artifact="compiled", gate=hostile)
    assert (code, verdict, summary) == (2, "ERROR", "")
    assert "no such file" in errors
    assert not (project / "pwned").exists()


def test_the_hook_fails_on_a_limit_that_is_not_kept(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is kept, the same command passes: as the action does."""
    (hook,) = read("pre-commit-config.yaml")["repos"][0]["hooks"]
    assert hook["language"] == "system" and hook["pass_filenames"] is False
    for path in ("compiled/manifest.json", "ci/gates.yaml"):
        assert re.search(hook["files"], path)
    assert not re.search(hook["files"], "compiled/report.json")  # the hook's own output
    gates = project / "ci" / "gates.yaml"
    kept = gates.read_text()
    try:
        gates.write_text("attention_rel_l2: {max: 0}\n")
        assert here(project, hook["entry"]) == 1
    finally:
        gates.write_text(kept)
    assert "REGRESSION" in capsys.readouterr().err


def test_every_shell_line_but_the_installation_is_run_here() -> None:
    assert [name for name, step in steps_of_workflow().items() if "run" in step] == ["Install", "Compile"]
    assert len(read("action.yml")["runs"]["steps"]) == 1
