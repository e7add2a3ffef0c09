"""Refresh: a short training of a compiled model after its loops were replaced.

Gradients flow through the c-transforms into the fitted coefficients and the layers around them. What is
trained is read off the graph: the coefficients of every predicted dual (a token bias is among them),
the layer norms, the projection each attention output meets, and the head. All else stays as it was.
Source: ASAP, Appendix E.4 (five supervised epochs at learning rate 2e-4).

With annealing, soft sorts are cooled down meanwhile and become exact (asapc.training.anneal). Then
everything is trained that a gradient reaches, as it is the queries and keys that have to move apart.
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from asapc.artifact import Artifact
from asapc.device import CPU, moved
from asapc.errors import InputError
from asapc.formats import places
from asapc.inputs.data import Batch, DataSource, Split, empty_split, rows, split_of
from asapc.inputs.faults import check_labels
from asapc.ir import Program
from asapc.kernels.library.gradients import depths
from asapc.measure.class_scores import are_probabilities, log_probabilities
from asapc.operators.catalogue import TEACHER, by_name
from asapc.passes.rewrite import harden
from asapc.processes import ALONE, Processes
from asapc.processes import Part as Shared
from asapc.program.calls import CALLS, DUAL_SETTINGS, operator_calls
from asapc.program.runner import Runner
from asapc.terminal.progress import Progress
from asapc.training.anneal import LOWEST, Annealing
from asapc.training.tails import CERTIFIED, TOLERANCE, checked_tail, passed_through, set_tail

aten = torch.ops.aten
DUALS = {torch.ops.asapc.dual.default, torch.ops.asapc.dual_and_row_mass.default}
NORMS = {aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default}
AFFINE = {
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default,
    aten.matmul.default, aten.einsum.default, aten.conv1d.default, aten.conv2d.default,
    aten.convolution.default,
}  # fmt: skip
_SINCE = "; coefficients trained since"


@dataclass(frozen=True)
class RefreshSettings:
    """mode: "labels" is cross entropy on the data's labels, "distil" KL(teacher || compiled).

    patterns: of parameter names, instead of the choice from the graph; examples: at most, of each
    split, None for all. anneal: cool soft sorts by the factor gamma from stage to stage, and make them
    exact at the end. tail, tolerance: of the loops that are left, see training.tails.
    """

    mode: Literal["labels", "distil"]
    epochs: int = 5
    learning_rate: float = 2e-4
    batch_size: int = 32
    patterns: tuple[str, ...] = ()
    seed: int = 0
    examples: int | None = None
    anneal: bool = False
    gamma: float = 0.8
    tail: int | str | None = None
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Refreshed:
    """What write_refreshed needs. weights: by (number of the program, name); edit: of the graphs."""

    manifest: dict[str, Any]
    weights: dict[tuple[int, str], Tensor]
    seen_hashes: frozenset[int]
    example: Batch
    edit: Callable[[GraphModule], None] | None = None


@dataclass(frozen=True)
class Trained:
    """A tensor that is trained: its compiled program by number, its name there and for reports."""

    program: int
    name: str
    label: str
    tensor: nn.Parameter


@dataclass(frozen=True)
class Part:
    """Examples of one layout and the teacher's class scores on them [n, classes], if needed."""

    batch: Batch
    teacher: Tensor | None


