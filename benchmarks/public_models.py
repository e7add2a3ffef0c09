"""Untouched public code that `python benchmarks/released.py --repositories FOLDER` compiles.

FOLDER holds checkouts under their own names. Their code is imported from there and copied nowhere; what
is written here only calls it as its own repository does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from released_models import (
    Inputs,
    Row,
    features,
    images,
    masked,
    normal,
    padded,
    scores,
    sharpened,
    words,
)
from torch import Tensor, nn

if not torch.cuda.is_available():  # code that moves its tensors to a GPU by itself runs here, too
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]

Build = Callable[[ModuleType], nn.Module]


def import_from(checkouts: Path, *folders: Path) -> None:
    """Puts the folders first on sys.path; modules of other checkouts are forgotten, since names repeat.

    They stay until the next call: torch.compile imports them again, by name.
    """
    below = f"{checkouts}{os.sep}"
    sys.path[:] = [*map(str, folders), *(path for path in sys.path if not path.startswith(below))]
    of_checkouts = []
    for name, module in [*sys.modules.items()]:
        stands_in = isinstance(module, mock.MagicMock)
        folders_of = getattr(getattr(module, "__spec__", None), "submodule_search_locations", None) or ()
        places = [getattr(module, "__file__", None), *folders_of]  # a folder alone has no file
        if stands_in or any(str(place).startswith(below) for place in places):
            of_checkouts.append(name)
    for name in of_checkouts:  # not before: a folder in a folder asks for the one around it
        del sys.modules[name]


class Call(nn.Module):
    """A function as a layer, with the module that it comes from and parameters of its own."""

    def __init__(self, function: Callable[..., Any], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return self.function(*args, **dict(self.named_parameters()), **inputs)


class Heads(nn.Module):
    """A core that takes queries, keys and values, in the layer that its repository puts around it."""

    def __init__(self, core: nn.Module, heads: int = 2, dim: int = 32) -> None:
        super().__init__()
        self.core, self.heads = core, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        attended: Tensor = self.out(self.core(q, k, v, mask).transpose(1, 2).flatten(2))
        return attended


class TokensFirst(nn.Module):
    """Tokens before examples, as fairseq has them."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.core(x.transpose(0, 1))[0]
        return attended


class Pooled(nn.Module):
    def __init__(self, core: nn.Module, seeds: int) -> None:
        super().__init__()
        self.core, self.seeds = core, nn.Parameter(torch.randn(1, seeds, 32))

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.core(self.seeds.repeat(x.shape[0], 1, 1), x)
        return pooled


class Sorting(nn.Module):
    """Numbers sorted by a soft permutation, as in number_sorting/train.py."""

    def __init__(self, scorer: nn.Module, permutation: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scorer, self.permutation = scorer, permutation

    def forward(self, x: Tensor) -> Tensor:
        plan = self.permutation(self.scorer(x), noise=False)
        return torch.einsum("bpq,bp->bq", plan, x)


class SceneFlow(nn.Module):
    """FLOT's transport and the flow that it estimates, as in its model."""

    def __init__(self, transport: Callable[..., Tensor], iterations: int = 3) -> None:
        super().__init__()
        self.transport, self.iterations = transport, iterations
        self.gamma, self.epsilon = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, one: Tensor, two: Tensor, first: Tensor, second: Tensor) -> Tensor:
        plan = self.transport(
            first, second, one, two, epsilon=torch.exp(self.epsilon) + 0.03,
            gamma=torch.exp(self.gamma), max_iter=self.iterations,
        )  # fmt: skip
        return (plan @ two) / (plan.sum(-1, keepdim=True) + 1e-8) - one


class Distance(nn.Module):
    """torch_sinkhorn's solver on squared distances, and its plan."""

    def __init__(self, solver: Any, problem: Any) -> None:
        super().__init__()
        self.solver, self.problem = solver, problem

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        given = self.problem(torch.cdist(x, y) ** 2, epsilon=0.1)
        result = self.solver(given)[0]
        plan: Tensor = given.transport_from_potentials(result.f, result.g)
        return plan


class Targets(nn.Module):
    """A method of a loss that makes targets of logits, and holds nothing that it needs for that."""

    def __init__(self, loss: nn.Module, name: str, **settings: Any) -> None:
        super().__init__()
        self.loss, self.name, self.settings = loss, name, settings

    def forward(self, logits: Tensor) -> Tensor:
        targets: Tensor = getattr(self.loss, self.name)(logits, **self.settings)
        return targets


