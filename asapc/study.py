"""A study: a grid of ways to amortise one model, fitted and measured side by side.

A grid file lists blocks; a block maps recipe keys to values, and a list of values multiplies:

    blocks:
      - {features: [[sliced:32, norm], [coarse:32, gaussian]], c_transforms: [1, 3]}
      - {operator: lot, pivots: [8, 32]}  # distilled; esp_hard has slices, fitted_sinkhorn half_steps
      - {side: target, c_transforms: [1, 2], fit: [ls, kl], max_examples: 512}
      - {half_steps: [3, 5]}            # no fit: the teacher's own loop, cut short

Every block is one pass over the calibration split for all its rows that have as many examples (one each
for those that are distilled, which stop by the selection split), and one over the examples they are
measured on, which none of them has seen. Results
are written after each block, so that a stopped study keeps the blocks it has finished.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from asapc.calibration.stored import AnySiteCalibration, fit_facts
from asapc.calibration.stream import Collector, Pending, stream
from asapc.device import CPU, moved
from asapc.errors import InputError
from asapc.features.predictor import Amortised
from asapc.formats.atomic import check_replaceable, replace_folder
from asapc.formats.yaml_file import read_yaml_mapping
from asapc.inputs.data import Batch, DataSource, open_data, split_of
from asapc.inputs.recipe import CANDIDATE_TYPES, HYBRID_KEYS, TYPES, Recipe, combinations
from asapc.inputs.settings import Place, checked, parse
from asapc.inputs.teacher import Teacher
from asapc.ir import Convention, Distilled, OutputFactor, SiteTensors
from asapc.measure.differences import comparable
from asapc.measure.fidelity import AttentionFidelity, TensorFidelity
from asapc.measure.timing import interleaved_medians
from asapc.metrics import MAP_EXAMPLES, MEASURED_EXAMPLES, METRICS
from asapc.operators.sinkhorn import clean_values, loop_of, sinkhorn
from asapc.passes.analyse import Analysis, Site
from asapc.passes.candidates import DISTILLED
from asapc.passes.rewrite import shortened_programs
from asapc.passes.select import WholeModel
from asapc.processes import ALONE, Part, Processes
from asapc.program.apply import apply_lossless, apply_replacement, predict
from asapc.program.runner import Tap
from asapc.report.site_metrics import environment
from asapc.report.tables import study_tables
from asapc.report.text import json_text, markdown_table
from asapc.stages.analyse import analyse_teacher, forward_signature, require_sites
from asapc.stages.calibrate import calibration_batches, examples_of_fit, selection_batches, site_collector
from asapc.terminal.progress import Progress

MAX_ROWS = 4096  # of a block
LOOP = "sinkhorn"  # the operator of a row that is not fitted: the teacher's loop, cut to half_steps
GRID_TYPES = {
    key: TYPES[key] for key in (*CANDIDATE_TYPES, "max_examples") if key not in HYBRID_KEYS
} | {"operator": Literal.__getitem__(("asap", *DISTILLED))}
COLUMNS = (
    "features", "side", "c_transforms", "rescaled", "aim", "points", "fit", "coefficients", "ridge",
    "ridge_mode", "examples", *(metric.key for metric in METRICS if metric.study),
    "site_ms", "predict_ms", "fit_converged", "pareto",
)  # fmt: skip


Fits = Sequence[AnySiteCalibration]
Apply = Callable[[SiteTensors, Tensor | None], Tensor]


@dataclass(frozen=True)
class MeasuredOn:
    """What rows are measured on.  data: None for the part of the fits' data that calibration never sees.
    examples: at most.  batch_size: of the fits, too."""

    data: str | None = None
    examples: int = MEASURED_EXAMPLES
    batch_size: int = 32


def described(row: Recipe) -> dict[str, Any]:
    """What a row tries, by column."""
    if row.operator == LOOP:
        return {"features": f"Sinkhorn, {row.half_steps} half-steps"}
    if row.operator in DISTILLED:
        size = DISTILLED[row.operator]
        count = f"{getattr(row, size)} {size.replace('_', '-')}"
        return {"features": f"{row.operator}, {count}", "fit": "distilled"}
    keys = ("side", "points", "fit", "coefficients", "ridge", "ridge_mode")
    return {"features": " ".join(row.features), **{key: getattr(row, key) for key in keys}}


def load_grid(path: str | Path) -> list[list[Recipe]]:
    """The rows of every block of a grid file.  Raises InputError naming the block, the line, the key."""
    document, place = read_yaml_mapping(path, "grid"), Place(f"grid {path}")
    grid = parse(document, {"blocks": list[Any]}, place, {"blocks": _blocks})
    if not grid:
        raise InputError(f"{place}: needs `blocks`, a list with at least one entry")
    return grid["blocks"]


def _blocks(value: Any, place: Place) -> list[list[Recipe]]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{place} must be a list with at least one entry", got=repr(value))
    return [_rows(block, place.at("", label=f"block {i}")) for i, block in enumerate(value, 1)]


def _rows(block: Any, place: Place) -> list[Recipe]:
    if not isinstance(block, Mapping) or not block:
        raise InputError(f"{place} must be a mapping of recipe keys to values", got=repr(block))
    if "half_steps" in block and block.get("operator") not in ("fitted_sinkhorn", ["fitted_sinkhorn"]):
        where = place.at("half_steps", block)
        if len(block) > 1:
            raise InputError(f"{where} stands alone in its block", got=repr(dict(block)))
        counts = [
            checked(row["half_steps"], TYPES["half_steps"], where)
            for row in combinations(block, str(place))
        ]
        return [Recipe(operator=LOOP, half_steps=count) for count in counts]
    rows: list[Recipe] = []
    for combination in combinations(block, str(place)):
        if len(rows) == MAX_ROWS:
            raise InputError(f"{place}: at most {MAX_ROWS} combinations", got="more")
        row = {"operator": "asap", **combination}
        rows.append(Recipe.from_dict(row, where=place, source=block, types=GRID_TYPES))
        rows[-1].check_side(str(place))
    return rows


def study(
    teacher: Teacher,
    data: str,
    grid: Sequence[Sequence[Recipe]],
    out: str | Path,
    progress: Progress,
    *,
    measured: MeasuredOn = MeasuredOn(),
    processes: Processes = ALONE,
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Fit and measure every row; writes study.json, study.csv and study.md into `out`.

    processes: share the batches of the fits, and the rows; the first one writes.  device: to fit and
    measure on.
    """
    check_replaceable(out, [path for path in (teacher.source, data, measured.data) if path is not None])
    signature = forward_signature(teacher)
    source = open_data(data, signature)
    analysis, _ = analyse_teacher(teacher, source, progress, drop_maps=True, device=device)
    _check_loops(analysis)
    require_sites(analysis, progress)
    _check_cut_short(grid, analysis)
    with analysis.running_on(device):
        test = None if measured.data is None else open_data(measured.data, signature).on(device)
        bench = _Bench(analysis, source.on(device), test, measured, grid, progress, processes)
        rows: list[dict[str, Any]] = []
        result: dict[str, Any] = {}
        for number, block in enumerate(grid, 1):
            rows += bench.block(block, f"block {number}/{len(grid)}")
            result = {"model": teacher.source, **bench.facts(), "rows": mark_pareto(rows)}
            if processes.first:
                with replace_folder(out) as folder:
                    _write(folder, result)
    return result