@dataclass(frozen=True)
class Objective:
    """The training loss; leaf is where the class scores are among the model's outputs.

    probabilities: the model returns those instead of logits.
    """

    mode: Literal["labels", "distil"]
    leaf: int
    probabilities: bool

    def scores(self, output: Any) -> Tensor:
        found: Tensor = pytree.tree_leaves(output)[self.leaf]
        return found

    def loss(self, scores: Tensor, part: Part) -> Tensor:
        """Mean over examples: -log q[label], or sum_c p_c (log p_c - log q_c)."""
        log_q = log_probabilities(scores, self.probabilities)
        if self.mode == "labels":
            assert part.batch.labels is not None
            return torch.nn.functional.nll_loss(log_q, part.batch.labels.to(log_q.device))
        assert part.teacher is not None
        log_p = log_probabilities(moved(part.teacher, scores.device), self.probabilities)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def train(
    artifact: Artifact,
    model: nn.Module | None,
    source: DataSource,
    settings: RefreshSettings,
    progress: Progress,
    processes: Processes = ALONE,
) -> Refreshed:
    """Train on the calibration split; keep the epoch with the lowest loss on the selection split.

    model: the model around captured modules, whose own weights stay as they are. The gate split is
    not read. Trains the artefact's compiled programs in place. An annealed model is measured with its
    sorts exact throughout, as it will run.  processes: have the same weights all the while, and share
    the examples of every step.
    """
    check_settings(settings)
    programs = artifact.programs["graph"]
    teacher = Runner(model, artifact.programs["teacher"])
    compiled = Runner(model, programs, gradients=True)
    training = _examples(source, "calibration", settings)
    steps = settings.epochs * _steps(training, settings.batch_size)
    annealing = Annealing(programs, settings.gamma, steps) if settings.anneal else None
    selection = _examples(source, "selection", settings)
    example = rows(selection[0], range(min(len(selection[0]), settings.batch_size)))
    leaf = scores_leaf(teacher(example))

    measured = _with_teacher(
        teacher, selection, leaf, settings, "teacher, selection", progress, processes
    )
    probabilities = all(are_probabilities(p.teacher) for p in measured if p.teacher is not None)
    outputs = "probabilities" if probabilities else "logits"
    progress.note(f"the model returns {outputs}")
    parts = [Part(batch, None) for batch in training]
    if settings.mode == "distil":
        parts = _with_teacher(teacher, training, leaf, settings, "teacher, training", progress, processes)
    else:
        _check_labels([*training, *selection], measured, source.source)

    objective = Objective(settings.mode, leaf, probabilities)
    if annealing is not None and not settings.patterns:
        trained = _parameters(programs, model, parameters_of(programs))
        trained = with_gradient(compiled, objective, _rows(parts[0], range(len(example))), trained)
    else:
        names = choose_parameters(programs, leaf, settings.patterns)
        trained = _parameters(programs, model, names)
    progress.note(f"training {len(trained)} tensors on {_count(training)} examples")
    graphs = [program.graph for program in programs]
    loops = set_tail(graphs, *checked_tail(settings.tail, settings.tolerance))
    try:
        with depths() as passed:
            before, best = fit(
                compiled, objective, parts, measured, trained, settings, progress, annealing, processes
            )
    finally:
        set_tail(graphs, None, 0.0)  # what is written has the whole loop's gradient
    if best.epoch == 0:
        progress.note("no epoch lowered the loss on the selection split: the weights are unchanged")
    entry: dict[str, Any] = {
        "mode": settings.mode,
        "epochs": settings.epochs,
        "best_epoch": best.epoch,
        "learning_rate": settings.learning_rate,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "data": places.recorded(source.source, artifact.folder),
        "examples": _count(training),
        "selection_examples": _count(selection),
        "outputs": outputs,
        "parameters": [parameter.label for parameter in trained],
        "before": before,
        "after": best.metrics,
    }
    if settings.tail is not None and loops and passed:
        certified = settings.tail == CERTIFIED
        entry["tail"] = {
            "half_steps": settings.tail,
            "tolerance": settings.tolerance if certified else None,
            "passed": passed_through(passed),
        }
        half_steps = entry["tail"]["passed"]
        progress.note(
            f"gradients passed through {half_steps['min']:g} to {half_steps['max']:g} half-steps "
            f"of a loop, {half_steps['median']:g} in the middle"
        )
    if annealing is not None:
        soft = evaluate(teacher, objective, measured, settings.batch_size, processes)
        entry["anneal"] = {
            "gamma": settings.gamma, "from": annealing.temperatures(), "to": LOWEST,
        }  # fmt: skip
        entry["soft_to_hard"] = {
            name: {
                "accuracy": metrics.get("accuracy"),
                "prediction_change": 1 - metrics["prediction_agreement"],
            }
            for name, metrics in (("soft", soft), ("before", before), ("after", best.metrics))
        }
    hashes = {hash for batch in (*training, *selection) for hash in batch.hashes}
    return Refreshed(
        _manifest(artifact, entry, {(parameter.program, parameter.name) for parameter in trained}),
        {(p.program, p.name): moved(p.tensor.detach(), CPU) for p in trained},
        artifact.seen_hashes | hashes,
        example.on(CPU),
        None if annealing is None else harden,
    )


