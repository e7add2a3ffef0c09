"""The command line around a stand-in for the pipeline: arguments, streams, exit codes."""

from __future__ import annotations

import errno
import io
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer

import asapc.pipeline
from asapc import cli
from asapc.calibration.stored import FitQuality, SiteCalibration
from asapc.errors import InputError, NoSiteError, VerificationError
from asapc.features import Feature
from asapc.features.clouds import Budget
from asapc.features.predictor import Amortised, DualPredictor, TransformPlan
from asapc.ir import Convention
from asapc.report import Report

COMMANDS = ("inspect", "calibrate", "study", "compile", "run", "report", "bench", "demo")
ARGUMENTS = {
    "inspect": ["inspect", "teacher"],
    "calibrate": ["calibrate", "teacher", "--data", "d.npz", "-o", "calib"],
    "compile": ["compile", "teacher", "--calibration", "calib", "-o", "out"], "report": ["report", "out"],
    "bench": ["bench", "out"],
}
INSPECTION = {
    "model": "teacher", "capture": "whole",
    "sites": [
        {
            "name": "layers.0", "status": "matched", "reason": "", "heads": 2, "head_dim": 8,
            "replay_error": 1e-7,
            "convention": {"half_steps": 20, "first_side": "row", "last_side": "column"},
        },
        {"name": "layers.1", "status": "refused", "reason": "not Sinkhorn: rows only"},
    ],
}
REPORT = {
    "format_version": 3, "fingerprints": {"teacher": "t", "data": "d"},
    "model": {"examples": 512, "prediction_agreement": 0.98, "speedup": 3.5},
    "sites": [{"name": "layers.0", "operator": "asap", "metrics": {"attention_rel_l2": 0.04}}],
    "refused": [], "environment": {}, "gate": {"passed": True, "checks": []},
}
BENCH = {
    "model": {"source": "teacher", "batch": 32, "latency_teacher_ms": 7.0, "latency_compiled_ms": 2.0,
              "speedup": 3.5},
    "sites": [{"name": "layers.0", "operator": "asap", "speedup": 4.0}],
}  # fmt: skip
MANIFEST = {
    "format_version": 1, "capture": "whole",
    "sites": [{"name": "layers.0", "operator": "sinkhorn",
               "reason": "a: exceeds the budget: e; b: gains too little; c: gains too little"}],
}
TRAIL = {"sites": [{"name": "layers.0", "candidates": [
    {"label": "a", "verdict": "exceeds the budget: e"},
    {"label": "b", "verdict": "1.05 x as fast as the exact operator; at least 1.1 x is needed"},
    {"label": "c", "verdict": "slower than the teacher at 32x256"},
]}]}  # fmt: skip
PLAN = TransformPlan("target", 1, 20, rescaled=True)
SITE = SiteCalibration(
    Convention(20, "row", 0.5),
    Amortised(
        PLAN,
        (DualPredictor("target", (Feature("norm"),), (None,), torch.ones(2, 1), Budget(20, False)),),
    ),
    (FitQuality("ls", r2=(0.9, 0.7), condition_number=(10.0, None)),), examples=8, tokens=512,
    fit_seconds=0.1,
)