def streamed(functions: Any, layers: int = 2, dim: int = 64) -> nn.Module:
    """Layers between the functions that make streams of tokens and tokens of streams again.

    functions: of a number of streams: the layer's class, and these two.
    """
    init, expand, reduce = functions(4)
    mixed = [init(dim=dim, branch=nn.Linear(dim, dim), layer_index=layer) for layer in range(layers)]
    return sharpened(nn.Sequential(expand, *mixed, reduce), ("dynamic", "static"), 1.0)


def logits(classes: int, name: str = "logits", scale: float = 0.3) -> Inputs:
    """Of all tokens of a batch in one matrix, as a loss over prototypes takes them."""
    return lambda b, n, g: {name: scale * normal(b * n, classes, generator=g).tanh()}


def streams(dim: int = 64) -> Inputs:
    return lambda b, n, g: {"x": normal(b, n, 4, dim, generator=g)}


def two_clouds(dim: int) -> Inputs:
    return lambda b, n, g: {"x": normal(b, n, dim, generator=g), "y": normal(b, n - 5, dim, generator=g)}


def padded_scores(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    """Of points of two clouds, of which some are none."""
    keep = {"source": padded(b, n, g), "target": padded(b, n - 7, g)}
    return {"scores": normal(b, n, n - 7, generator=g), **keep}


def slots(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    """Costs between places of a picture and slots, and the masses of both."""
    places, own = (7 * normal(b, count, generator=g).softmax(-1) for count in (n, 7))
    return {"costs": normal(b, n, 7, generator=g), "a": places, "b": own}


def lepard(module: Any) -> nn.Module:
    """Its optimal transport, as its matching calls it."""
    def matches(scores: Tensor, source: Tensor, target: Tensor, alpha: Tensor) -> Tensor:
        shown = source[..., None] & target[:, None]
        scores = scores.masked_fill(~shown, -torch.inf)
        plan: Tensor = module.log_optimal_transport(scores, alpha, 3, source, target)
        return plan.exp()[:, :-1, :-1]

    return Call(matches, alpha=torch.tensor(1.0))


def balanced(scores: Tensor, epsilon: float) -> list[Tensor]:
    """A kernel of similarities, and uniform masses of its rows and columns."""
    masses = [torch.full((len(scores), count), 1 / count) for count in scores.shape[1:]]
    return [torch.exp((scores.tanh() - 1) / epsilon), *masses]


def clouds(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"x": normal(b, n, 8, generator=g), "y": normal(b, n - 5, 8, generator=g)}


def scene(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    return {
        "one": 4 * normal(b, n, 3, generator=g), "two": 4 * normal(b, n, 3, generator=g),
        "first": normal(b, n, 128, generator=g), "second": normal(b, n, 128, generator=g),
    }  # fmt: skip


def patches(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    """Scores and masks of patches, of which most points are there."""
    return {
        "scores": normal(b, n, n, generator=g), "row_masks": padded(b, n, g), "col_masks": padded(b, n, g)
    }


def square(name: str = "scores") -> Inputs:
    return lambda b, n, g: {name: normal(b, n, n, generator=g)}


def anchors(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    """Costs between 9 boxes, the last of which is the background, and anchors, and the masses of both."""
    masses = torch.cat([torch.full((8,), 8.0), torch.tensor([n - 64.0])])
    return {"mu": masses.expand(b, -1), "nu": torch.ones(b, n), "C": torch.rand(b, 9, n, generator=g)}


def reordered(b: int, n: int, g: torch.Generator) -> dict[str, Tensor]:
    """True is padding."""
    return {"x": normal(b, n, 64, generator=g), "key_padding_mask": ~padded(b, n, g)}


class Reordering(nn.Module):
    """Sinkhorn attention of a sequence to itself, tokens first."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        attended: Tensor = self.core(x, x, x, key_padding_mask)[0]
        return attended


def reordering(module: Any) -> nn.Module:
    module.FairseqDropout = lambda p, **_: nn.Dropout(p)
    return Reordering(module.SinkhornAttention(64, 4, sinkhorn_iters=8))


class Prompts(nn.Module):
    """Several prompts a class, attending to the places of a picture."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, texts: Tensor, pixels: Tensor) -> Tensor:
        attended: Tensor = self.core(texts.permute(1, 2, 0, 3), pixels, pixels)[0]
        return attended


def keypoints(dim: int, image: tuple[int, ...]) -> Inputs:
    """Of two pictures, as SuperGlue and OpenGlue take them."""

    def inputs(b: int, n: int, g: torch.Generator) -> dict[str, Any]:
        given: dict[str, Tensor] = {}
        for number, count in (("0", n), ("1", n - 7)):
            places = torch.rand(b, count, 2, generator=g) * 400
            described = normal(b, dim, count, generator=g)
            given |= {
                f"keypoints{number}": places, f"descriptors{number}": described,
                f"local_descriptors{number}": described.mT,
                f"scores{number}": torch.rand(b, count, generator=g),
                f"side_info{number}": torch.rand(b, count, 1, generator=g),
                f"image{number}": torch.zeros(b, *image),
            }  # fmt: skip
        return {"data": given}

    return inputs


def salad(b: int, n: int, g: torch.Generator) -> dict[str, Any]:
    side = int(n**0.5)
    return {"x": (normal(b, 384, side, side, generator=g), normal(b, 384, generator=g))}


def superglue(module: Any) -> nn.Module:
    """Of its published configuration; its weights are not in a checkout's text."""
    with (mock.patch.object(torch, "load", lambda *_: {}),
          mock.patch.object(module.SuperGlue, "load_state_dict", lambda *_: None)):  # fmt: skip
        model: nn.Module = module.SuperGlue({"GNN_layers": ["self", "cross"] * 4})
    return model


OPENGLUE: Mapping[str, Any] = {
    "descriptor_dim": 128, "dustbin_score_init": 1.0, "otp": {"num_iters": 20, "reg": 1.0},
    "positional_encoding": {"output_size": 128, "side_info_size": 1,
                            "hidden_layers_sizes": [32, 64]},
    "attention_gnn": {"num_stages": 4, "num_heads": 4, "embed_dim": 128, "attention": "softmax",
                      "use_offset": False},
}  # fmt: skip
VIT: Mapping[str, Any] = {
    "image_size": 28, "patch_size": 4, "num_classes": 10, "dim": 64, "depth": 1, "heads": 1,
    "mlp_dim": 64, "channels": 1,
}  # fmt: skip
LOT: Mapping[str, Any] = {"head_dim": 16, "num_head": 2}


def repository_rows(folder: Path) -> list[Row]:
    """Of checkouts below `folder`; their owners stand in the first column."""
    folder = folder.resolve()

    def of(
        owner: str, title: str, place: str, name: str, build: Build, inputs: Inputs,
        size: tuple[int, int], other: tuple[int, int | None], scaled: bool = True,
        unneeded: Sequence[str] = (),
    ) -> Row:  # fmt: skip
        """place: the folder that its imports start from.  name: the module there.  unneeded: modules that
        others of its package import."""

        def make() -> nn.Module:
            import_from(folder, folder / place, folder / place.split("/")[0])
            sys.modules.update({other: mock.MagicMock() for other in unneeded})
            return sharpened(build(importlib.import_module(name)), ("ref",), 2.0)

        return Row(f"{owner}/{place.split('/')[0]}: {title}", make, inputs, size, other, scaled)

    lot: Build = lambda m: Heads(m.LinearSinkAttention(LOT))  # noqa: E731
    seeds: Callable[[int], Build] = lambda count: lambda m: Pooled(  # noqa: E731
        m.MABSINK(32, 32, 32, 2, sinkhorn=m.SinkhornDistance(eps=1, max_iter=21, cost=m.dotmat)), count
    )
    sinkformers, esp, lotformer = "michaelsdr", "Anon4142", "anonymous13761234"
    mixers = "mHC-manifold-constrained-hyper-connections"
    return [
        of(sinkformers, "text classifier", "sinkformers/nlp-tutorial/text-classification-transformer",
           "model", lambda m: m.TransformerEncoder(200, 256, 64, 2, 2, d_ff=64, n_it=5),
           words(200, "inputs"), (8, 128), (3, 57), False),
        of(sinkformers, "ViT, T = 5", "sinkformers/vit-pytorch", "vit_pytorch.vit",
           lambda m: m.ViT_only_Att(**VIT, max_iter=5), images(28, 1), (32, 0), (3, None),
           unneeded=("torchvision",)),
        of(sinkformers, "set transformer, four seeds", "sinkformers/set_transformer",
           "set_transformer.modules", seeds(4), features(32), (8, 128), (3, 57)),
        of(esp, "MNIST ViT", "ESPFormer/experiments/mnist", "vit", lambda m: m.ViT_only_Att(**VIT),
           images(28, 1), (32, 0), (3, None)),
        of(esp, "attention", "ESPFormer/attentions", "attentions.esp",
           lambda m: m.EspAttention(32, heads=2, dim_head=16), features(32), (8, 64), (3, 31)),
        of(esp, "differential attention", "ESPFormer/attentions", "attentions.dif",
           lambda m: m.MultiHeadDifAttention(32, 2, -1, 16), features(32), (8, 64), (3, 31)),
        of(lotformer, "bert-glue", "LOTFormer/bert-glue", "lot_attention", lot, features(32), (4, 512),
           (3, 200)),
        of(lotformer, "bert-glue, masked", "LOTFormer/bert-glue", "lot_attention", lot,
           masked(32, "mask", number=True), (4, 512), (3, 200)),
        of(lotformer, "LRA", "LOTFormer/LRA", "linear_sinkformer", lot, features(32), (4, 512), (3, 200)),
        of(lotformer, "retrieval", "LOTFormer/retrieval", "linear_attention.core",
           lambda m: Heads(m.LotAttentionCore(2, 16)), features(32), (4, 512), (3, 200)),
        of(lotformer, "DeiT attention", "LOTFormer/deit-imagenet", "models.lot_deit",
           lambda m: m.LotAttention(32, 2, 49), features(32), (8, 51), (3, None)),
        of(lotformer, "translation", "LOTFormer/fairseq-nmt", "lot_fairseq.lot_multihead_attention",
           lambda m: TokensFirst(m.LotMultiheadAttention(32, 2)), features(32), (4, 256), (3, 100)),
        of("magicleap", "SuperGlue, 4 + 4 layers", "SuperGluePretrainedNetwork", "models.superglue",
           superglue, keypoints(256, (1, 480, 640)), (1, 512), (2, 300), False),
        of("magicleap", "optimal transport, T = 200", "SuperGluePretrainedNetwork", "models.superglue",
           lambda m: Call(lambda scores, alpha: m.log_optimal_transport(scores, alpha, 100),
                          alpha=torch.tensor(1.0)), scores(), (1, 512), (2, 300)),
        of("ucuapps", "whole matcher, 4 + 4 layers", "OpenGlue", "models.superglue.superglue",
           lambda m: m.SuperGlue(OPENGLUE), keypoints(128, (1, 480, 640)), (1, 512), (2, 300), False),
        of("qinzheng93", "learnable transport, T = 200", "GeoTransformer",
           "geotransformer.modules.sinkhorn.learnable_sinkhorn",
           lambda m: m.LearnableLogOptimalTransport(100), patches, (32, 64), (3, 40)),
        of("yewzijian", "Sinkhorn with slack", "RPMNet/src", "models.rpmnet",
           lambda m: Call(lambda scores: m.sinkhorn(scores, 5).exp()), scores(), (4, 256), (3, 100)),
        of("yewzijian", "Sinkhorn without slack", "RPMNet/src", "models.rpmnet",
           lambda m: Call(lambda scores: m.sinkhorn(scores, 5, slack=False).exp()), scores(), (4, 256),
           (3, 100)),
        of("valeoai", "scene flow", "FLOT", "flot.tools.ot", lambda m: SceneFlow(m.sinkhorn), scene,
           (1, 512), (2, 200), False),
        of("claying", "kernel pooling", "OTK", "otk.layers",
           lambda m: m.OTKernel(64, 10, heads=2, max_iter=10), features(64, "input"), (8, 200), (3, 90),
           False),
        of("claying", "kernel pooling, log domain, masked", "OTK", "otk.layers",
           lambda m: m.OTKernel(64, 10, heads=2, max_iter=10, log_domain=True, eps=1.0),
           lambda b, n, g: {"input": normal(b, n, 64, generator=g), "mask": padded(b, n, g)}, (8, 200),
           (3, 90), False),
        of("serizba", "SALAD", "salad", "models.aggregators.salad", lambda m: m.SALAD(384, dropout=0.0),
           salad, (4, 529), (2, 256), False),
        of("perrying", "sorting 20 numbers", "gumbel-sinkhorn", "utils.gumbel_sinkhorn_ops",
           lambda m: Sorting(importlib.import_module("number_sorting.model").FCModel(32, 20),
                             m.gumbel_sinkhorn),
           lambda b, _, g: {"x": torch.rand(b, 20, generator=g)}, (32, 0), (5, None)),
        of("perrying", "divisions by sums", "gumbel-sinkhorn", "utils.gumbel_sinkhorn_ops",
           lambda m: Call(lambda scores: m.sinkhorn_norm(scores.exp())), scores(), (8, 100), (3, 40)),
        of("marvin-eisenberger", "unrolled layer", "implicit-sinkhorn", "sinkhorn.sinkhorn",
           lambda m: Call(lambda scores, mu, nu: m.sinkhorn_unrolled(scores, mu, nu, 20, 0.5)),
           lambda b, n, g: {"scores": normal(b, n, n - 7, generator=g),
                            "mu": normal(b, n, generator=g).softmax(-1),
                            "nu": normal(b, n - 7, generator=g).softmax(-1)}, (8, 100), (3, 40), False),
        of("marvin-eisenberger", "implicit layer", "implicit-sinkhorn", "sinkhorn.sinkhorn",
           lambda m: Call(lambda scores, mu, nu: m.Sinkhorn.apply(scores, mu, nu, 20, 0.5)),
           lambda b, n, g: {"scores": normal(b, n, n - 7, generator=g),
                            "mu": normal(b, n, generator=g).softmax(-1),
                            "nu": normal(b, n - 7, generator=g).softmax(-1)}, (8, 100), (3, 40), False),
        of("dfdazac", "Sinkhorn distance", "wassdistance", "layers",
           lambda m: Call(lambda x, y: m.SinkhornDistance(eps=0.1, max_iter=100)(x, y)[1]), clouds,
           (4, 100), (3, 40), False),
        of("anindex", "solver", "torch_sinkhorn", "torch_sinkhorn.sinkhorn",
           lambda m: Distance(m.Sinkhorn(threshold=-1.0, max_iterations=10), m.LinearProblem), clouds,
           (4, 100), (3, 40), False),
        of("Kareem404", "four streams", "hyper-connections/src", "models.hyper_connections",
           lambda m: sharpened(m.mHC_attn(nn.Linear(64, 64), 4, 64, 512), ("theta",), 3.0),
           lambda b, n, g: {"x": normal(b, n, 4, 64, generator=g)}, (4, 512), (3, 100), False),
        of("tokenbender", "static mixer", mixers, "hyper_connections.hyper_connections_mhc",
           lambda m: m.HyperConnections(4, dim=64, branch=nn.Linear(64, 64), layer_index=0),
           lambda b, n, g: {"residuals": normal(4 * b, n, 64, generator=g)}, (4, 512), (3, 100)),
        of("lucidrains", "router", "sinkhorn-router-pytorch", "sinkhorn_router_pytorch",
           lambda m: Call(lambda scores: m.sinkhorn_router.sinkhorn(scores.exp())), scores(16), (4, 512),
           (3, 100)),
        of("lucidrains", "bucketed attention", "sinkhorn-transformer",
           "sinkhorn_transformer.sinkhorn_transformer",
           lambda m: m.SinkhornSelfAttention(64, 16, 512, heads=4, non_permutative=False), features(64),
           (4, 512), (3, 256)),
        of("fagp", "rebasing layer", "sinkhorn-rebasin", "rebasin.rebasinnet.sinkhorn",
           lambda m: Call(lambda scores: m.Sinkhorn.apply(
               -scores, torch.ones(scores.shape[:-1]), torch.ones(scores.shape[:-1]), 20, 1.0)),
           scores(), (8, 64), (3, 40), unneeded=("torchviz",)),
        of("facebookresearch", "targets of its head", "dinov2", "dinov2.loss.dino_clstoken_loss",
           lambda m: Targets(m.DINOLoss(512), "sinkhorn_knopp_teacher", teacher_temp=0.07), logits(512),
           (4, 64), (3, 40)),
        of("facebookresearch", "online clustering", "capi", "model",
           lambda m: m.OnlineClustering(
               64, 256, bias=True, n_sk_iter=3, target_temp=0.06, pred_temp=0.12), features(64), (16, 49),
           (12, 36), unneeded=("jaxtyping", "omegaconf", "utils")),
        of("vturrisi", "SwAV's assignment", "solo-learn/solo/utils", "sinkhorn_knopp",
           lambda m: m.SinkhornKnopp(), logits(300, "Q"), (4, 64), (3, 40)),
        of("lightly-ai", "CAPI's assignment", "lightly", "lightly.loss.capi_loss",
           lambda m: Call(lambda scores: m.sinkhorn_knopp(scores / 4)), scores(256), (16, 49), (12, 36),
           unneeded=("torchvision", "torchvision.ops")),
        of("RUCAIBox", "balanced item codes, float64", "LC-Rec/index", "models.layers",
           lambda m: Call(lambda logits: m.sinkhorn_algorithm(logits.double(), 0.003, 50)), logits(256),
           (4, 64), (3, 40), unneeded=("sklearn", "sklearn.cluster")),
        of("NVIDIA", "hyper-connections' matrix", "Megatron-LM",
           "megatron.core.transformer.hyper_connection",
           lambda m: Call(lambda x: m.SinkhornKnopp.apply(x, 20)),
           lambda b, n, g: {"x": normal(b, n, 4, 4, generator=g)}, (4, 512), (3, 100)),
        of("FFTYYY", "two mixed layers", "mhc-lite/hyper_conn", "mhc",
           lambda m: streamed(m.get_init_and_expand_reduce_stream_functions), features(64, "input"),
           (4, 512), (3, 100)),
        of("KennyStryker", "four streams", "manifold-constrained-hyper-connections", "mhc",
           lambda m: m.ManifoldHyperConnections(64, 4, nn.Linear(64, 64)), features(64), (4, 512),
           (3, 100)),
        of("aamir-gmail", "four streams", "MC-Hyper-Connections-Implementation",
           "example_3_character_transformer_v3", lambda m: m.MHCWrapper(nn.Linear(64, 64), 64), streams(),
           (4, 512), (3, 100), unneeded=("requests",)),
        of("aamir-gmail", "language model, 4 + 4 layers", "MC-Hyper-Connections-Implementation",
           "example_3_character_transformer_v3", lambda m: m.MHCLanguageModel(65), words(65, "idx"),
           (4, 128), (3, 100), unneeded=("requests",)),
        of("weihan28", "mapping of four streams", "llama3", "core.nn.mHC.mhc_mapping",
           lambda m: m.MHCMapping(64), streams(), (4, 512), (3, 100)),
        of("davzha", "slot transport, scripted", "MESH", "mesh",
           lambda m: Call(lambda costs, a, b: m.sinkhorn(costs, a, b)[0]), slots, (16, 196), (5, 100),
           False),
        of("rabbityl", "matching, padded", "lepard", "models.matching", lepard, padded_scores, (4, 256),
           (2, 150)),
        of("haoyu94", "coarse matching, T = 200", "Coarse-to-fine-correspondences",
           "model.OptimalTransport.utils",
           lambda m: Call(lambda scores, alpha: m.log_optimal_transport(scores, None, None, alpha, 100),
                          alpha=torch.tensor(1.0)), scores(), (1, 256), (2, 150)),
        of("itailang", "scene flow", "SCOOP", "tools.ot",
           lambda m: SceneFlow(lambda *given, **named: m.sinkhorn(*given, **named)[0]), scene, (1, 512),
           (2, 200), False),
        of("robot-learning-freiburg", "unbalanced transport", "LCDNet/models/backbone3D", "heads",
           lambda m: Call(lambda x, y, epsilon, gamma: m.sinkhorn_unbalanced(
               x, y, epsilon.exp() + 0.03, gamma.exp(), 5),
               epsilon=torch.tensor(-1.0), gamma=torch.tensor(0.0)), two_clouds(32), (2, 512), (3, 200)),
        of("robot-learning-freiburg", "transport with slack", "LCDNet/models/backbone3D", "heads",
           lambda m: Call(lambda x, y, beta, alpha: m.sinkhorn_slack_variables(x, y, beta, alpha).exp(),
                          beta=torch.tensor(3.0), alpha=torch.tensor(0.4)), two_clouds(32), (2, 512),
           (3, 200)),
        of("generatebio", "couplings", "chroma/chroma/layers/structure", "optimal_transport",
           lambda m: Call(lambda scores: m.optimize_couplings_sinkhorn(-scores, 2.0)), scores(), (4, 100),
           (3, 60)),
        of("mahmoodlab", "slides to prototypes", "PANTHER/src/mil_models/OT", "otk.sinkhorn",
           lambda m: Call(lambda scores: m.log_sinkhorn(scores, max_iter=20)), scores(16), (2, 512),
           (3, 200), unneeded=("ot", "faiss")),
        of("pemami4911", "policy's layer", "sinkhorn-policy-gradient.pytorch", "spg.layers",
           lambda m: m.Sinkhorn(20, 5, 0.5), lambda b, n, g: {"x": normal(b, n, n, generator=g)}, (8, 20),
           (3, 15), unneeded=("sklearn", "sklearn.utils", "sklearn.utils.linear_assignment_")),
        of("konstantinosKokos", "links of a proof net", "neural-proof-nets/Parser/neural", "sinkhorn",
           lambda m: Call(lambda scores: m.sinkhorn_fn_no_exp(scores, 1, 3)), scores(), (8, 20), (3, 15)),
        of("HeddaCohenIndelman", "permutations", "Learning-Gumbel-Sinkhorn-Permutations-w-Pytorch",
           "my_sinkhorn_ops", lambda m: Call(lambda x: m.my_gumbel_sinkhorn(x, noise_factor=0.0)[0]),
           lambda b, n, g: {"x": normal(b, n, n, generator=g)}, (8, 20), (3, 15)),
        of("wl-zhao", "structural similarity", "DIML/utilities", "diml",
           lambda m: Call(lambda scores: m.Sinkhorn(*balanced(scores, 0.05))),
           lambda b, _, g: {"scores": normal(b, 49, 49, generator=g)}, (32, 0), (5, None)),
        of("CHENGY12", "patches to prompts", "PLOT/plot-adapter", "utils",
           lambda m: Call(lambda scores: m.Sinkhorn(*balanced(scores, 0.1))),
           lambda b, _, g: {"scores": normal(b, 49, 4, generator=g)}, (32, 0), (5, None),
           unneeded=("clip",)),
        of("fukexue", "registration, slack of zeros", "RGM", "utils.sinkhorn",
           lambda m: m.Sinkhorn(20, skaddcr=True), square("s"), (4, 256), (3, 100)),
        of("fukexue", "registration, sums", "RGM", "utils.sinkhorn",
           lambda m: Call(lambda scores: m.Sinkhorn(20)(scores.sigmoid())), scores(), (4, 256), (3, 100)),
        of("Thinklab-SJTU", "graph matching", "PCA-GM", "utils.sinkhorn",
           lambda m: Call(lambda scores: m.Sinkhorn(10)(scores.sigmoid())), square(), (4, 32), (3, 20)),
        of("DanielShalam", "affinities of a set", "BPA", "bpa.ot",
           lambda m: Call(lambda costs: m.log_sinkhorn(costs[0], 0.1, 10).exp()), square("costs"),
           (1, 256), (1, 100), False),
        of("DanielShalam", "affinities of a batch", "BPA", "bpa.ot",
           lambda m: Call(lambda costs: m.log_sinkhorn(costs.sigmoid(), 0.1, 10).exp()), square("costs"),
           (4, 100), (3, 40), False),
        of("George0828Zhang", "reordering attention, padded",
           "sinkhorn-simultrans/simultaneous_translation/modules", "sinkhorn_attention", reordering,
           reordered, (4, 256), (3, 100), False,
           unneeded=("fairseq", "fairseq.modules", "fairseq.modules.fairseq_dropout")),
        of("cubeyoung", "prompts to pixels", "OTSeg/models/decode_heads", "decode_seg",
           lambda m: Prompts(m.AttentionOT(64, 4)), lambda b, n, g: {
               "texts": normal(b, 4, 15, 64, generator=g), "pixels": normal(b, n, 64, generator=g)},
           (2, 256), (3, 100), False, unneeded=(
               "mmseg", "mmseg.models", "mmseg.models.builder", "mmseg.models.decode_heads",
               "mmseg.models.decode_heads.decode_head", "mmseg.models.losses", "mmcv", "mmcv.runner",
               "timm", "timm.models", "timm.models.layers")),
        of("NVIDIA", "router of experts", "Megatron-LM", "megatron.core.transformer.moe.moe_utils",
           lambda m: Call(lambda scores: m.sinkhorn(scores[0])), scores(16), (1, 512), (1, 100), False),
        of("changwxx", "assignment to classes", "UniOT-for-UniDA", "utils.lib",
           lambda m: Call(lambda logits: m.sinkhorn(logits, 0.05, 3)), logits(200), (4, 64), (3, 40),
           unneeded=("ot",)),
        of("facebookresearch", "targets of pairs", "OTTER/models", "model_util",
           lambda m: Call(lambda scores: m.sinkhorn(-scores.tanh(), 0.15, 5)), square(), (4, 256),
           (3, 100), unneeded=("utils", "utils.utils")),
        of("Gary-code", "order of sentences", "Sinkhorn-Network", "models.sorting_network",
           lambda m: m.SinkhornNetwork(20, 20, 1.0), lambda b, _, g: {
               "seq": normal(b, 20, 2352, generator=g)}, (8, 0), (5, None)),
        of("facebookresearch", "targets of DINO", "dinov3", "dinov3.loss.dino_clstoken_loss",
           lambda m: Targets(m.DINOLoss(512), "sinkhorn_knopp_teacher", teacher_temp=0.07), logits(512),
           (4, 64), (3, 40)),
        of("vdvchen", "matching with masses", "SGMNet", "sgmnet.match_model",
           lambda m: Call(lambda scores, mu, nu: m.sinkhorn(scores, mu, nu, 20)),
           lambda b, n, g: {"scores": normal(b, n, n - 7, generator=g),
                            "mu": normal(b, n, generator=g).softmax(-1),
                            "nu": normal(b, n - 7, generator=g).softmax(-1)}, (4, 256), (3, 100), False),
        of("juyebshin", "map elements", "InstaGraM/model", "graphmap",
           lambda m: Call(lambda scores, alpha: m.log_optimal_transport(scores, alpha, 100),
                          alpha=torch.tensor(1.0)), square(), (2, 300), (3, 100),
           unneeded=("tkinter.messagebox", "turtle")),
        of("facebookresearch", "targets of masked siamese networks", "msn", "src.losses",
           lambda m: Call(lambda logits: m.distributed_sinkhorn(logits.exp(), use_dist=False)),
           logits(512), (4, 64), (3, 40), unneeded=("src.utils",)),
        of("cvg", "optimal transport, T = 100", "glue-factory", "gluefactory_nonfree.superglue",
           lambda m: Call(lambda scores, alpha: m.log_optimal_transport(scores, alpha, 50),
                          alpha=torch.tensor(1.0)), scores(), (2, 512), (3, 100),
           unneeded=("gluefactory", "gluefactory.models", "gluefactory.models.base_model")),
        of("gpeyre", "transport cost, early stop", "SinkhornAutoDiff", "sinkhorn_pointcloud",
           lambda m: Call(lambda x, y: m.sinkhorn_loss(x[0], y[0], 0.1, len(x[0]), 50)),
           lambda b, n, g: {"x": normal(n, 2, generator=g)[None], "y": normal(n, 2, generator=g)[None]},
           (1, 100), (1, 60), False),
        of("Megvii-BaseDetection", "boxes to anchors",
           "OTA/playground/detection/coco/ota.x101.fpn.coco.800size.1x", "fcos",
           lambda m: Call(lambda mu, nu, C: m.SinkhornDistance(0.1, 50)(mu, nu, C)[1]), anchors,
           (2, 1024), (3, 500), False, unneeded=(
               "cvpods", "cvpods.layers", "cvpods.modeling", "cvpods.modeling.box_regression",
               "cvpods.modeling.losses", "cvpods.modeling.meta_arch",
               "cvpods.modeling.meta_arch.retinanet", "cvpods.modeling.postprocessing",
               "cvpods.structures", "cvpods.utils")),
        of("yoosof9", "transport of profiles, early stop", "ReCon/ReCon_source_code/ot_local",
           "ot_pytorch_sinkhorn", lambda m: Call(lambda scores: m.sinkhorn(
               scores.sigmoid(), gamma=5.0, maxiters=20)), scores(), (4, 100), (3, 40), False),
        of("lucidrains", "ViT, three proposals a token", "hyper-connections", "hyper_connections.vit",
           lambda m: sharpened(m.ViT(
               image_size=64, patch_size=8, num_classes=10, dim=64, depth=2, heads=2, dim_head=32,
               mlp_dim=128, mhc_kwargs={"num_dynamic_alpha_proposals": 3}), ("dynamic", "static"), 1.0),
           images(64), (4, 0), (3, None)),
        of("lucidrains", "fractions of streams, logarithms", "hyper-connections",
           "hyper_connections.manifold_constrained_hyper_connections",
           lambda m: sharpened(m.ManifoldConstrainedHyperConnections(
               4, dim=64, num_fracs=2, branch=nn.Linear(64, 64), layer_index=0, log_domain_sinkhorn=True),
               ("dynamic", "static"), 1.0),
           lambda b, n, g: {"residuals": normal(4 * b, n, 64, generator=g)}, (4, 512), (2, 100)),
        of("anucvml", "optimal transport layer", "ddn/ddn/pytorch", "optimal_transport",
           lambda m: m.OptimalTransportLayer(gamma=5.0, maxiters=100),
           lambda b, n, g: {"M": torch.rand(b, n, n - 3, generator=g)}, (4, 100), (3, 60)),
    ]  # fmt: skip
