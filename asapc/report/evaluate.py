"""Evaluate a compiled artefact: fidelity and speed against its teacher, on examples it has not seen.

Examples are split by a hash of their content, see asapc.inputs.data: calibration (70 %), selection (15 %)
and gate (15 %). On the data an artefact was calibrated or refreshed on, a report uses the gate split; on
other data, every example that calibration, selection and refreshes have not seen.

report() measures both for the report and its gates; bench() times the models and their sites.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from asapc.artifact import Artifact, read_artifact, surrounding_model
from asapc.device import CPU, moved
from asapc.errors import InputError
from asapc.formats import places
from asapc.formats.yaml_file import read_yaml_mapping
from asapc.inputs.data import Batch, DataSource, empty_split, open_data, recorded_data, split_of
from asapc.inputs.faults import check_labels
from asapc.inputs.onnx.settings import read_record, require_extra
from asapc.inputs.reading import ON_CPU, Reading
from asapc.inputs.recipe import Recipe
from asapc.ir import SiteTensors
from asapc.measure.bootstrap import LEVEL
from asapc.measure.differences import comparable
from asapc.measure.fidelity import OutputFidelity
from asapc.measure.own_metric import OwnMetric
from asapc.memory import MemoryLimit, give_back
from asapc.metrics import MAP_ENTRIES, MAP_EXAMPLES, MEASURED_EXAMPLES
from asapc.operators.catalogue import TEACHER
from asapc.passes.audit import SoftToHard, soft_sites
from asapc.processes import ALONE, Part, Processes
from asapc.program.runner import Runner, Tap
from asapc.report.document import REPORT_FORMAT, Report
from asapc.report.gates import Gate, check_patterns, examples_asked
from asapc.report.pictures import MapPair, SitePictures
from asapc.report.site_metrics import (
    SiteFidelity,
    environment,
    explain_site,
    time_model,
    time_site,
    twin_of,
)
from asapc.terminal.progress import Progress


@dataclass(frozen=True)
class Measuring:
    """examples: measured, at most.  fast: without certificates and pictures.  max_memory: bytes that the
    process may hold; batches get smaller until that holds.  torch_compile: time teacher and compiled
    model under torch.compile, too.  metric: the user's own."""

    examples: int = MEASURED_EXAMPLES
    fast: bool = False
    max_memory: int | None = None
    torch_compile: bool = False
    metric: OwnMetric | None = None


def report(
    artifact: str | Path | Artifact,
    data: str | DataSource | None = None,
    *,
    limits: Sequence[Gate] = (),
    model: str | nn.Module | None = None,
    reading: Reading = ON_CPU,
    measuring: Measuring = Measuring(),
    progress: Progress,
    processes: Processes = ALONE,
) -> Report:
    """Measure fidelity and speed on examples that calibration and selection have not seen: the outputs on
    all of them, the sites and the lossless model on about the first MAP_EXAMPLES, or fewer if their maps
    have more than MAP_ENTRIES entries.

    The report has a few attention maps of every site as pictures, and no gate yet.
    limits: to be checked later; a pattern that matches no site is an error before the work.
    model: around an artefact's modules, if it was captured by them.  reading: of the artefact and that
    model.  processes: share the models' batches, and the sites; the first one times.
    Raises InputError if the artefact has seen examples of the gate split, or none is left to measure on.
    """
    with _read(artifact, data, model, reading, "report", measuring.metric) as models:
        check_patterns(limits, models.artifact.site_names)
        if not isinstance(artifact, Artifact):  # `asapc run` has counted before it compiled it
            _tell_shortage(models, examples_asked(limits), measuring.examples, progress)
        return _measured(models, measuring, progress, processes)


def _tell_shortage(models: _Models, needed: int, most: int, progress: Progress) -> None:
    """Warn before the work if there are fewer examples than the limits need."""
    held = models.source.count(1, select=Unseen(models.artifact, models.source).select, limit=most)
    if held is not None and held < needed:
        how = f"pass --examples {needed}" if held == most else "pass more with --data"
        progress.note(f"warning: the limits need {needed} examples, the report will have {held}: {how}")