def _check_loops(analysis: Analysis) -> None:
    for site in analysis.sites:
        got = ""
        if not isinstance(site.convention, Convention):
            got = f"which is {site.convention.operator}"
        elif site.convention.stabiliser is not None:
            got = f"whose divisions keep a constant ({site.convention.stabiliser})"
        if got:
            raise InputError(
                "study: every site must be a plain Sinkhorn loop, whose dual can be predicted",
                got=f"{site.name}, {got}",
                help="`asapc compile` and `asapc report` measure other layers",
            )


def _check_cut_short(grid: Sequence[Sequence[Recipe]], analysis: Analysis) -> None:
    fewest = min(site.loop.half_steps for site in analysis.sites)
    for row in itertools.chain(*grid):
        if row.operator == LOOP and row.half_steps > fewest:
            raise InputError(
                f"study: half_steps cuts the teacher's loop of {fewest} half-steps short",
                got=row.half_steps,
            )


@dataclass(eq=False)
class _Bench:
    """What the blocks share: the model, its data, and the teacher's side of every comparison.

    model: the whole one, on the batches that are measured on.  seen: by the sites, on the first of them.
    """

    analysis: Analysis
    source: DataSource
    test: DataSource | None
    measured: MeasuredOn
    grid: Sequence[Sequence[Recipe]]
    progress: Progress
    processes: Processes

    def __post_init__(self) -> None:
        self.tap = Tap(self.analysis.model, self.analysis.lifted, self.analysis.names)
        batches, outputs, self.seen = self._tested()
        self.examples = sum(map(len, batches))
        self.model = WholeModel(self.analysis, batches, Recipe(budget={}), outputs)
        accuracy = self.model.measure({}).get("accuracy_teacher")
        self.baseline = {"accuracy_teacher": accuracy, **self._site_times()}

    def facts(self) -> dict[str, Any]:
        """What all rows have in common."""
        return {
            "sites": [site.name for site in self.analysis.sites],
            "examples": self.examples,
            "map_examples": min(MAP_EXAMPLES, self.examples),
            "batch": self.measured.batch_size,
            "output_values": "own" if all(t.v is not None for t in self.seen[0]) else "keys",
            "baseline": self.baseline,
            "environment": environment(self.source.device),
        }

    def _tested(self) -> tuple[list[Batch], list[Any], list[list[SiteTensors]]]:
        """Batches, the lossless outputs, and what the sites see on the first MAP_EXAMPLES examples."""
        source = self.source if self.test is None else self.test
        fitted = set() if self.test is None else self._fitted_on()

        def select(content: int) -> bool:
            return split_of(content) == "gate" if self.test is None else content not in fitted

        batches, outputs, activations = list[Batch](), list[Any](), list[list[SiteTensors]]()
        size, limit = self.measured.batch_size, self.measured.examples
        count = source.count(size, select=select, limit=limit)
        to_measure = source.batches(size, select=select, limit=limit)
        for batch in self.progress.track(to_measure, "teacher", count):
            output, tensors = self.tap(batch)
            if sum(map(len, batches)) < MAP_EXAMPLES:
                activations.append(tensors)
            batches.append(batch)
            outputs.append(comparable(output))
        if not batches:
            raise InputError(f"{source.source}: the study needs examples to measure on", got="none")
        return batches, outputs, activations

    def _fitted_on(self) -> set[int]:
        """Hashes of the examples that any row is fitted on, or stopped by."""
        recipes = [row for row in itertools.chain(*self.grid) if row.operator != LOOP]
        most = max((recipe.max_examples for recipe in recipes), default=0)
        held = max((r.selection_examples for r in recipes if r.operator in DISTILLED), default=0)
        batches = itertools.chain(
            calibration_batches(self.source, self.measured.batch_size, most) if most else (),
            selection_batches(self.source, self.measured.batch_size, held) if held else (),
        )
        return {content for batch in batches for content in batch.hashes}

    def _site_times(self) -> dict[str, float]:
        """Milliseconds a site and batch, mean over sites: the usual loop, lossless, softmax."""
        times = []
        for site, t in zip(self.analysis.sites, self.seen[0], strict=True):
            usual = partial(sinkhorn, t.q, t.k, t.k, t.keep, t.bias, **loop_of(site.loop)[1])
            times.append(_medians({
                "usual_loop_ms": usual,
                "lossless_ms": partial(apply_lossless, site.loop, t, t.k),
                "softmax_ms": partial(_softmax, site.loop, t),
            }))  # fmt: skip
        return _mean(times)

    def block(self, rows: Sequence[Recipe], label: str) -> list[dict[str, Any]]:
        """Fit the rows that share their examples in one pass, distil the others one by one, since each
        keeps its activations, and measure them all."""
        together: dict[tuple[int, int], list[int]] = {}
        for place, row in enumerate(rows):  # of which every process has the same order
            if row.operator != LOOP:
                alone = place + 1 if row.operator in DISTILLED else 0
                together.setdefault((alone, row.max_examples), []).append(place)
        fitted: dict[int, Fits] = {}
        for _, alike in sorted(together.items()):
            fitted |= self._fit_pass({place: rows[place] for place in alike}, label)

        def measure(place: int) -> Part:
            start = {**dict.fromkeys(COLUMNS), **described(rows[place])}
            return {}, {**start, **self._measure(rows[place], fitted.get(place, ()))}

        tracked = self.progress.track(range(len(rows)), f"{label}: measuring")
        return [row for _, (_, row) in self.processes.dealt(tracked, measure)]

    def _fit_pass(self, rows: Mapping[int, Recipe], label: str) -> dict[int, Fits]:
        """The fits of rows that are fitted on the same examples, one a site."""
        pending = {
            place: [Pending(at, site.name, place, _collector(site, row))
                    for at, site in enumerate(self.analysis.sites)]
            for place, row in rows.items()
        }  # fmt: skip
        every = list(itertools.chain(*pending.values()))
        shared = next(iter(rows.values()))
        fits, _ = stream(
            every,
            examples_of_fit(
                self.source, shared, self.measured.batch_size, every, processes=self.processes
            ),
            lambda batch: self.tap(batch)[1], None, self.progress, f"{label}: calibrating",
            self.processes,
        )  # fmt: skip
        if not fits:
            raise InputError(f"{self.source.source}: the calibration split needs examples", got="none")
        return {place: [fits[p.key] for p in of_row] for place, of_row in pending.items()}

    def _measure(self, row: Recipe, fits: Fits) -> dict[str, Any]:
        """Measure a row at every site, and the whole model.  fits: of the sites, if there are any."""
        analysis, per_site = self.analysis, []
        for index, site in enumerate(analysis.sites):
            t, units = self.seen[0][index], replace(site.loop, output_factor=OutputFactor(queries=1))
            if fits:
                there = moved(fits[index].replacement, self.source.device)
                calls: dict[str, Any] = {"site_ms": partial(apply_replacement, site.loop, there, t, t.k)}
                if isinstance(there, Amortised):
                    calls["predict_ms"] = lambda loop=site.loop, of=there.predictors, t=t: [
                        predict(loop, own, t) for own in of
                    ]
                maps = self._maps(units, index, partial(apply_replacement, units, _in_units(there)))
            else:
                short, short_units = (replace(x, half_steps=row.half_steps) for x in (site.loop, units))
                calls = {"site_ms": partial(apply_lossless, short, t, t.k)}
                maps = self._maps(units, index, partial(apply_lossless, short_units))
            per_site.append(maps | _medians(calls))
        if fits:
            chosen = zip(analysis.names, fits, strict=True)
            programs = analysis.rewritten({name: fit.replacement for name, fit in chosen})
        else:
            programs = shortened_programs(analysis.lifted, row.half_steps)
        metrics = self.model.of_programs(programs)
        known = [metric.key for metric in METRICS if metric.study and metric.scope == "model"]
        return {**_facts(fits), **_mean(per_site), **{key: metrics.get(key) for key in known}}

    def _maps(self, units: Convention, index: int, apply: Apply) -> dict[str, float]:
        """Errors of the attention, whose rows sum to about 1, and of A V with the layer's own values, or
        with the keys if the model returns its maps and multiplies them with nothing."""
        attention, output = AttentionFidelity(), TensorFidelity()
        for tensors in self.seen:
            t = tensors[index]
            with torch.no_grad():
                exact, approx = apply_lossless(units, t, None), apply(t, None)
                attention.update(exact, approx, t.keep)
                v = clean_values(t.k if t.v is None else t.v, t.keep)
                output.update(exact @ v, approx @ v)
        return {
            **attention.metrics(),
            **{key: output.metrics()[key] for key in ("output_rmse", "output_rel_l2")},
        }