WARNING = {"sites": ["layers.0"], "of": "examples", "given": 8, "needed": 32, "text": "eight: too few"}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Stand-ins for the pipeline that record how they were called; runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for place in ("teacher/config.json", "out/manifest.json", "again/manifest.json",
                  "my out/manifest.json", "calib/x", "my calib/x", "d.npz", "m.py",
                  "gen.py", "w.pt"):  # fmt: skip
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    recorded: dict[str, Any] = {}

    def stand_in(name: str, result: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            recorded[name] = (args, kwargs)
            print(f"{name}: noise on stdout")
            return json.loads(json.dumps(result)) if isinstance(result, dict) else result

        return function

    pipeline = ModuleType("asapc.pipeline")
    pipeline.inspect = stand_in("inspect", INSPECTION)  # type: ignore[attr-defined]
    calibration = SimpleNamespace(sites={"layers.0": (SITE,)}, order="parallel", warnings=[WARNING])
    pipeline.calibrate = stand_in("calibrate", calibration)  # type: ignore[attr-defined]
    pipeline.compile = stand_in("compile", SimpleNamespace(manifest=MANIFEST, selection=TRAIL))  # type: ignore[attr-defined]
    measured = Report.from_json(REPORT, "REPORT")
    monkeypatch.setattr(asapc.pipeline.evaluate, "report", stand_in("report", measured))
    pipeline.report = asapc.pipeline.report  # type: ignore[attr-defined]
    pipeline.bench = stand_in("bench", BENCH)  # type: ignore[attr-defined]
    monkeypatch.setattr("asapc.inputs.load.load_teacher", stand_in("load_teacher", "TEACHER"))
    monkeypatch.setitem(sys.modules, "asapc.pipeline", pipeline)
    monkeypatch.setattr(asapc, "pipeline", pipeline, raising=False)
    return recorded


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(sys.modules["asapc.pipeline"], "inspect", function)


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"], ["inspect"], ["inspect", "m", "--bogus"], ["calibrate", "m", "-o", "x"],
        ["calibrate", "m", "--data", "x"], ["compile", "m", "-o", "x"],
        ["bench", "out", "--repeats", "0"], ["bench", "out", "--repeats", "many"], ["report"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2_in_two_lines(arguments, capsys):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("asapc: ")
    assert second.startswith("  help: asapc") and "--help" in second


def test_no_command_prints_help_on_stderr_and_exits_2(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Usage" in err
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("asapc ")


@pytest.mark.parametrize("command", ARGUMENTS)
def test_results_go_to_stdout_and_nothing_else(command, calls, capsys):
    """As JSON, in brief, whole, or not at all."""
    for option in ("--json", None, "--verbose", "--quiet"):
        assert cli.main([*ARGUMENTS[command], *([] if option is None else [option])]) == 0
        out, err = capsys.readouterr()
        assert "noise" not in out and f"{command}: noise on stdout" in err
        if option == "--json":
            assert isinstance(json.loads(out), dict)
        elif option == "--quiet":
            assert out == "" and all("noise on stdout" in line for line in err.splitlines())
        else:
            assert "layers.0" in out and (option or len(out.splitlines()) <= 25)


MISTYPED = [
    (["inspect", "gone"], "gone: no such model"), (["inspect", "gone.py:build"], "gone.py: no such file"),
    (["inspect", "m.py:build", "--weights", "gone.pt"], "gone.pt: no such weights file"),
    (["inspect", "teacher", "--data", "gone.npz"], "gone.npz: no such data file"),
    (["calibrate", "teacher", "--data", "gone.py:batches", "-o", "c"], "gone.py: no such file"),
    (["calibrate", "teacher", "--data", "d.npz", "-o", "c", "--recipe", "no.yaml"], "no.yaml: no such"),
    (["compile", "teacher", "--calibration", "gone", "-o", "o"], "gone: no such calibration folder"),
    (["compile", "out", "--calibration", "calib", "-o", "o"], "out is already compiled"),
    (["run", "gone", "--data", "d.npz", "-o", "o"], "gone: no such model"),
    (["run", "teacher", "--data", "d.npz", "-o", "o", "--gate", "gone.yaml"], "gates gone.yaml: no such"),
    (["report", "teacher"], "teacher: not a compiled artefact"),
    (["report", "out", "--baseline", "gone.json"], "gone.json: no such file"),
    (["bench", "gone"], "gone: no such folder"),
    (["export", "gone"], "gone: no such folder"),
    (["refresh", "out", "--data", "gone.npz", "--distil"], "gone.npz: no such data file"),
    (["study", "teacher", "--data", "d.npz", "--grid", "no.yaml", "-o", "s"], "grid no.yaml: no such"),
]


def test_switches_have_no_opposites_and_take_no_value() -> None:
    commands = typer.main.get_command(cli.app).commands.values()  # type: ignore[attr-defined]
    options = [own for command in commands for own in command.params]
    assert not [own.opts for own in options if not own.default and own.secondary_opts]
    switches = [own for own in options if getattr(own, "is_flag", False) and own.name != "help"]
    assert len(switches) > 4 * len(commands) and all(own.metavar == "" for own in switches)


def test_help_and_mistyped_paths_need_no_torch(calls, tmp_path):
    """All of them in one new process, which has not imported it."""
    code = "import json, sys; from asapc.cli import main\n"
    code += "codes = [main(arguments) for arguments in json.loads(sys.argv[1])]\n"
    code += "print(json.dumps(codes)); sys.exit('torch' in sys.modules)"
    arguments = json.dumps([["--help"], *(arguments for arguments, _ in MISTYPED)])
    found = subprocess.run(
        [sys.executable, "-c", code, arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert found.returncode == 0, found.stdout + found.stderr
    *shown, codes = found.stdout.splitlines()
    assert json.loads(codes) == [0] + [2] * len(MISTYPED)
    assert all(any(command in line for line in shown) for command in (*COMMANDS, "Exit codes"))
    said = [line for line in found.stderr.splitlines() if line.startswith("asapc: ")]
    for line, (arguments, expected) in zip(said, MISTYPED, strict=True):
        assert expected in line, (arguments, line)


def test_threads_sleep_while_they_wait_unless_models_are_timed_on_free_cores(tmp_path, monkeypatch):
    """Chosen before torch is imported, and never against what the user has set."""
    code = """if True:
        import json, os, sys, psutil
        from asapc.cli import main
        for percent, more, *arguments in json.loads(sys.argv[1]):
            psutil.cpu_percent = lambda interval, percent=percent: percent
            os.environ.update(more)
            main(arguments)
            print(os.environ.pop("OMP_WAIT_POLICY", None))
            for name in more:
                os.environ.pop(name, None)
    """
    calibrate = ["calibrate", "gone", "--data", "d.npz", "-o", "c"]
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    of_two = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    cases = [
        [0.0, {}, *calibrate], [90.0, {}, *calibrate], [90.0, {"OMP_WAIT_POLICY": "active"}, *calibrate],
        [10.0, {}, "report", "gone"], [60.0, {}, "report", "gone"],
        [90.0, of_two, "report", "gone"],
    ]  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", code, json.dumps(cases)], capture_output=True, text=True, cwd=tmp_path
    )
    waiting = ["passive", "passive", "active", "None", "passive", "passive"]
    assert found.stdout.split() == waiting, found.stderr
    said = [line for line in found.stderr.splitlines() if "of the cores busy" in line]
    assert said == ["other programs keep 60 % of the cores busy, so times will be rough"]


def test_inspect_prints_the_dictionary_as_it_is(calls, capsys):
    arguments = ["inspect", "m.py:build", "--weights", "w.pt", "--kwargs", "{}", "--data", "d.npz"]
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == INSPECTION
    assert calls["load_teacher"] == (
        ("m.py:build",), {"weights": "w.pt", "kwargs": "{}", "trust": False, "remote_code": False},
    )  # fmt: skip
    assert calls["inspect"][0][:2] == ("TEACHER", "d.npz")
    assert cli.main(ARGUMENTS["inspect"]) == 0
    assert "not Sinkhorn: rows only" in capsys.readouterr().out  # why a layer is refused


def test_compile_tells_by_how_much_a_candidate_was_too_slow(calls, capsys):
    assert cli.main([*ARGUMENTS["compile"], "--json"]) == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert site["reason"] == (
        "a: exceeds the budget: e; b: gains too little: 1.05 x as fast as the exact operator; at least "
        "1.1 x is needed; c: gains too little: slower than the teacher at 32x256"
    )


def test_calibrate_summarises_the_fit(calls, capsys):
    for options, expected in (([], (False, False, None)), (["--sequential"], (True, False, None))):
        capsys.readouterr()
        assert cli.main([*ARGUMENTS["calibrate"], "--json", *options]) == 0
        assert calls["calibrate"][0][-3:] == expected  # sequential, restart, max_memory
    summary = json.loads(capsys.readouterr().out)
    (site,) = summary["sites"]
    assert (summary["order"], summary["warnings"]) == ("parallel", [WARNING])
    told = ("name", "features", "r2", "condition_number", "examples", "tokens")
    assert [site[key] for key in told] == ["layers.0", ["norm"], 0.7, 10.0, 8, 512]  # of the worst head


HINTS = {
    "inspect": (
        ["inspect", "m.py:build", "--data", "d.npz", "--weights", "w.pt", "--kwargs", "{}"],
        ["calibrate", "m.py:build", "--data", "d.npz", "-o", "calibration", "--weights", "w.pt",
         "--kwargs", "{}"],
    ),
    "calibrate on code": (
        ["calibrate", "teacher", "--data", "gen.py:batches", "-o", "calib"],
        ["compile", "teacher", "--calibration", "calib", "-o", "calib.compiled", "--data",
         "gen.py:batches"],
    ),
    "compile, per module": (
        ["compile", "m.py:build", "--calibration", "calib", "-o", "out", "--weights", "w.pt",
         "--kwargs", '{"depth": 2}'],
        ["report", "out", "--model", "m.py:build", "--kwargs", '{"depth": 2}'],
    ),
    "refresh": (
        ["refresh", "out", "--data", "d.npz", "--distil", "-o", "again", "--model", "m.py:build",
         "--kwargs", "{}"],
        ["report", "again", "--data", "d.npz", "--model", "m.py:build", "--kwargs", "{}"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_the_next_command_has_all_it_needs_and_is_one(name, calls, monkeypatch, capsys):
    arguments, expected = HINTS[name]
    if "per module" in name:
        per_module = SimpleNamespace(manifest={**MANIFEST, "capture": "module"}, selection={})
        monkeypatch.setattr("asapc.pipeline.compile", lambda *_, **__: per_module)
    refreshed = {"mode": "distil", "best_epoch": 0, "before": {}, "after": {}}
    monkeypatch.setattr("asapc.pipeline.refresh", lambda *_, **__: refreshed, raising=False)
    assert cli.main([*arguments, "--json"]) == 0
    hints = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next: ")]
    assert [shlex.split(line.removeprefix("next: asapc ")) for line in hints] == [expected]
    assert cli.main(expected) == 0  # with the stand-ins: the command line takes it


def test_report_writes_its_files_and_the_gate_sets_the_exit_code(calls, capsys):
    Path("good.yaml").write_text("attention_rel_l2: {max: 0.05}")
    Path("bad.yaml").write_text("attention_rel_l2: {max: 0.01}\nspeedup: {min: 2}")
    assert cli.main(["report", "out", "--gate", "good.yaml"]) == 0
    assert "gate failed" not in capsys.readouterr().err
    assert json.loads(Path("out/report.json").read_text())["gate"]["verdict"] == "ACCEPT"
    assert cli.main(["report", "out", "--gate", "bad.yaml", "--json"]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result == json.loads(Path("out/report.json").read_text())
    assert [entry["passed"] for entry in result["gate"]["checks"]] == [False, True]
    assert not result["gate"]["passed"]
    assert "asapc: gate failed: REGRESSION\n  attention_rel_l2 of layers.0" in err
    assert Path("out/report.md").read_text().startswith("# asapc: REGRESSION, 3.50x as fast")
    Path("gates.yaml").write_text("prediction_agreement: {min: 0.999}\nspeedup: {min: 9}")
    assert cli.main(["report", "out", "--gate", "gates.yaml", "--junit", "new/elsewhere.xml"]) == 1
    assert "asapc: gate failed: ANOMALOUS\n  prediction_agreement" in capsys.readouterr().err
    text = Path("new/elsewhere.xml").read_text()
    assert text == Path("out/junit.xml").read_text()
    assert 'errors="1"' in text and 'failures="1"' in text


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ("prediction_agreement: {min: 0.99}", "warning: the limits need 100 examples, and the report"),
        ("examples: {min: 600}", "warning: the limits need 600 examples: pass --examples 600"),
        ("prediction_agreement: {min: 0.8}", ""), ("speedup: {min: 2}", ""),
        (None, "warning: to prove 99 % equal predictions takes 369 examples, and the report will have "
               "12, the gate split of d.npz: add about 2380"),
    ],
)  # fmt: skip
def test_too_few_examples_for_the_limits_are_told_before_the_work(
    tmp_path, monkeypatch, capsys, limits, told
):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(3, 2)\n")
    gate = [] if limits is None else ["--gate", "gates.yaml"]
    Path("gates.yaml").write_text(limits or "")
    np.savez("d.npz", input=np.random.default_rng(0).normal(size=(80, 3)).astype("f"))

    def stop(*_: object, **__: object) -> None:
        raise InputError("the work")

    monkeypatch.setattr("asapc.pipeline.calibrate", stop)
    assert cli.main(["run", "net.py:build", "--data", "d.npz", "-o", "out", *gate]) == 2
    before = capsys.readouterr().err.split("asapc: the work")[0]
    assert told in before and ("warning: " in before) == bool(told)


def test_a_lossless_model_that_is_as_fast_is_named_by_its_folder(calls, monkeypatch, capsys):
    times = {"latency_compiled_ms": 2.0, "latency_lossless_ms": 2.0, "speedup_lossless": 3.5}
    model = REPORT["model"] | times | {"prediction_agreement": 1.0}
    measured = Report.from_json({**REPORT, "model": model}, "REPORT")
    monkeypatch.setattr("asapc.report.evaluate.report", lambda *_, **__: measured)
    assert cli.main(["report", "my out"]) == 0
    out, err = capsys.readouterr()
    assert "Take the lossless model instead." in out
    assert """the lossless model: asapc.load('my out', stage="lossless")""" in err


def test_export_takes_a_number_of_threads(calls, monkeypatch, capsys):
    asked: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr(asapc.pipeline, "export", lambda *_, **__: {}, raising=False)
    assert cli.main(["export", "out", "--threads", "3", "--json"]) == 0
    assert asked == [3]


def test_a_baseline_is_held_against_the_report(calls, capsys):
    better = json.loads(json.dumps(REPORT))
    better["sites"][0]["metrics"]["attention_rel_l2"] = 0.02
    Path("better.json").write_text(json.dumps(better))
    assert cli.main(["report", "out"]) == 0
    assert json.loads(Path("out/report.json").read_text())["gate"]["verdict"] is None
    # the file that this very run replaces
    assert cli.main(["report", "out", "--baseline", "out/report.json", "--max-regression", "0"]) == 0
    gate = json.loads(Path("out/report.json").read_text())["gate"]
    assert (gate["verdict"], gate["baseline"]["verdict"]) == ("ACCEPT", "ACCEPT")
    assert gate["baseline"]["max_regression"] == 0
    capsys.readouterr()
    assert cli.main(["report", "out", "--baseline", "better.json"]) == 1
    assert "100 % worse than the baseline's 0.02 (2 % allowed)" in capsys.readouterr().err
    for allowed in (["100%"], ["1%", "attention_rel_l2=100%"]):
        options = [word for own in allowed for word in ("--max-regression", own)]
        assert cli.main(["report", "out", "--baseline", "better.json", *options]) == 0
    other = {**better, "fingerprints": {"teacher": "t", "data": "e"}}
    Path("better.json").write_text(json.dumps(other))
    capsys.readouterr()
    assert cli.main(["report", "out", "--baseline", "better.json"]) == 2
    assert "must be a report on the same data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "out", "--baseline", "missing.json"], "baseline missing.json: no such file"),
        (["report", "out", "--max-regression", "2%"], "--max-regression needs a --baseline"),
        (["report", "out", "--baseline", "missing.json", "--max-regression", "2"], "two percent as 2%"),
        (["report", "out", "--gate", "bad.yaml"], "unknown metric 'c_transform'"),
        ([*ARGUMENTS["calibrate"], "--recipe", "bad.yaml"], "line 1: unknown key 'c_transform'"),
    ],
)  # fmt: skip
def test_bad_files_are_found_before_a_model_is_loaded_or_measured(calls, capsys, arguments, message):
    Path("bad.yaml").write_text("c_transform: {max: 0.05}")
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not calls


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            InputError("nu must sum to 1", got=0.87, help="pass the key mask"), 2,
            "asapc: nu must sum to 1, got 0.87\n  help: pass the key mask\n",
        ),
        (NoSiteError("no site was compiled"), 3, "asapc: no site was compiled\n"),
        (VerificationError("layer 3 differs"), 4, "asapc: layer 3 differs\n"),
        (
            ZeroDivisionError("a\nb"), 70, "asapc: internal error: ZeroDivisionError: a b\n"
            "  help: run the same command with --debug for the traceback, and report it\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "out/x"), 2,
            "asapc: out/x: no space left on device\n"
            "  help: free some space, or write to another folder\n",
        ),
        (KeyboardInterrupt(), 130, "asapc: interrupted; earlier output is untouched\n"),
    ],
    ids=["input", "no-site", "verification", "internal", "disk", "ctrl-c"],
)
def test_a_failure_is_one_message_and_its_code(calls, monkeypatch, capsys, error, code, text):
    fail_with(monkeypatch, error)
    assert cli.main(["inspect", "teacher", "--quiet", "--json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(text) and "Traceback" not in err
    assert cli.main(["inspect", "teacher", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--json"], []])
def test_names_that_stdout_cannot_hold(options, calls, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    facts = {**INSPECTION, "sites": [{**INSPECTION["sites"][0], "name": "é\udcff"}]}
    monkeypatch.setattr("asapc.pipeline.inspect", lambda *_: facts)
    assert cli.main([*ARGUMENTS["inspect"], *options]) == 0
    sys.stdout.flush()
    if options:
        assert json.loads(raw.getvalue())["sites"][0]["name"] == "é\ufffd"


def test_an_argument_that_is_not_utf_8_is_refused(capsys):
    """Calibrations and artefacts record the names of model and data, as text."""
    assert cli.main(["inspect", "m\udcff.py:build"]) == 2
    assert "must be UTF-8, got 'm\\udcff.py:build'" in capsys.readouterr().err


def test_ctrl_c_is_one_line_in_a_real_process(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef build():\n    open('ready', 'w').close()\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "asapc", "inspect", "slow.py:build"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        # A shell's background jobs ignore SIGINT, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err == "asapc: interrupted; earlier output is untouched\n"


def test_what_the_demo_refuses(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("precious")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "the demo needs a new folder" in capsys.readouterr().err
    assert cli.main(["demo", "--example", "poems", "--out", str(tmp_path / "new")]) == 2
    assert "--example must be one of code, digits, got poems" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


TIMED = {
    "latency_teacher_ms": 80.0, "latency_lossless_ms": 40.0, "latency_compiled_ms": 20.0,
    "latency_teacher_torch_compile_ms": 50.0, "torch_compile_seconds": 20.0,
}  # fmt: skip
UNCOMPILED = {**TIMED, "latency_compiled_ms": 38.0, "latency_teacher_torch_compile_ms": None,
              "torch_compile_failed": "teacher: no compiler"}  # fmt: skip


@pytest.mark.parametrize(
    ("timed", "shipped", "why"),
    [
        (TIMED, "asap", "4.0x as fast as the teacher and 2.00x as fast as lossless; 10 of 512 pred"),
        (UNCOMPILED, "lossless", "2.0x as fast as the teacher with the same predictions; asap"),
    ],
    ids=["asap-is-faster", "hardly-and-no-compiler"],
)
def test_the_demo_compares_the_loops_and_shows_its_commands(
    calls: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    timed: dict[str, Any], shipped: str, why: str,
) -> None:  # fmt: skip
    document = {**REPORT, "model": {**REPORT["model"], **timed}}
    measured = Report.from_json(document, "REPORT")
    monkeypatch.setattr("asapc.report.evaluate.report", lambda *_, **__: measured)
    for name in ("lossless", "asap", "calib"):  # what the commands would have made
        Path("asapc-demo", name).mkdir(parents=True)
        Path("asapc-demo", name, "manifest.json").touch()
    demo = Path("asapc-demo")
    (demo / "teacher").mkdir()
    (demo / "teacher" / "config.json").write_text("{}")
    (demo / "digits.npz").write_text("")
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    assert cli.main(["demo", "--example", "digits", "--json", "--threads", "3"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    rows = {row["model"]: row for row in result["comparison"]}
    assert list(rows) == ["teacher", "torch.compile", "lossless", "asap"]
    assert rows["lossless"]["speedup"] == 2.0 and rows["lossless"]["compile_seconds"] >= 0
    assert ("no compiler" in rows["torch.compile"]["name"]) == (timed is UNCOMPILED)
    assert rows["torch.compile"]["speedup"] == (None if timed is UNCOMPILED else 1.6)
    for step in result["steps"]:
        assert f"$ {step['command']}" in err and step["command"].endswith("--threads 3")
    assert sum(step["command"].startswith("asapc compile") for step in result["steps"]) == 2
    assert result["ship"] == shipped and result["why"].startswith(why)
    assert cli.main(["demo", "--example", "digits"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"ship {demo / shipped}: {result['why']}"