@contextlib.contextmanager
def _read(
    artifact: str | Path | Artifact, data: str | DataSource | None, model: str | nn.Module | None,
    reading: Reading, command: str, metric: OwnMetric | None = None,
) -> Iterator[_Models]:  # fmt: skip
    """The artefact, the model around it and the data, on the device for a while."""
    device = reading.place()
    if not isinstance(artifact, Artifact):
        artifact = read_artifact(artifact, trust=reading.trust)
    surrounding = surrounding_model(artifact, model, reading)
    data = data or recorded_data(artifact.manifest["data"], artifact.folder, command)
    source = open_data(data, artifact.signature()).on(device)
    with artifact.running_on(device, surrounding):
        yield _Models(artifact, surrounding, source, metric)


def _measured(models: _Models, measuring: Measuring, progress: Progress, processes: Processes) -> Report:
    artifact, source, size, fast = models.artifact, models.source, models.batch_size, measuring.fast
    limit = None if measuring.max_memory is None else MemoryLimit(measuring.max_memory)
    if limit is not None:
        size = processes.least(_within(limit, models, fast, size))
    sites = models.sites(fast)
    shared = dict(processes.share(sites.items()))
    fidelity = _Fidelity(models, shared, models.audit() if processes.first else None)
    unseen = Unseen(artifact, source)
    batches = source.batches(size, select=unseen.select, limit=measuring.examples)
    count = source.count(size, select=Unseen(artifact, source).select, limit=measuring.examples)
    batches = progress.track(batches, "measuring fidelity", count)
    for batch, (outputs, _) in processes.dealt(batches, models.outputs):
        fidelity.add(batch, outputs)
    if fidelity.first is None:
        raise unseen.nothing()
    with progress.phase("certificates and pictures" if not fast else "layers"):
        results, pictures = _of_all(shared, list(sites), processes)
    timed: dict[str, Any] = {}
    if processes.first:
        with progress.phase("measuring latency"):
            # They have just run.
            first, under = fidelity.first, measuring.torch_compile
            twin = twin_of(artifact)
            timed = time_model(models.runners, first, warmup=0, torch_compile=under, twin=twin)
    timed = processes.from_first(({}, timed))[1]
    if limit is not None:
        progress.note(limit.told(size))
    document = {
        **_provenance(artifact, source),
        "model": _of_model(models, fidelity, timed),
        "sites": results,
        "splits": {**unseen.splits(), "gate": fidelity.measured, "excluded": unseen.excluded},
    }
    if fidelity.audit is not None:
        document["soft_to_hard"] = fidelity.audit.result(fidelity.first)
    document = processes.from_first(({}, document))[1]
    checked = Report.from_json(document, str(artifact.folder))  # some of it is from the artefact's files
    return replace(checked, pictures=pictures)


def _provenance(artifact: Artifact, source: DataSource) -> dict[str, Any]:
    """What a report contains without measuring it."""
    manifest, onnx = artifact.manifest, read_record(artifact.folder)
    return {
        "format_version": REPORT_FORMAT,
        "fingerprints": {"teacher": manifest["teacher"]["fingerprint"], "data": source.fingerprint},
        "refused": manifest["refused"],
        "warnings": manifest.get("warnings", []),
        "selection": artifact.selection if "sites" in artifact.selection else None,
        **({"refresh": manifest["refresh"]} if "refresh" in manifest else {}),
        **({} if onnx is None else {"onnx": onnx}),
        "environment": environment(source.device),
    }


def _of_model(models: _Models, fidelity: _Fidelity, timed: Mapping[str, Any]) -> dict[str, Any]:
    artifact, manifest = models.artifact, models.artifact.manifest
    measured, mapped = fidelity.measured, fidelity.mapped
    saved = (timed["latency_teacher_ms"] - timed["latency_compiled_ms"]) / 1e3
    fitted = any(entry["fit"] is not None for entry in manifest["sites"])
    assert fidelity.first is not None
    return {
        "source": manifest["teacher"]["source"],
        "capture": artifact.capture,
        "data": models.source.source,
        **({"sizes": manifest["sizes"]} if manifest.get("sizes") else {}),
        "examples": measured,
        **({"map_examples": mapped} if mapped < measured else {}),
        "batch": len(fidelity.first),
        **({} if models.metric is None else {"own_metric": models.metric.name}),
        **fidelity.outputs.metrics(),
        "lossless_max_abs_error": fidelity.lossless.metrics()["max_abs_error"],
        **timed,
        "fit_seconds": artifact.fit_seconds,
        "calibration_order": manifest["calibration_order"],
        "break_even_batches": artifact.fit_seconds / saved if fitted and saved > 0 else None,
        "confidence": fidelity.outputs.confidence() | timed.get("confidence", {}),
        "confidence_level": LEVEL,
    }