def put_weights(programs: Sequence[Program], weights: Mapping[tuple[int, str], Tensor]) -> None:
    """Trained weights into the programs, which may have been trained as copies on another device."""
    with torch.no_grad():
        for (number, name), tensor in weights.items():
            operator.attrgetter(name)(programs[number].graph).copy_(tensor)


def check_settings(settings: RefreshSettings) -> None:
    """Raises InputError for a learning rate, a cooling factor or a tail that is none."""
    checked_tail(settings.tail, settings.tolerance)
    if not 0 < settings.gamma < 1:
        raise InputError("refresh: gamma must be between 0 and 1", got=settings.gamma)
    if not (math.isfinite(settings.learning_rate) and settings.learning_rate > 0):
        raise InputError(
            "refresh: the learning rate must be positive and finite", got=settings.learning_rate
        )


# What is trained


def choose_parameters(
    programs: Sequence[Program], leaf: int, patterns: Sequence[str] = ()
) -> list[tuple[int, str]]:
    """(program, name) of what is trained, in the order of the state dicts.

    leaf: where the class scores are among the outputs of a whole-model program; a program of one
    module has no head. patterns: replace the choice; each must match a name.
    """
    available = [
        (index, name)
        for index, program in enumerate(programs)
        for name, tensor in program.graph.state_dict().items()
        if tensor.is_floating_point()
    ]
    labels = {pair: label_of(programs[pair[0]], pair[1]) for pair in available}
    if patterns:
        for pattern in patterns:
            if not fnmatch.filter(labels.values(), pattern):
                raise InputError(
                    f"--parameters: the pattern {pattern!r} must match a parameter",
                    got="no match",
                    help=f"there are {', '.join(list(labels.values())[:12])}, ...",
                )
        chosen = {o for o in available if any(fnmatch.fnmatchcase(labels[o], p) for p in patterns)}
    else:
        chosen = {
            (index, name)
            for index, program in enumerate(programs)
            for name in trainable(program.graph, leaf if program.name == "" else None)
        }
    found = [pair for pair in available if pair in chosen]
    if not found:
        raise InputError(
            "refresh: the model must have something to train",
            got="no coefficients, layer norms, projections or head",
            help="name parameters with --parameters",
        )
    return found


def label_of(program: Program, name: str) -> str:
    """The name of a program's tensor in the whole model."""
    return f"{program.name}.{name}" if program.name else name


def trainable(graph: GraphModule, leaf: int | None) -> set[str]:
    """Names of coefficients, norms, projections of attention outputs, and the head of output `leaf`."""
    constants = constant_sources(graph.graph)
    names: set[str] = set().union(*coefficients(graph))
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in NORMS:
            names |= _weights_read(node, constants)
    for operands in operator_calls(graph):
        names |= projection(operands.call, constants)
    if leaf is not None:
        output = pytree.tree_leaves(graph.graph.output_node().args[0])[leaf]
        if isinstance(output, Node):
            names |= head(output, constants)
    return names


def coefficients(graph: GraphModule) -> list[set[str]]:
    """For each operator call in order, the names of the coefficients its duals are predicted by, and of
    what an operator that was fitted otherwise has trained."""
    found = []
    for operands in operator_calls(graph):
        own = map(operands.settings.get, operands.operator.trained)
        names = {str(node.target) for node in own if isinstance(node, Node)}
        for dual in map(operands.settings.get, DUAL_SETTINGS):
            while isinstance(dual, Node) and dual.target not in DUALS:
                dual = dual.args[0]  # an intercept that is added, or one of two outputs
            if isinstance(dual, Node):
                fitted = by_name(dual.target, dual.args)["coefficients"]
                if isinstance(fitted, Node):
                    names.add(str(fitted.target))
        found.append(names)
    return found


Constants = dict[Node, frozenset[str] | None]


def constant_sources(graph: Graph) -> Constants:
    """The attributes a node is computed from, None where it also depends on the model's inputs.

    A weight may be transposed, cast or normalised before it is used: it is still a weight.
    """
    found: Constants = {}
    for node in graph.nodes:
        sources = [found[source] for source in node.all_input_nodes]
        if node.op == "get_attr":
            found[node] = frozenset({str(node.target)})
        elif node.op == "placeholder" or None in sources:
            found[node] = None
        else:
            found[node] = frozenset().union(*(s for s in sources if s is not None))
    return found


