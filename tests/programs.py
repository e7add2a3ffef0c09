"""The adversary writes programs: whole modules as users write them, compiled and held against originals.

A program is drawn from INGREDIENTS by its seed and written as source text (program_texts.py). It is
compiled losslessly on mild data that shows no padding, and judged on inputs drawn to separate it from its
original: padding, sizes, scores, modes, state, parameters, gradients.
`python tests/programs.py --count 200 --seed 0` counts what became of them; `--one SEED` prints a program
and every case, `--spec` the one of these ingredients.
"""

from __future__ import annotations

import ast
import copy
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from program_texts import (
    DIVIDED,
    VOCABULARY,
    Spec,
    drawn,
    parameters_of,
    plain,
    settled,
    source_of,
    space_of,
    twists_of,
)
from torch import Tensor, nn

from asapc import pipeline
from asapc.api import teacher_of
from asapc.artifact import load, read_manifest
from asapc.calibration.stored import Calibration, save_calibration
from asapc.errors import AsapcError
from asapc.inputs.data import data_of
from asapc.inputs.recipe import Recipe
from asapc.program.compiled import OwnCodeWarning
from asapc.stages.analyse import forward_signature
from asapc.terminal.progress import SILENT

EXAMPLES, BATCH, LENGTH, KEYS = 24, 3, 7, 5
TOLERANCE = 1e-4  # of outputs, relative to the largest entry, beside the original's own rounding
STEEP = 10  # times as much for gradients
# --- inputs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call, or several, of the original and of the compiled model.

    keep:   which keys are active: all, some, one, none, mixed, but_one.
    soft:   value of an additive mask, where not that of the program.
    mode:   eval, grad, inputs (that require gradients), inference, train, autocast, load, step, event, or
            the dtype that the model is moved to.
    calls:  how often it is called.
    """

    name: str
    examples: int = BATCH
    length: int = LENGTH
    keys: int = KEYS
    spread: float = 1.0
    keep: str = "all"
    soft: float | None = None
    mode: str = "eval"
    calls: int = 1
    transposed: bool = False
    left_out: bool = False
    part: bool = False


def cases_of(spec: Spec) -> list[Case]:
    twists = {spec["twist"], spec["second"]}
    cases = [
        Case("mild"), Case("grad on", mode="grad"), Case("inputs require grad", mode="inputs"),
        Case("inference", mode="inference"), Case("five calls", calls=5),
        Case("one example", examples=1), Case("one example, long", examples=1, length=18, keys=18),
        Case("one token", length=1), Case("two examples, one key", examples=2, length=1, keys=1),
        Case("one, one", examples=1, length=1, keys=1), Case("one key", keys=1, length=4),
        Case("long", examples=2, length=28, keys=27), Case("tens", length=10, keys=10),
        Case("very long", examples=1, length=120, keys=120), Case("many", examples=20),
        Case("many, long", examples=9, length=30, keys=26),
        Case("faint", spread=1e-3), Case("loud", spread=6.0), Case("very loud", spread=40.0),
        Case("huge", spread=1e3), Case("strided", transposed=True), Case("part", part=True),
        Case("loaded", mode="load"), Case("stepped", mode="step"),
        Case("in float64", mode="float64"), Case("in bfloat16", mode="bfloat16"),
    ]  # fmt: skip
    if not spec["dropout"]:
        cases += [Case("training", mode="train")]
    if spec["mask"] != "none":
        cases += [
            Case("padded", keep="some"), Case("one active", keep="one"), Case("none active", keep="none"),
            Case("mixed", keep="mixed", examples=6), Case("all but one", keep="but_one"),
            Case("padded, one example", keep="some", examples=1), Case("none, alone", keep="none",
            examples=1), Case("padded, long", keep="some", examples=2, length=28, keys=28),
            Case("mixed, loud", keep="mixed", examples=6, spread=6.0),
            Case("padded, inputs require grad", keep="some", mode="inputs"),
        ]  # fmt: skip
    if spec["mask"] == "additive":
        cases += [Case(f"soft {value}", keep="some", soft=value) for value in (-2.0, -100.0, -1e4, -1e9)]
        cases += [Case("finfo.min", keep="mixed", examples=6, soft=torch.finfo(torch.float32).min)]
    if spec["mask"] == "optional":
        cases += [Case("left out", left_out=True)]
    if "autocast" in twists:
        cases += [Case("autocast", mode="autocast")]
    if "late_counter" in twists:
        cases += [Case("seventy calls", calls=70)]
    cases += [Case("event", mode="event")] if any(twist.event for twist in twists_of(spec)) else []
    return cases


def kept(case: Case, m: int, chance: torch.Generator) -> Tensor:
    """[B, M], True on active keys, which come first."""
    b = case.examples
    some = torch.randint(max(1, m // 3), max(2, m), (b,), generator=chance)
    active = {
        "all": torch.full((b,), m), "some": some, "one": torch.ones(b), "none": torch.zeros(b),
        "but_one": torch.full((b,), max(1, m - 1)),
        "mixed": torch.where(torch.arange(b) % 3 == 1, 0, torch.where(torch.arange(b) % 3 == 2, 1, some)),
    }[case.keep]  # fmt: skip
    return torch.arange(m)[None] < active[:, None]


def inputs_of(spec: Spec, case: Case, seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    n, m = case.length, case.keys if spec["cross"] else case.length
    x = case.spread * torch.randn(case.examples, n, 8, generator=chance)
    memory = torch.randn(case.examples, m, 8, generator=chance)
    keep = kept(case, m, chance)
    tokens = torch.randint(1, VOCABULARY, (case.examples, n), generator=chance)
    if case.transposed:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    if case.part:
        x = torch.cat([x[:1], x])[1:]
    value = {"-1e9": -1e9, "-1e4": -1e4, "torch.finfo(s.dtype).min": torch.finfo(x.dtype).min}.get(
        spec["value"], -1e9
    )
    value = value if case.soft is None else case.soft
    masks = {
        "padded_bm": ~keep, "active_bm": keep, "active_b1m": keep[:, None], "padded_b11m": ~keep[:, None,
            None],
        "float_keep": keep.float(), "int_keep": keep.long(), "optional": keep,
        "additive": torch.where(keep, 0.0, value)[:, None, None], "lengths": keep.sum(-1),
    }  # fmt: skip
    tokens = tokens.masked_fill(~keep, 0) if spec["mask"] == "tokens" or not spec["cross"] else tokens
    drawn_inputs = {"x": x, "memory": memory, "tokens": tokens}
    if spec["mask"] in masks:
        drawn_inputs["lengths" if spec["mask"] == "lengths" else "mask"] = masks[spec["mask"]]
    if case.left_out:
        del drawn_inputs["mask"]
    return {name: drawn_inputs[name] for name in parameters_of(spec) if name in drawn_inputs}


def examples_of(spec: Spec, seed: int) -> dict[str, Tensor]:
    """Calibration data: mild, and without padding unless the program's data shows it."""
    keep = "some" if spec["padding_shown"] else "all"
    return inputs_of(spec, Case("data", examples=EXAMPLES, keep=keep), seed)