class _Fidelity:
    """Compares the models batch by batch.  measured, mapped: examples whose outputs, and whose maps, were
    compared.  audit: of a model that sorts softly."""

    def __init__(
        self, models: _Models, sites: Mapping[str, SiteFidelity], audit: SoftToHard | None = None
    ) -> None:
        lower = models.metric is not None and models.metric.lower
        self.outputs, self.lossless = OutputFidelity(lower), OutputFidelity()
        self.measured = self.mapped = 0
        self.first: Batch | None = None
        self.audit = audit
        self._models, self._sites = models, sites
        self._entries = 0  # of all maps so far, also of sites that other processes compare

    def add(self, batch: Batch, outputs: Mapping[str, Tensor]) -> None:
        """outputs: see _Models.outputs."""
        if self.mapped < MAP_EXAMPLES and self._entries < MAP_ENTRIES:
            lossless = _only(self._models.lossless.watch(batch, self._see))
            self.lossless.update(outputs["teacher"], lossless, batch.labels)
            self.mapped += len(batch)
        users = {name: values for name, values in outputs.items() if name.startswith("metric_")}
        self.outputs.update(outputs["teacher"], outputs["compiled"], batch.labels, batch.numbers, users)
        give_back()
        if self.first is None:
            self.first, classes, source = batch, self.outputs.classes, self._models.source
            if source.labels is not None and classes is not None:
                check_labels(source.labels, classes, range(len(source.labels)), source.source)
        if self.audit is not None:
            self.audit.update(batch)
        self.measured += len(batch)

    def _see(self, name: str, t: SiteTensors) -> None:
        self._entries += t.q.shape[:3].numel() * t.k.shape[2]
        if name in self._sites:
            self._sites[name].update(t)
            give_back()


class _Models:
    """The teacher, the lossless and the compiled model of an artefact, and the data."""

    def __init__(
        self, artifact: Artifact, surrounding: nn.Module | None, source: DataSource,
        metric: OwnMetric | None,
    ) -> None:  # fmt: skip
        self.artifact, self.source, self.metric = artifact, source, metric
        self._surrounding, programs = surrounding, artifact.programs
        self.runners = {stage: Runner(surrounding, parts) for stage, parts in programs.items()}
        self.lossless = Tap(surrounding, programs["lossless"], artifact.site_names)
        recipe = artifact.folder / "recipe.yaml"
        document = read_yaml_mapping(recipe, "recipe")
        self.batch_size = Recipe.from_dict(document, where=str(recipe)).batch_size

    def sites(self, fast: bool) -> dict[str, SiteFidelity]:
        names = enumerate(self.artifact.site_names)
        return {name: SiteFidelity(self.artifact, i, fast) for i, name in names}

    def audit(self) -> SoftToHard | None:
        """Of a teacher that sorts softly."""
        programs, manifest = self.artifact.programs, self.artifact.manifest
        if not soft_sites(programs["lossless"]):
            return None
        refreshed = programs["graph"] if "refresh" in manifest else None
        untouched = [str(x["name"]) for x in manifest["sites"] if x["operator"] == TEACHER]
        return SoftToHard(self._surrounding, programs["lossless"], refreshed, untouched)

    def outputs(self, batch: Batch) -> Part:
        """What teacher and compiled model return, and the user's metric of both."""
        whole = {"teacher": self.runners["teacher"](batch), "compiled": self.runners["graph"](batch)}
        outputs = {who: _only(output) for who, output in whole.items()}
        if self.metric is not None:
            outputs |= self.metric.values(whole, batch, self.artifact.signature())
        return outputs, None


def _only(output: Any) -> Tensor:
    """The output by which two models are compared.  Raises ValueError if there is no tensor."""
    tensors = comparable(output)
    if not tensors:
        raise ValueError("the outputs must hold float tensors, at least one")
    return moved(tensors[0], CPU)


def _within(limit: MemoryLimit, models: _Models, fast: bool, most: int) -> int:
    """The largest batch within the limit, found by trying."""

    def step(examples: int) -> None:
        batch = next(models.source.batches(examples))
        _Fidelity(models, models.sites(fast)).add(batch, models.outputs(batch)[0])

    return limit.batch_size(step, most)


