"""Refresh: a short training of a compiled model after its loops were replaced.

Gradients flow through the c-transforms into the fitted coefficients and the layers around them. What is
trained is read off the graph (asapc.training.parameters). Everything else stays as it was.
Source: ASAP, Appendix E.4 (five supervised epochs at learning rate 2e-4).

With annealing, soft sorts are cooled down meanwhile and become exact (asapc.training.anneal). Then every
tensor that a gradient reaches is trained, as it is the queries and keys that have to move apart.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from asapc.artifact import Artifact
from asapc.device import CPU, moved
from asapc.errors import InputError
from asapc.formats import places
from asapc.inputs.data import Batch, DataSource, Split, empty_split, rows, split_of
from asapc.inputs.faults import check_labels
from asapc.ir import Program
from asapc.kernels.library.gradients import depths
from asapc.measure.differences import are_probabilities, log_probabilities
from asapc.operators.catalogue import TEACHER
from asapc.passes.rewrite import harden
from asapc.processes import ALONE, Part, Processes
from asapc.program.runner import Runner
from asapc.terminal.progress import Progress
from asapc.training.anneal import GAMMA, LOWEST, Annealing
from asapc.training.parameters import (
    Trained,
    choose_parameters,
    coefficients,
    freed_parameters,
    parameters_of,
)
from asapc.training.settings import CERTIFIED, RefreshSettings, checked_tail
from asapc.training.tails import set_tail

WRITTEN = ("mode", "epochs", "learning_rate", "batch_size", "seed")  # of the settings, in a manifest
_SINCE = "; coefficients trained since"


@dataclass(frozen=True)
class Refreshed:
    """What write_refreshed needs. weights: by (number of the program, name); edit: changes a graph."""

    manifest: dict[str, Any]
    weights: dict[tuple[int, str], Tensor]
    seen_hashes: frozenset[int]
    example: Batch
    edit: Callable[[GraphModule], None] | None = None


def train(
    artifact: Artifact,
    model: nn.Module | None,
    source: DataSource,
    settings: RefreshSettings,
    progress: Progress,
    processes: Processes = ALONE,
) -> Refreshed:
    """Train on the calibration split; keep the epoch with the lowest loss on the selection split.

    model: the model around captured modules, whose own weights do not change. The gate split is not
    read. Trains the artefact's compiled programs in place. An annealed model is always measured with
    exact sorts, as it will run.  processes: keep the same weights, and share the examples of every step.
    """
    programs = artifact.programs["graph"]
    teacher = Runner(model, artifact.programs["teacher"])
    compiled = Runner(model, programs, gradients=True)
    training = _examples(source, "calibration", settings)
    steps = settings.epochs * _steps(training, settings.batch_size)
    annealing = Annealing(programs, GAMMA, steps) if settings.anneal else None
    selection = _examples(source, "selection", settings)
    example = rows(selection[0], range(min(len(selection[0]), settings.batch_size)))
    leaf = scores_leaf(teacher(example))
    trainer = Trainer(leaf, False, settings, progress, processes)

    measured = trainer.with_teacher(teacher, selection, "teacher, selection")
    probabilities = all(are_probabilities(x.teacher) for x in measured if x.teacher is not None)
    trainer = replace(trainer, probabilities=probabilities)
    outputs = "probabilities" if probabilities else "logits"
    progress.note(f"the model returns {outputs}")
    if settings.mode == "distil":
        training = trainer.with_teacher(teacher, training, "teacher, training")
    else:
        _check_labels([*training, *selection], measured, source.source)

    if annealing is not None and not settings.parameters:
        trained = freed_parameters(programs, model, parameters_of(programs))
        trained = trainer.with_gradient(compiled, rows(training[0], range(len(example))), trained)
    else:
        constant = {site["name"] for site in artifact.manifest["sites"] if site["constants"]}
        names = choose_parameters(programs, leaf, settings.parameters or (), constant)
        trained = freed_parameters(programs, model, names)
    progress.note(f"training {len(trained)} tensors on {sum(map(len, training))} examples")
    graphs = [program.graph for program in programs]
    tail = checked_tail(settings.tail, settings.tolerance)
    loops = set_tail(graphs, *tail)
    try:
        with depths() as passed:
            before, best = trainer.fit(compiled, trained, training, measured, annealing)
    finally:
        set_tail(graphs, None, 0.0)  # what is written has the whole loop's gradient
    if best.epoch == 0:
        progress.note("no epoch lowered the loss on the selection split: the weights are unchanged")
    entry: dict[str, Any] = {
        **{key: getattr(settings, key) for key in WRITTEN},
        "best_epoch": best.epoch,
        "data": places.recorded(source.source, artifact.folder),
        "examples": sum(map(len, training)),
        "selection_examples": sum(map(len, selection)),
        "outputs": outputs,
        "parameters": [parameter.label for parameter in trained],
        "before": before,
        "after": best.metrics,
    }
    if settings.tail is not None and loops and passed:
        entry["tail"] = _tail_entry(*tail, passed, progress)
    if annealing is not None:
        soft = trainer.evaluate(teacher, measured)
        entry |= _annealed_entry(annealing, {"soft": soft, "before": before, "after": best.metrics})
    hashes = {hash for batch in (*training, *selection) for hash in batch.hashes}
    return Refreshed(
        _manifest(artifact, entry, {(parameter.program, parameter.name) for parameter in trained}),
        {(p.program, p.name): moved(p.tensor.detach(), CPU) for p in trained},
        artifact.seen_hashes | hashes,
        example.on(CPU),
        None if annealing is None else harden,
    )


def _tail_entry(
    most: int | None, tolerance: float, passed: Sequence[Tensor], progress: Progress
) -> dict[str, Any]:
    """most, tolerance: see checked_tail.  passed: the half-steps that gradients passed through, one
    tensor for each loop and batch."""
    every = torch.cat([depth.flatten().cpu() for depth in passed]).double()
    least, middle, greatest = (float(find(every)) for find in (torch.min, torch.median, torch.max))
    progress.note(
        f"gradients passed through {least:g} to {greatest:g} half-steps of a loop (median {middle:g})"
    )
    certified = {"half_steps": CERTIFIED, "tolerance": tolerance}
    return {
        **(certified if most is None else {"half_steps": most, "tolerance": None}),
        "passed": {"min": least, "median": middle, "max": greatest},
    }


def _annealed_entry(annealing: Annealing, measured: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """measured: metrics of soft sorts, and of exact ones before and after."""
    changes = {
        name: {
            "accuracy": metrics.get("accuracy"),
            "prediction_change": 1 - metrics["prediction_agreement"],
        }
        for name, metrics in measured.items()
    }
    temperatures = {"gamma": annealing.gamma, "from": annealing.temperatures(), "to": LOWEST}
    return {"anneal": temperatures, "soft_to_hard": changes}


def put_weights(programs: Sequence[Program], weights: Mapping[tuple[int, str], Tensor]) -> None:
    """Put trained weights into the programs, which may have been trained as copies on another device."""
    with torch.no_grad():
        for (number, name), tensor in weights.items():
            operator.attrgetter(name)(programs[number].graph).copy_(tensor)


# Training


@dataclass
class Best:
    """The epoch that is kept, 0 for none, with its metrics and weights."""

    epoch: int
    metrics: dict[str, float]
    weights: list[Tensor]


@dataclass(frozen=True)
class Trainer:
    """What all steps of a training share.

    leaf: where the class scores are among the model's outputs.  probabilities: the model returns those
    instead of logits.
    """

    leaf: int
    probabilities: bool
    settings: RefreshSettings
    progress: Progress
    processes: Processes = ALONE

    def scores(self, runner: Runner, batch: Batch) -> Tensor:
        return pytree.tree_leaves(runner(batch))[self.leaf]

    def log(self, scores: Tensor) -> Tensor:
        return log_probabilities(scores, self.probabilities)

    def loss(self, scores: Tensor, batch: Batch) -> Tensor:
        """Mean over examples: -log q[label], or sum_c p_c (log p_c - log q_c)."""
        log_q = self.log(scores)
        if self.settings.labels:
            assert batch.labels is not None
            return torch.nn.functional.nll_loss(log_q, batch.labels.to(log_q.device))
        assert batch.teacher is not None
        log_p = self.log(moved(batch.teacher, scores.device))
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()

    def with_teacher(self, teacher: Runner, batches: Sequence[Batch], label: str) -> list[Batch]:
        """The examples with the teacher's class scores, which every epoch needs."""
        pieces = list(_slices(batches, self.settings.batch_size))
        scores = list(self._scores(teacher, self.progress.track(pieces, label)))
        split = iter(torch.cat([found for _, found in scores]).split([len(batch) for batch in batches]))
        return [replace(batch, teacher=next(split)) for batch in batches]

    def _scores(self, runner: Runner, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """The class scores of every batch, on the CPU; the processes share the batches."""

        def scored(batch: Batch) -> Part:
            return {"scores": moved(self.scores(runner, batch), CPU)}, None

        for batch, (part, _) in self.processes.dealt(batches, scored):
            yield batch, part["scores"]

    def evaluate(self, runner: Runner, batches: Sequence[Batch]) -> dict[str, float]:
        """Loss, agreement with the teacher's predictions and, where there are labels, accuracy."""
        count = labelled = right = agreed = 0
        total = 0.0
        with torch.no_grad():
            for batch, scores in self._scores(runner, _slices(batches, self.settings.batch_size)):
                total += float(self.loss(scores, batch)) * len(batch)
                count += len(batch)
                assert batch.teacher is not None
                predicted, exact = (self.log(x).argmax(-1) for x in (scores, batch.teacher))
                agreed += int((predicted == exact).sum())
                if batch.labels is not None:
                    labelled += len(batch)
                    right += int((predicted == batch.labels).sum())
        metrics = {"loss": total / count, "prediction_agreement": agreed / count}
        return {**metrics, "accuracy": right / labelled} if labelled else metrics

    def with_gradient(self, runner: Runner, batch: Batch, trained: Sequence[Trained]) -> list[Trained]:
        """Those that a gradient of the loss on these examples reaches; the others are not trained."""
        scores = self.scores(runner, batch)
        if not scores.requires_grad:
            return list(trained)  # fit says so
        self.loss(scores, batch).backward()
        kept = [parameter for parameter in trained if parameter.tensor.grad is not None]
        for parameter in trained:
            parameter.tensor.requires_grad_(parameter.tensor.grad is not None)
            parameter.tensor.grad = None
        return kept

    def fit(
        self,
        runner: Runner,
        trained: Sequence[Trained],
        training: Sequence[Batch],
        selection: Sequence[Batch],
        annealing: Annealing | None = None,
    ) -> tuple[dict[str, float], Best]:
        """(metrics before, best epoch); leaves the best epoch's weights in place.

        With annealing, all metrics are those of exact sorts, which are in place afterwards: gradients of
        the coldest sorts are mostly zero or huge, and a warmer epoch's weights may sort best.
        Raises InputError if the loss or a weight stops being finite.
        """
        settings, tensors = self.settings, [parameter.tensor for parameter in trained]
        optimiser = torch.optim.Adam(tensors, lr=settings.learning_rate)
        generator = torch.Generator().manual_seed(settings.seed)
        measured = runner if annealing is None else annealing.hard(runner.model)
        before = self.evaluate(measured, selection)
        self._require_finite(before["loss"], tensors, "before training")
        best = Best(0, before, [tensor.detach().clone() for tensor in tensors])
        steps = _steps(training, settings.batch_size)
        for epoch in range(1, settings.epochs + 1):
            shuffled = _shuffled(training, settings.batch_size, generator)
            tracked = self.progress.track(shuffled, f"epoch {epoch}/{settings.epochs}", steps)
            for number, batch in enumerate(tracked, (epoch - 1) * steps):
                if annealing is not None:
                    annealing.step(number)
                optimiser.zero_grad()
                loss = self._gradient(runner, batch, trained)
                self._require_finite(loss, tensors, f"in epoch {epoch}")
                optimiser.step()
            metrics = self.evaluate(measured, selection)
            self._require_finite(metrics["loss"], tensors, f"after epoch {epoch}")
            self.progress.note(f"epoch {epoch}: {_line(metrics)} (before: {_line(before)})")
            if metrics["loss"] < best.metrics["loss"]:
                best = Best(epoch, metrics, [tensor.detach().clone() for tensor in tensors])
            idle = [parameter.label for parameter in trained if parameter.tensor.grad is None]
            if epoch == 1 and idle:
                self.progress.note(f"no gradient reaches {', '.join(idle)}")
        with torch.no_grad():
            for tensor, weight in zip(tensors, best.weights, strict=True):
                tensor.copy_(weight)
        if annealing is not None:
            annealing.harden()
        return before, best

    def _gradient(self, runner: Runner, batch: Batch, trained: Sequence[Trained]) -> float:
        """The loss on a batch; its gradient is left in the tensors. Every process takes its share."""
        tensors = [parameter.tensor for parameter in trained]
        share = list(self.processes.share(range(len(batch))))
        loss = torch.zeros(())
        if share:
            mine = batch if self.processes.alone else rows(batch, share)
            scores = self.scores(runner, mine)
            if not scores.requires_grad:
                labels = ", ".join(parameter.label for parameter in trained)
                raise InputError(
                    "refresh: the class scores must be differentiable in what is trained",
                    got=f"no gradient through {labels}"[:300],
                    help="the model may compute them outside of torch, or without gradients",
                )
            loss = self.loss(scores, mine) * (len(share) / len(batch))
            loss.backward()
        if self.processes.alone:
            return float(loss.detach())
        reached = torch.tensor([float(tensor.grad is not None) for tensor in tensors])
        own_part = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
        total, reached, *summed = self.processes.summed([loss, reached, *own_part])
        for tensor, gradient, is_reached in zip(tensors, summed, reached.tolist(), strict=True):
            tensor.grad = gradient if is_reached else None
        return float(total)

    def _require_finite(self, loss: float, tensors: Sequence[Tensor], when: str) -> None:
        if math.isfinite(loss) and all(bool(tensor.isfinite().all()) for tensor in tensors):
            return
        raise InputError(
            f"refresh: loss and weights must stay finite {when}",
            got=f"a loss of {loss:g} at learning rate {self.settings.learning_rate:g}",
            help="lower --learning-rate; nothing was written",
        )


def scores_leaf(output: Any) -> int:
    """Where the class scores are among an output's leaves: the first 2-D float tensor."""
    leaves = pytree.tree_leaves(output)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() == 2:
            return index
    shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    raise InputError(
        "refresh: the model must return class scores [examples, classes]",
        got=f"tensors of shapes {', '.join(map(str, shapes[:4]))}" if shapes else "no tensor",
    )


def _shuffled(batches: Sequence[Batch], batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
    """Every example once in batches of one layout, in random order."""
    pieces = []
    for batch in batches:
        order = torch.randperm(len(batch), generator=generator).tolist()
        pieces += [(batch, order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
    for number in torch.randperm(len(pieces), generator=generator).tolist():
        yield rows(*pieces[number])


def _slices(batches: Sequence[Batch], batch_size: int) -> Iterator[Batch]:
    for batch in batches:
        for start in range(0, len(batch), batch_size):
            yield rows(batch, range(start, min(start + batch_size, len(batch))))


def _line(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


# Examples


def _examples(source: DataSource, split: Split, settings: RefreshSettings) -> list[Batch]:
    batches = source.gather(select=lambda content: split_of(content) == split, limit=settings.examples)
    if not batches:
        raise empty_split(source, split)
    return batches


def _check_labels(batches: Sequence[Batch], measured: Sequence[Batch], place: str) -> None:
    """measured: with the teacher's scores, whose columns are the classes."""
    classes = max(2, *(x.teacher.shape[1] for x in measured if x.teacher is not None))
    for batch in batches:
        if batch.labels is None:
            raise InputError(
                f"{place}: training on labels needs an array named labels",
                got="none",
                help="add one class number per example, or pass --distil instead of --labels",
            )
        check_labels(batch.labels, classes, batch.numbers, place)


def _steps(batches: Sequence[Batch], batch_size: int) -> int:
    """Training steps of one epoch."""
    return sum(math.ceil(len(batch) / batch_size) for batch in batches)


# The artefact


def _manifest(artifact: Artifact, entry: dict[str, Any], trained: set[tuple[int, str]]) -> dict[str, Any]:
    """The manifest with the refresh; metrics of fits whose coefficients changed no longer hold."""
    manifest = dict(artifact.manifest)
    earlier = manifest.pop("refresh", None)
    if earlier is not None:
        entry = {**entry, "earlier": [*earlier.pop("earlier", []), earlier]}
    called = iter(
        {(index, name) for name in names}
        for index, program in enumerate(artifact.programs["graph"])
        for names in coefficients(program.graph)
    )
    if entry["best_epoch"] > 0:
        unknown = dict.fromkeys(("r2", "fit_rel_l2", "selection_attention_rel_l2"))
        manifest["sites"] = [
            {**site, **unknown, "reason": str(site["reason"]).removesuffix(_SINCE) + _SINCE}
            if site["operator"] != TEACHER and next(called) & trained else site
            for site in manifest["sites"]
        ]  # fmt: skip
    if "anneal" in entry:
        manifest["sites"] = [
            _annealed_site(site, entry) if site["operator"] == "esp_soft" else site
            for site in manifest["sites"]
        ]
        manifest["soft_to_hard"] = {
            "prediction_change": entry["soft_to_hard"]["after"]["prediction_change"],
            "examples": entry["selection_examples"],
            "switched": True,
        }
    return {**manifest, "refresh": entry}


def _annealed_site(site: dict[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    before, after = (entry["soft_to_hard"][when]["prediction_change"] for when in ("before", "after"))
    reason = f"exact sorting changes {after:.2%} of {entry['selection_examples']} predictions"
    if entry["best_epoch"] == 0:
        reason += "; annealing did not make it better"
    else:
        reason = f"annealed: {reason}, and {before:.2%} before"
    return {**site, "operator": "esp_hard", "reason": reason}