# --- compiling -------------------------------------------------------------------------------------


@dataclass
class Subject:
    """A model with the globals of its code."""

    model: nn.Module
    space: dict[str, Any]
    own: frozenset[str]

    def copied(self) -> Subject:
        return Subject(copy.deepcopy(self.model), self.space, self.own)


def compiled_of(
    model: nn.Module, data: dict[str, Tensor]
) -> tuple[nn.Module, nn.Module | None, list[str]]:
    """(the patched copy, the model read from the artefact alone, the sites' operators)."""
    with tempfile.TemporaryDirectory(prefix="programs-") as place:
        folder, teacher = Path(place), teacher_of(model)
        recipe = Recipe.from_dict({"operator": "lossless", "batch_size": 8})
        source = data_of(data, forward_signature(teacher))
        calibration = Calibration(teacher.fingerprint, recipe.to_dict(), "whole", {}, "", "parallel", ())
        save_calibration(folder / "calibration", calibration)
        pipeline.compile(teacher, folder / "calibration", folder / "out", recipe, source, SILENT)
        manifest = read_manifest(folder / "out")
        patchable = manifest["capture"] == "module" or not manifest["live"]["left"]
        live = load(folder / "out", model=copy.deepcopy(model), trust=True) if patchable else None
        alone = None if manifest["capture"] == "module" else load(folder / "out", trust=True)
        sites = [str(site["operator"]) for site in manifest["sites"]]
        return live or alone, alone if live is not None else None, sites  # type: ignore[return-value]