def projection(call: Node, constants: Constants) -> set[str]:
    """The first affine map on each way from an attention output.

    A way ends at a residual sum or a norm: what comes after them is no projection of this output.
    """
    names: set[str] = set()
    stack, seen = [call], {call}
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            affine = _affine(user, constants)
            names |= affine
            sums = user.target is aten.add.Tensor and len(_data(user, constants)) > 1
            if not affine and not sums and user.target not in NORMS | DUALS | CALLS.keys():
                stack.append(user)
    return names


def head(output: Node, constants: Constants) -> set[str]:
    """The last affine map on each way to an output."""
    names: set[str] = set()
    stack, seen = [output], {output}
    while stack:
        node = stack.pop()
        affine = _affine(node, constants)
        names |= affine
        if affine or node.target in NORMS | CALLS.keys():
            continue
        for source in _data(node, constants):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return names


def _data(node: Node, constants: Constants) -> list[Node]:
    """Operands that depend on the model's inputs."""
    return [source for source in node.all_input_nodes if constants[source] is None]


def _weights_read(node: Node, constants: Constants) -> set[str]:
    return {name for source in node.all_input_nodes for name in constants[source] or ()}


def _affine(node: Node, constants: Constants) -> set[str]:
    """Weights and biases of x -> x W + b; empty for a node that is none, a product of data too."""
    if node.target not in AFFINE or not _data(node, constants):
        return set()
    names = _weights_read(node, constants)
    users = list(node.users)
    if names and len(users) == 1 and users[0].target is aten.add.Tensor:
        names |= _weights_read(users[0], constants)  # a bias that is added separately
    return names


def _parameters(
    programs: Sequence[Program], model: nn.Module | None, names: Sequence[tuple[int, str]]
) -> list[Trained]:
    """The named tensors as separate parameters, everything else frozen.

    Their memory was shared with the teacher's and lossless programs, which must not be trained.
    """
    for module in (*(program.graph for program in programs), *([model] if model else [])):
        module.requires_grad_(False)
    trained = []
    for index, name in names:
        parent, _, leaf = name.rpartition(".")
        owner = programs[index].graph.get_submodule(parent)
        fresh = nn.Parameter(getattr(owner, leaf).detach().clone())
        delattr(owner, leaf)  # coefficients are buffers
        owner.register_parameter(leaf, fresh)
        trained.append(Trained(index, name, label_of(programs[index], name), fresh))
    return trained


def parameters_of(programs: Sequence[Program]) -> list[tuple[int, str]]:
    """(program, name) of every floating parameter; buffers are none, nor are a site's constants."""
    return [
        (index, name)
        for index, program in enumerate(programs)
        for name, tensor in program.graph.named_parameters()
        if tensor.is_floating_point()
    ]


def with_gradient(
    runner: Runner, objective: Objective, part: Part, trained: Sequence[Trained]
) -> list[Trained]:
    """Those that a gradient of the loss on these examples reaches; the others stay as they are."""
    scores = objective.scores(runner(part.batch))
    if not scores.requires_grad:
        return list(trained)  # fit says so
    objective.loss(scores, part).backward()
    kept = [parameter for parameter in trained if parameter.tensor.grad is not None]
    for parameter in trained:
        parameter.tensor.requires_grad_(parameter.tensor.grad is not None)
        parameter.tensor.grad = None
    return kept


# Training


@dataclass
class Best:
    """The epoch that is kept, 0 for none, with its metrics and weights."""

    epoch: int
    metrics: dict[str, float]
    weights: list[Tensor]