def _collector(site: Site, recipe: Recipe) -> Collector:
    collector = site_collector(site.name, site.loop, recipe)
    if collector is None:
        raise InputError(
            f"study: {site.name}, a {site.loop.last_side}-ending loop of "
            f"{site.loop.half_steps} half-steps, has no {recipe.side} dual "
            f"{recipe.c_transforms} or fewer c-transforms before its end",
            help="leave this combination out of the grid",
        )
    return collector


def _facts(sites: Fits) -> dict[str, Any]:
    """Facts of a row's fits; the plan of a predicted dual is the first site's."""
    if not sites:
        return {}
    facts = [fit_facts(site) for site in sites]
    r2 = [fit["r2"] for fit in facts if fit["r2"] is not None]
    return {
        **{key: facts[0][key] for key in ("examples", "c_transforms", "rescaled", "aim")},
        "fit_seconds": sum(site.fit_seconds for site in sites),
        "r2": min(r2, default=None),
        "fit_converged": all(fit["fit_converged"] is not False for fit in facts) if r2 else None,
    }


def _in_units(replacement: Amortised | Distilled) -> Amortised | Distilled:
    """A distilled operator with rows that sum to about 1; an amortised one has the loop's own factor."""
    if isinstance(replacement, Amortised):
        return replacement
    factor = 1.0 if replacement.operator == "esp_hard" else [1.0, 1.0, 0.0, 0.0]
    return replace(replacement, settings={**replacement.settings, "output_factor": factor})