def _of_all(
    shared: Mapping[str, SiteFidelity], names: Sequence[str], processes: Processes
) -> tuple[list[dict[str, Any]], tuple[SitePictures, ...]]:
    """Results and pictures of the sites in this order, whichever process measured them."""
    pairs = {n: list(map(astuple, s.pictures.pairs)) for n, s in shared.items() if s.pictures is not None}
    results = {name: site.result() for name, site in shared.items()}
    for _, (more_results, more_pairs) in processes.exchanged(({}, [results, pairs])):
        results |= more_results
        pairs |= more_pairs
    pictures = (SitePictures(n, [MapPair(*pair) for pair in pairs[n]]) for n in names if n in pairs)
    return [results[name] for name in names], tuple(pictures)


class Unseen:
    """The examples of some data that a report may use.

    excluded: how many it had to leave out, because calibration, selection or a refresh has seen them.
    """

    def __init__(self, artifact: Artifact, source: DataSource) -> None:
        """Raises InputError if the artefact has seen examples of the gate split."""
        self.seen = artifact.seen_hashes
        self.data, self.source = source, source.source
        refresh = artifact.manifest.get("refresh", {})
        entries = [artifact.manifest, refresh, *refresh.get("earlier", [])]  # what examples came for
        used = [places.found(str(e["data"]), artifact.folder) for e in entries if "data" in e]
        self.known = any(places.same(source.source, data) for data in used)
        self.excluded = 0
        held_out = sum(split_of(content) == "gate" for content in self.seen)
        if held_out:
            raise InputError(
                f"{artifact.folder}: calibration and selection must not have seen the gate split",
                got=f"{held_out} of the {len(self.seen)} examples they have seen belong to it",
                help="the artefact was changed, or examples were split in another way: compile again",
            )

    def select(self, content: int) -> bool:
        if content in self.seen:
            self.excluded += 1
            return False
        return not self.known or split_of(content) == "gate"

    def splits(self) -> dict[str, int]:
        """How many examples the artefact has seen, by split."""
        splits = [split_of(content) for content in self.seen]
        return {name: splits.count(name) for name in ("calibration", "selection")}

    def nothing(self) -> InputError:
        if self.known:
            return empty_split(self.data, "gate")
        return InputError(
            f"{self.source}: the report needs examples that calibration and selection have not seen",
            got=f"none: all {self.excluded} were seen" if self.excluded else "no examples",
            help="pass other data with --data",
        )


def bench(
    artifact_path: str | Path,
    data: str | None = None,
    *,
    model: str | None = None,
    reading: Reading = ON_CPU,
    repeats: int = 10,
    explain: bool = False,
    torch_compile: bool = False,
    progress: Progress,
) -> dict[str, Any]:
    """Time teacher, lossless and compiled, the whole model and every site; medians.

    A site's teacher is the usual log-domain PyTorch loop on the site's own activations. A verified
    model.onnx is timed under ONNX Runtime with its teacher, too.
    explain: add which kernels each compiled site runs, and why.  torch_compile: time teacher and compiled
    model under torch.compile, too.  model, reading: see report.
    """
    with _read(artifact_path, data, model, reading, "bench") as models:
        artifact, batch = models.artifact, next(models.source.batches(models.batch_size))
        _, tensors = models.lossless(batch)
        under = ", also under torch.compile" if torch_compile else ""
        with progress.phase(f"timing the whole model{under}"):
            whole = time_model(
                models.runners, batch, repeats, torch_compile=torch_compile, twin=twin_of(artifact)
            )
        sites = []
        for index, entry in enumerate(progress.track(artifact.manifest["sites"], "timing sites")):
            measured = time_site(artifact, index, tensors[index], repeats)
            sites.append({"name": entry["name"], "operator": entry["operator"], **measured})
            if explain:
                sites[-1]["kernels"] = explain_site(artifact, index, tensors[index])
        onnx: dict[str, Any] = {}
        if read_record(artifact.folder) is not None:
            require_extra()
            from asapc.onnx.bench import bench_onnx

            onnx = {"onnx": bench_onnx(artifact, batch, repeats, progress)}
    return {
        "model": {"source": artifact.manifest["teacher"]["source"], "batch": len(batch), **whole},
        **onnx,
        "sites": sites,
        "environment": environment(models.source.device),
    }