# --- judging ---------------------------------------------------------------------------------------


@dataclass
class Results:
    """Tensors by name, or the exception that was raised."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    error: BaseException | None = None
    warned: bool = False

    @property
    def finite(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors.values())


def run(
    subject: Subject, spec: Spec, case: Case, seed: int, dtype: torch.dtype, fuzz: float = 0.0
) -> Results:
    """One case on a copy of the subject, from the same beginning every time."""
    results = Results()
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            results.tensors = _results(subject.copied(), spec, case, seed, dtype, fuzz)
        except Exception as error:
            results.error = error
        finally:
            _undo(spec, subject.space)
    results.warned = any(issubclass(warning.category, OwnCodeWarning) for warning in caught)
    return results


def _results(
    subject: Subject, spec: Spec, case: Case, seed: int, dtype: torch.dtype, fuzz: float
) -> dict[str, Tensor]:
    model = subject.model
    chance = torch.Generator().manual_seed(seed + 1)
    if case.mode == "load":
        _load_others(model, subject.own, chance)
    if case.mode == "event":
        _event(subject, spec)
    model.train(case.mode == "train")
    if case.mode in ("float64", "bfloat16") and dtype == torch.float32:
        model.to(dtype := getattr(torch, case.mode))
    found: dict[str, Tensor] = {}
    for call in range(case.calls):
        inputs = {
            name: t * (1 + fuzz * torch.randn(t.shape,
            generator=chance)).to(dtype) if t.is_floating_point() and fuzz
            else t.to(dtype) if t.is_floating_point() else t
            for name, t in inputs_of(spec, case, seed + call).items()
        }  # fmt: skip
        if dtype == torch.float64 and "mask" in inputs and spec["mask"] == "additive":
            inputs["mask"] = inputs["mask"].clamp(min=torch.finfo(torch.float32).min)
        found |= {f"{call}.{name}": t for name, t in _called_once(model, case, inputs, seed).items()}
    return found


def _called_once(model: nn.Module, case: Case, inputs: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    if case.mode == "inference":
        with torch.inference_mode():
            return _leaves(model(**inputs))
    if case.mode == "autocast":
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return _leaves(model(**inputs))
    if case.mode == "grad":
        return _leaves(model(**inputs))
    if case.mode in ("inputs", "train", "step"):
        return _with_gradients(model, case, inputs, seed)
    with torch.no_grad():
        return _leaves(model(**inputs))


def _leaves(output: Any) -> dict[str, Tensor]:
    leaves = enumerate(torch.utils._pytree.tree_leaves(output))
    return {str(i): torch.as_tensor(x).detach().clone() for i, x in leaves if x is not None}


def _with_gradients(
    model: nn.Module, case: Case, inputs: dict[str, Tensor], seed: int
) -> dict[str, Tensor]:
    """Outputs, and gradients of a random sum of them, of parameters and of inputs; then an SGD step."""
    if case.mode == "inputs":
        inputs = {n: t.clone().requires_grad_(n in ("x", "memory")) for n, t in inputs.items()}
    output = model(**inputs)
    found = {f"output {name}": t for name, t in _leaves(output).items()}
    total = torch.zeros(())
    for i, leaf in enumerate(torch.utils._pytree.tree_leaves(output)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            cotangent = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(seed + i))
            total = total + (leaf * cotangent).sum()
    if not total.requires_grad:
        return found
    model.zero_grad()
    total.backward()
    named = inputs.items() if case.mode == "inputs" else model.named_parameters()
    wanted = {name: t for name, t in named if t.requires_grad}
    found |= {
        f"gradient {n}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in wanted.items()
    }
    if case.mode == "step":
        norm = max([float(p.grad.abs().max()) for p in wanted.values() if p.grad is not None] or [1.0])
        with torch.no_grad():
            for p in wanted.values():
                p -= 0.3 * (p.grad if p.grad is not None else 0) / max(norm, 1e-9)
            found |= {f"after {n}": t for n, t in _leaves(model(**inputs)).items()}
    return found


def _load_others(model: nn.Module, own: frozenset[str], chance: torch.Generator) -> None:
    """Other values for all parameters and floating-point buffers of the original, by load_state_dict.

    own: their names; an artefact has numbers of the code beside them.
    """
    state = dict(model.state_dict())
    for name, tensor in state.items():
        if name in own and tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=chance.manual_seed(sum(map(ord, name))))
            state[name] = tensor * (0.8 + 0.4 * noise).to(tensor.dtype)
    model.load_state_dict(state)


def _undo(spec: Spec, space: dict[str, Any]) -> None:
    """What a call, or compiling, left in the globals."""
    for twist in twists_of(spec):
        exec(twist.undo, {"space": space, "torch": torch})


def _event(subject: Subject, spec: Spec) -> None:
    net, space = subject.model, subject.space
    layer = net.layers[0] if hasattr(net, "layers") else net
    with torch.no_grad():
        for twist in twists_of(spec):
            exec(twist.event, {"net": net, "layer": layer, "space": space, "torch": torch})


def difference(
    ours: Results, theirs: Results, exacts: list[Results], case: Case, steepness: float = STEEP
) -> tuple[float, str]:
    """(the largest error in units of its budget, where), by examples.

    exacts: the original in float64, or with its inputs' last digits changed, which tell its own rounding.
    """
    worst, where = 0.0, ""
    steepest = max([_largest(t) for n, t in theirs.tensors.items() if "gradient" in n] or [0.0])
    for name, true in theirs.tensors.items():
        found = ours.tensors.get(name)
        if found is None and "gradient" in name and not _largest(true):
            continue  # a parameter that the artefact leaves out
        if found is None or found.shape != true.shape:
            shape = None if found is None else [*found.shape]
            return float("inf"), f"{name}: {shape} for {[*true.shape]}"
        steep = "gradient" in name
        largest = max(_largest(true), 5e-3 * steepest if steep else 0.0, 1e-30)
        coarse = case.mode in ("autocast", "bfloat16")
        tolerance = 0.1 if coarse else TOLERANCE * (steepness if steep else 1)
        precise = [exact.tensors[name] for exact in exacts if name in exact.tensors]
        known = torch.stack([t.isfinite() for t in (true, *precise)]).all(0)

        def relative(other: Tensor) -> Tensor:
            error = (other.double() - true.double()).abs().where(known, 0.0)  # noqa: B023
            return _by_example(error.nan_to_num(torch.inf)) / largest  # noqa: B023

        rounding, error = torch.zeros(()), relative(found)
        for other in precise:
            rounding = torch.maximum(rounding, relative(other))
        if steep or (case.spread > 10 and case.keep == "all"):
            rounding = rounding.max()
        ratio = error / (tolerance + 4 * rounding)
        if ratio.numel() and float(ratio.max()) > worst:
            worst, where = float(ratio.max()), f"{name}: {float(error.max()):.2g}"
    return worst, where


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _by_example(errors: Tensor) -> Tensor:
    return errors.flatten(1).amax(1) if errors.dim() > 1 and errors.numel() else errors.reshape(-1)


@dataclass
class Verdict:
    """What became of a program.

    outcome: refused, kept, error, warned, equal, raw error or SILENT.  cases: that are not equal.
    """

    outcome: str
    text: str = ""
    cases: dict[str, str] = field(default_factory=dict)
    sites: list[str] = field(default_factory=list)
    seconds: float = 0.0


ORDER = ("equal", "warned", "error", "raw error", "SILENT")
SAFE = ("refused", "kept", "error", "warned", "equal")


def judge(spec: Spec, seed: int, only: Callable[[Case], bool] = lambda case: True) -> Verdict:
    """Compile the program and hold it against fresh originals, case by case."""
    started = time.process_time()
    source, data = source_of(spec, seed), examples_of(spec, seed)
    spaces = [space_of(source, f"<program {seed}.{i}>") for i in (0, 2)]
    precise = source
    usual = all(spec[name] == plain()[name] for name in ("first", "damping", "guard"))
    if spec["dtype"] == "double" and usual and spec["form"] in ("scaling", "plan"):
        precise = source_of({**spec, "form": "lse"}, seed)  # exp(s) underflows in float64, too
    # The same halves and lowest numbers, whatever precision surrounds them, and casts that round nothing.
    precise = precise.replace("s.half().float()", "s.float().half().double()")
    precise = precise.replace("s = s.float()", "s = s.double()")
    precise = precise.replace("torch.finfo(s.dtype).min", "torch.finfo(torch.float32).min")
    for guard in DIVIDED:  # scores that overflow are no numbers there, which others turn to 0
        precise = precise.replace(guard, DIVIDED[1])
    spaces.insert(1, space_of(precise, f"<program {seed}.1>"))
    models = [space["make"]() for space in spaces]
    own = frozenset(models[0].state_dict())
    original, plain64 = Subject(models[0], spaces[0], own), Subject(models[1].double(), spaces[1], own)
    try:
        with torch.no_grad():
            original.copied().model(**{n: t[:BATCH] for n, t in data.items()})
    except Exception as error:
        return Verdict("broken", f"{type(error).__name__}: {error}")
    rng = torch.get_rng_state()
    before = {n: t.clone() for n, t in models[2].state_dict().items()}
    try:
        with warnings.catch_warnings(action="ignore"):
            live, alone, sites = compiled_of(models[2], data)
    except AsapcError as error:
        return Verdict("refused", str(error).splitlines()[0], seconds=time.process_time() - started)
    except Exception as error:
        message = " ".join(str(error).split())[:160]
        text = f"{type(error).__name__}: {message} ({_place(error)})"
        return Verdict("raw error", text, {"compile": text}, seconds=time.process_time() - started)
    for space in spaces:
        _undo(spec, space)
    verdict = Verdict("equal", sites=sites)
    if any(not torch.equal(before[n], t) for n, t in models[2].state_dict().items()):
        verdict.cases["original"] = "SILENT: compiling changed the model's buffers"
    if not torch.equal(rng, torch.get_rng_state()):
        verdict.cases["generator"] = "SILENT: compiling moved the random generator"
    subjects = {"live": Subject(live, spaces[2], own), "original": Subject(models[2], spaces[2], own)}
    if alone is not None:
        subjects["artefact"] = Subject(alone, spaces[2], own)
    for case in cases_of(spec):
        if only(case):
            verdict.cases |= _case_verdicts(spec, case, seed, original, plain64, subjects)
    outcomes = [text.split(":")[0] for text in verdict.cases.values()]
    verdict.outcome = max(outcomes or ["equal"], key=ORDER.index)
    if verdict.outcome in ("equal", "warned") and all(site == "teacher" for site in sites):
        verdict.outcome = "kept"
    verdict.text = next(
        (f"{n}: {t}" for n, t in verdict.cases.items() if t.startswith(verdict.outcome)), ""
    )
    verdict.seconds = time.process_time() - started
    return verdict


def _case_verdicts(
    spec: Spec, case: Case, seed: int, original: Subject, plain64: Subject, subjects: dict[str, Subject]
) -> dict[str, str]:
    theirs = run(original, spec, case, seed, torch.float32)
    if theirs.error is not None:
        return {}
    if "ctx_keep" in (spec["twist"], spec["second"]) and not theirs.finite:
        return {}  # one example's NaN decides what the whole batch is multiplied by
    exact = run(plain64, spec, case, seed, torch.float64)
    exacts = [] if exact.error is not None else [exact]
    if spec["dtype"] == "half" or not exacts or case.spread > 1:  # what the last digits of the inputs do
        amounts = (1e-7, 1e-6, 3e-6) if spec["dtype"] == "half" or not exacts else (2e-7,)
        exacts += [run(original, spec, case, seed, torch.float32, amount) for amount in amounts]
    told = {}
    for name, subject in subjects.items():
        if (name == "original" and case.name != "mild") or (name == "artefact" and case.mode == "event"):
            continue
        if name == "artefact" and spec["dropout"] and case.mode == "train":
            continue
        found = run(subject, spec, case, seed, torch.float32)
        text = _verdict(found, theirs, exacts, case, spec["dtype"] == "half")
        if text:
            told[case.name if name == "live" else f"{name}: {case.name}"] = text
    return told


def _verdict(
    ours: Results, theirs: Results, exacts: list[Results], case: Case, half: bool = False
) -> str:
    """half: gradients pass through float16, which rounds small ones to multiples of 6e-8."""
    if ours.error is not None:
        said = " ".join(str(ours.error).split())
        text = f"{type(ours.error).__name__}: {said[:160]}"
        if isinstance(ours.error, AsapcError) or (case.mode == "load" and "state_dict" in said):
            return f"error: {text}"
        return f"raw error: {text} ({_place(ours.error)})"
    worst, where = difference(ours, theirs, exacts, case, 5 * STEEP if half else STEEP)
    if worst > 1:
        return f"SILENT: {where} ({worst:.0f} times the budget{', warned' if ours.warned else ''})"
    return "warned" if ours.warned else ""


def _place(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(where.filename).name}:{where.lineno}"


# --- running ---------------------------------------------------------------------------------------


def differing(spec: Spec) -> Spec:
    return {name: value for name, value in spec.items() if value != plain()[name]}


def show(spec: Spec, seed: int) -> None:
    verdict = judge(spec, seed)
    print(f"# seed {seed}: {differing(spec)}\n{source_of(spec, seed)}")
    print(f"{verdict.outcome}: {verdict.text}  sites {verdict.sites}  {verdict.seconds:.1f} s")
    for name, text in verdict.cases.items():
        print(f"  {name}: {text}")


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--one", type=int, help="print this program and all that became of it")
    parser.add_argument(
        "--spec", help="the program of these ingredients, such as \"twist='training', steps=2\""
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.spec is not None:
        call: Any = ast.parse(f"dict({arguments.spec})", mode="eval").body
        spec = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        show(settled(plain() | spec), arguments.one or 0)
        return
    if arguments.one is not None:
        show(drawn(arguments.one), arguments.one)
        return
    counts: Counter[str] = Counter()
    seconds = 0.0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        verdict = judge(drawn(seed), seed)
        counts[verdict.outcome] += 1
        seconds += verdict.seconds
        if verdict.outcome in ("SILENT", "raw error", "broken"):
            print(f"{seed} {verdict.outcome} {verdict.seconds:.1f} s  {verdict.text[:300]}", flush=True)
            failing = [n for n, t in verdict.cases.items() if t.startswith(verdict.outcome)]
            print(f"     in {failing}\n     {differing(drawn(seed))}", flush=True)
    print(f"{arguments.count} programs, {seconds / max(1, arguments.count):.1f} s each")
    for outcome, number in sorted(counts.items()):
        print(f"{number:5d}  {outcome}")
    sys.exit(1 if counts["SILENT"] or counts["raw error"] or counts["broken"] else 0)


if __name__ == "__main__":
    main()