def fit(
    runner: Runner,
    objective: Objective,
    training: Sequence[Part],
    selection: Sequence[Part],
    trained: Sequence[Trained],
    settings: RefreshSettings,
    progress: Progress,
    annealing: Annealing | None = None,
    processes: Processes = ALONE,
) -> tuple[dict[str, float], Best]:
    """(metrics before, best epoch); leaves the best epoch's weights in place.

    With annealing all metrics are those of exact sorts, and these are in place afterwards: gradients of
    the coldest sorts are mostly zero or huge, and a warmer epoch's weights may sort best.
    Raises InputError where the loss or a weight stops being finite.
    """
    tensors = [parameter.tensor for parameter in trained]
    optimiser = torch.optim.Adam(tensors, lr=settings.learning_rate)
    generator = torch.Generator().manual_seed(settings.seed)
    measured = runner
    if annealing is not None:
        measured = annealing.hard(runner.model)
    before = evaluate(measured, objective, selection, settings.batch_size, processes)
    _require_finite(before["loss"], tensors, "before training", settings)
    best = Best(0, before, [tensor.detach().clone() for tensor in tensors])
    steps = _steps([part.batch for part in training], settings.batch_size)
    for epoch in range(1, settings.epochs + 1):
        shuffled = progress.track(
            _shuffled(training, settings.batch_size, generator), f"epoch {epoch}/{settings.epochs}", steps
        )
        for number, part in enumerate(shuffled, (epoch - 1) * steps):
            if annealing is not None:
                annealing.step(number)
            optimiser.zero_grad()
            loss = _gradient(runner, objective, part, trained, processes)
            _require_finite(loss, tensors, f"in epoch {epoch}", settings)
            optimiser.step()
        metrics = evaluate(measured, objective, selection, settings.batch_size, processes)
        _require_finite(metrics["loss"], tensors, f"after epoch {epoch}", settings)
        progress.note(f"epoch {epoch}: {_line(metrics)} (before: {_line(before)})")
        if metrics["loss"] < best.metrics["loss"]:
            best = Best(epoch, metrics, [tensor.detach().clone() for tensor in tensors])
        if epoch == 1:
            idle = [parameter.label for parameter in trained if parameter.tensor.grad is None]
            if idle:
                progress.note(f"no gradient reaches {', '.join(idle)}")
    with torch.no_grad():
        for tensor, weight in zip(tensors, best.weights, strict=True):
            tensor.copy_(weight)
    if annealing is not None:
        annealing.harden()
    return before, best


def _gradient(
    runner: Runner,
    objective: Objective,
    part: Part,
    trained: Sequence[Trained],
    processes: Processes,
) -> float:
    """The loss on a batch, whose gradient is left in the tensors; every process has taken its share."""
    tensors = [parameter.tensor for parameter in trained]
    share = list(processes.share(range(len(part.batch))))
    loss = torch.zeros(())
    if share:
        own = part if processes.alone else _rows(part, share)
        scores = objective.scores(runner(own.batch))
        if not scores.requires_grad:
            labels = ", ".join(parameter.label for parameter in trained)
            raise InputError(
                "refresh: the class scores must be differentiable in what is trained",
                got=f"no gradient through {labels}"[:300],
                help="the model may compute them outside of torch, or without gradients",
            )
        loss = objective.loss(scores, own) * (len(share) / len(part.batch))
        loss.backward()
    if processes.alone:
        return float(loss.detach())
    reached = torch.tensor([float(tensor.grad is not None) for tensor in tensors])
    own_part = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    total, reached, *summed = processes.summed([loss, reached, *own_part])
    for tensor, gradient, there in zip(tensors, summed, reached.tolist(), strict=True):
        tensor.grad = gradient if there else None
    return float(total)


def evaluate(
    runner: Runner,
    objective: Objective,
    parts: Sequence[Part],
    batch_size: int,
    processes: Processes = ALONE,
) -> dict[str, float]:
    """Loss, agreement with the teacher's predictions and, where there are labels, accuracy."""
    count = labelled = right = agreed = 0
    total = 0.0

    def scored(part: Part) -> Shared:
        return {"scores": moved(objective.scores(runner(part.batch)), CPU)}, None

    with torch.no_grad():
        for part, (found, _) in processes.dealt(_slices(parts, batch_size), scored):
            scores = found["scores"]
            total += float(objective.loss(scores, part)) * len(part.batch)
            count += len(part.batch)
            predicted = log_probabilities(scores, objective.probabilities).argmax(-1)
            assert part.teacher is not None
            exact = log_probabilities(part.teacher, objective.probabilities).argmax(-1)
            agreed += int((predicted == exact).sum())
            if part.batch.labels is not None:
                labelled += len(part.batch)
                right += int((predicted == part.batch.labels).sum())
    metrics = {"loss": total / count, "prediction_agreement": agreed / count}
    return {**metrics, "accuracy": right / labelled} if labelled else metrics


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