def _softmax(convention: Convention, t: SiteTensors) -> Tensor:
    mask = t.bias
    if t.keep is not None:
        allowed = torch.where(t.keep, 0.0, -torch.inf).to(t.q.dtype)[:, None, None, :]
        mask = allowed if mask is None else mask + allowed
    return torch.nn.functional.scaled_dot_product_attention(
        t.q, t.k, t.k, attn_mask=mask, scale=convention.score_multiplier
    )


def _medians(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of a call."""
    return {name: x["median_ms"] for name, x in interleaved_medians(calls, repeats=5).items()}


def _mean(sites: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over sites; of worst values the worst."""
    merged = {}
    for name in sites[0]:
        values = [site[name] for site in sites]
        merged[name] = max(values) if name.endswith("_worst") else sum(values) / len(values)
    return merged


def mark_pareto(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """rows with `pareto`: no other row is at least as close and as fast, and better at one."""
    points = [(row["attention_rel_l2"], row["site_ms"]) for row in rows]
    marked = []
    points = [(e if e == e else float("inf"), t) for e, t in points]  # a nan beats nothing
    for row, (error, time_ms) in zip(rows, points, strict=True):
        beaten = any(e <= error and t <= time_ms and (e, t) != (error, time_ms) for e, t in points)
        marked.append({**row, "pareto": not beaten})
    return marked


def _write(folder: Path, result: Mapping[str, Any]) -> None:
    (folder / "study.json").write_text(json_text(result) + "\n", encoding="utf-8")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(result["rows"])
    (folder / "study.csv").write_text(text.getvalue(), encoding="utf-8")
    note = (
        "Sorted by attention l2, the mean over examples, heads and layers; * is on the Pareto front "
        "of error and site time. Times are medians per site and batch, including prediction.\n"
    )
    blocks = [f"# Study of {result['model']}", *map(markdown_table, study_tables(result)), note]
    (folder / "study.md").write_text("\n\n".join(blocks), encoding="utf-8")