def _require_finite(loss: float, tensors: Sequence[Tensor], when: str, settings: RefreshSettings) -> None:
    if math.isfinite(loss) and all(bool(tensor.isfinite().all()) for tensor in tensors):
        return
    raise InputError(
        f"refresh: loss and weights must stay finite {when}",
        got=f"a loss of {loss:g} at learning rate {settings.learning_rate:g}",
        help="lower --learning-rate; nothing was written",
    )


def _shuffled(parts: Sequence[Part], batch_size: int, generator: torch.Generator) -> Iterator[Part]:
    """Every example once in batches of one layout, in random order."""
    pieces = []
    for part in parts:
        order = torch.randperm(len(part.batch), generator=generator).tolist()
        pieces += [(part, order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
    for number in torch.randperm(len(pieces), generator=generator).tolist():
        yield _rows(*pieces[number])


def _slices(parts: Sequence[Part], batch_size: int) -> Iterator[Part]:
    for part in parts:
        for start in range(0, len(part.batch), batch_size):
            yield _rows(part, range(start, min(start + batch_size, len(part.batch))))


def _rows(part: Part, index: list[int] | range) -> Part:
    taken = None if part.teacher is None else part.teacher[torch.as_tensor(list(index))]
    return Part(rows(part.batch, index), taken)


def _line(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


# Examples


def _examples(source: DataSource, split: Split, settings: RefreshSettings) -> list[Batch]:
    found = source.gather(select=lambda content: split_of(content) == split, limit=settings.examples)
    if not found:
        raise empty_split(source, split)
    return found


def _with_teacher(
    teacher: Runner,
    batches: Sequence[Batch],
    leaf: int,
    settings: RefreshSettings,
    label: str,
    progress: Progress,
    processes: Processes,
) -> list[Part]:
    """The examples with the teacher's class scores, which are needed in every epoch."""
    pieces = list(_slices([Part(batch, None) for batch in batches], settings.batch_size))

    def scored(piece: Part) -> Shared:
        return {"scores": moved(pytree.tree_leaves(teacher(piece.batch))[leaf], CPU)}, None

    scores = [found["scores"] for _, (found, _) in processes.dealt(progress.track(pieces, label), scored)]
    split = iter(torch.cat(scores).split([len(batch) for batch in batches]))
    return [Part(batch, next(split)) for batch in batches]


def _check_labels(batches: Sequence[Batch], measured: Sequence[Part], place: str) -> None:
    """measured: with the teacher's scores, whose columns are the classes."""
    classes = max(2, *(0 if p.teacher is None else p.teacher.shape[1] for p in measured))
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


def _count(batches: Sequence[Batch]) -> int:
    return sum(len(batch) for batch in batches)


# The artefact


def _manifest(artifact: Artifact, entry: dict[str, Any], trained: set[tuple[int, str]]) -> dict[str, Any]:
    """The manifest with the refresh; what the fit of changed coefficients showed no longer holds."""
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
        manifest["sites"] = [
            _refreshed_site(site) if site["operator"] != TEACHER and next(called) & trained else site
            for site in manifest["sites"]
        ]
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


def _refreshed_site(site: dict[str, Any]) -> dict[str, Any]:
    reason = str(site["reason"]).removesuffix(_SINCE) + _SINCE
    shown = ("r2", "fit_rel_l2", "selection_attention_rel_l2")
    return {**site, "reason": reason, **dict.fromkeys(shown)}


def _annealed_site(site: dict[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    before, after = (entry["soft_to_hard"][when]["prediction_change"] for when in ("before", "after"))
    reason = (
        f"annealed: exact sorting changes {after:.2%} of {entry['selection_examples']} predictions, "
        f"and {before:.2%} before"
    )
    if entry["best_epoch"] == 0:
        reason = (
            f"exact sorting changes {after:.2%} of {entry['selection_examples']} predictions; annealing "
            "did not make it better"
        )
    return {**site, "operator": "esp_hard", "reason": reason}
