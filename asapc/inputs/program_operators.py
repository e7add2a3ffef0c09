"""The operators that a program from a file may call, and why each is there.

torch's dispatcher has thousands of operators. Some write outside their tensors at an index that the
file chooses (`max_pool2d_with_indices_backward`), some map files or print. A program from a file may only
run these: what attention models are made of, forward operators whose indices ATen checks on every device
that asapc runs on, and asapc's own. `benchmarks/fuzz.py --target operators` calls all of them with
hostile arguments.

An overload is allowed if it writes into nothing, or into its first argument alone where the name says so
(`add_`); `out=` forms, dimension names and generators are not. Where ATen does not check what an index or
a factor could do, `refused_call` does.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from asapc.ir import WRITTEN, Coupling, Ending, Stabiliser, Ties, is_damping
from asapc.operators.catalogue import OPERATORS
from asapc.operators.plan import DEFAULTS

GROUPS: Mapping[str, str] = {
    # activations, masks and the arithmetic of loops; torch.export keeps in-place forms
    "elementwise": """
        __and__ __or__ __xor__ abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh
        bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip copy cos
        cosh cumsum deg2rad div divide dropout elu eq erf erfc exp exp2 expm1 fill floor floor_divide
        fmod frac ge gelu glu greater greater_equal gt hardsigmoid hardswish hardtanh isfinite isinf
        isnan le leaky_relu lerp less less_equal log log10 log1p log2 log_sigmoid logaddexp logical_and
        logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply
        nan_to_num ne neg negative not_equal pow prelu reciprocal relu relu6 remainder round rsqrt rsub
        selu sigmoid sign silu sin sinh softplus softshrink sqrt square sub subtract tan tanh threshold
        tril triu true_divide trunc where xlogy zero
    """,
    # softmax, marginals, convergence checks, pooling over tokens
    "reductions": """
        _log_softmax _safe_softmax _softmax all amax amin aminmax any argmax argmin count_nonzero
        cumprod linalg_vector_norm log_softmax logcumsumexp logsumexp max mean min norm prod softmax std
        std_mean sum var var_mean
    """,
    # scores, values, projections, patch embeddings, distances
    "products": """
        _cdist_forward _trilinear addmm baddbmm bilinear bmm cdist conv1d conv2d conv3d conv_transpose1d
        conv_transpose2d conv_transpose3d convolution cosine_similarity dot einsum inner linear matmul
        mm mv outer scaled_dot_product_attention tensordot
    """,
    # layers around attention
    "normalisation": """
        batch_norm group_norm instance_norm layer_norm native_group_norm native_layer_norm rms_norm
    """,
    # vision models around attention
    "images": """
        _adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d
        constant_pad_nd im2col max_pool1d max_pool2d max_pool2d_with_indices max_pool3d pad
        pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d replication_pad1d
        replication_pad2d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
        upsample_nearest2d
    """,
    # _unsafe_view is what run_decompositions writes for a view of a product; it checks as view does
    # heads, patches, tokens, types and devices
    "layout": """
        _to_copy _unsafe_view adjoint alias atleast_1d atleast_2d broadcast_tensors broadcast_to cat
        chunk clone concat concatenate contiguous detach diag_embed diagonal expand expand_as flatten
        flip hstack lift_fresh_copy mH mT meshgrid moveaxis movedim narrow numpy_T permute ravel repeat
        reshape reshape_as roll select select_scatter slice slice_scatter split split_with_sizes squeeze
        stack swapaxes t tensor_split tile to transpose type_as unbind unflatten unfold unsqueeze view
        view_as vstack
    """,
    # masks, uniform marginals, positions, starting duals
    "makers": """
        arange empty empty_like eye full full_like linspace new_empty new_full new_ones new_zeros ones
        ones_like scalar_tensor zeros zeros_like
    """,
    # embeddings, sorting, matching by rank; every index is checked when it is used
    "indices": """
        argsort bucketize embedding gather index index_add index_copy index_fill index_put index_select
        one_hot scatter scatter_add scatter_reduce searchsorted sort take take_along_dim topk
    """,
    # grouped keys and values; counts in a tensor could sum to less than what is written
    "repetition by a number": "repeat_interleave",
    # sizes, early stops, what torch.export asserts about a trace
    "numbers and checks": """
        _assert_scalar _assert_tensor_metadata _local_scalar_dense is_nonzero item sym_constrain_range
        sym_constrain_range_for_size sym_numel sym_size sym_stride
    """,
}
IN_PLACE = {"elementwise", "indices"}  # `name_` is allowed as well: torch.export keeps in-place forms
_MARKS = {"child", "holds", "is_one", "kept_keys", "keys_of_empty", "rows_kept", "some_keys"}
OWN = {*_MARKS, "dual", "dual_and_row_mass", *(name for own in OPERATORS.values() for name in own.names)}
NOT_ALLOWED = {
    "aten.view.dtype",  # reads entries of one type as another
    "aten.repeat_interleave.Tensor", "aten.repeat_interleave.self_Tensor",  # counts in a tensor
}  # fmt: skip
REPLACED = {"aten._native_batch_norm_legit_no_training.default"}  # see replace_unchecked
NEVER = {"from_file", "_print"}  # even for a file that is trusted: the first maps, or makes, a file

COMPUTED = "(computed)"

_TYPES = {"Generator", "Dimname", "Stream", "Storage", "Any", "Dict"}  # in the text of a type
_LIMIT = 2**10  # of a factor that pictures are enlarged by, and its inverse


@functools.cache
def allowed_operators() -> frozenset[str]:
    """Every allowed overload by its full name ("aten.add.Tensor")."""
    spellings = [
        name + ending
        for kind, names in GROUPS.items() for name in names.split()
        for ending in (("", "_") if kind in IN_PLACE else ("",))
    ]  # fmt: skip
    listed = {
        f"aten.{name}.{overload or 'default'}"
        for name in spellings for overload in _overloads().get(f"aten::{name}", ())
        if _writes_as_named(name, overload)
    }  # fmt: skip
    return frozenset(listed - NOT_ALLOWED | REPLACED | {f"asapc.{name}.default" for name in OWN})


@functools.cache
def _overloads() -> Mapping[str, tuple[str, ...]]:
    """The overloads of every operator of the dispatcher, "" for the one without a name."""
    import asapc.kernels.library  # noqa: F401  registers its own

    by_name: dict[str, list[str]] = {}
    for text in torch._C._dispatch_get_all_op_names():
        name, _, overload = text.partition(".")
        by_name.setdefault(name, []).append(overload)
    return {name: tuple(sorted(overloads)) for name, overloads in by_name.items()}


def is_operator(full: str) -> bool:
    """Whether the dispatcher has it and a file may name it at all, allowed or not."""
    library, name, overload = full.split(".")
    known = _overloads().get(f"{library}::{name}", ())
    return ("" if overload == "default" else overload) in known and name not in NEVER


def unlisted(graph: torch.nn.Module) -> set[str]:
    """The operators that a graph and its subgraphs call but that a file may not."""
    targets = {
        node.target
        for module in graph.modules() if isinstance(module, GraphModule)
        for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    }  # fmt: skip
    return {str(target) for target in targets} - allowed_operators()


def _writes_as_named(name: str, overload: str) -> bool:
    schema = torch._C._get_schema(f"aten::{name}", overload)
    written = [
        argument.name for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]  # fmt: skip
    types = " ".join(str(argument.type) for argument in schema.arguments)
    in_place = name.endswith("_") and not name.endswith("__")
    expected = [schema.arguments[0].name] if in_place else []
    return written == expected and not any(word in types for word in _TYPES)


def refused_call(full: str, arguments: Mapping[str, Any]) -> str | None:
    """Why a call of an allowed operator is refused, by its constant arguments, None if it is not.

    arguments: by name; COMPUTED for what a node computes.
    """
    base = full.split(".")[1]
    check = next((check for name, check in _CHECKS.items() if base.startswith(name)), None)
    return None if check is None else check(arguments)


def _rounding(arguments: Mapping[str, Any]) -> str | None:
    """The smallest integer divided by -1 and truncated ends the process (SIGFPE)."""
    mode = arguments.get("rounding_mode")
    return None if mode in (None, "floor") else f"rounding_mode={mode!r}"


def _factors(arguments: Mapping[str, Any]) -> str | None:
    """A factor near 0, or one that is computed, may make an index that fits into no integer."""
    for name, value in arguments.items():
        if not name.startswith("scale"):
            continue
        for factor in value if isinstance(value, list) else [value]:
            known = isinstance(factor, int | float) and 1 / _LIMIT <= factor <= _LIMIT
            if factor is not None and not known:
                return f"{name}={factor!r}"
    return None


def _stabiliser(arguments: Mapping[str, Any]) -> str | None:
    """Settings that no Stabiliser has."""
    names = ("form", "kind", "constant", "start", "shares", "start_share")
    try:
        Stabiliser.of(*(arguments[name] for name in names))
    except (KeyError, TypeError, ValueError) as error:
        return str(error)
    return None


def _plan(arguments: Mapping[str, Any]) -> str | None:
    """The same for an operator that may have none; invalid dampings."""
    arguments = DEFAULTS | dict(arguments)
    damping = arguments["damping"]
    if damping is not None and not is_damping(damping):
        return f"damping={damping!r}"
    if damping is not None and arguments["constant"] is not None and arguments["form"] == "plan":
        return "damping beside a constant in the divisions of a plan"
    try:
        ending = Ending.of(arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    if ending is not None and arguments["constant"] is not None:
        return "an early end beside a constant in the divisions of a plan"
    if arguments["constant"] is None:
        form = arguments["form"]
        return None if form in (DEFAULTS["form"], *WRITTEN) else f"form={form!r}"
    return _stabiliser(arguments)


def _coupling(arguments: Mapping[str, Any]) -> str | None:
    """An unknown coupling or rule for ties."""
    for name, kind in (("coupling", Coupling), ("ties", Ties)):
        if name in arguments and arguments[name] not in get_args(kind):
            return f"{name}={arguments[name]!r}"
    return None


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    "upsample_": _factors, "div": _rounding, "divide": _rounding, "stabilised_": _stabiliser,
    "esp_": _coupling, "hybrid_esp_": _coupling, "plan": _plan,
}  # fmt: skip


def replace_unchecked(exported: ExportedProgram) -> None:
    """_native_batch_norm_legit_no_training(x, ...)[0]  ->  batch_norm(x, ...), in place.

    torch's decompositions make the first of the second. It reads beyond the end of statistics with fewer
    channels than x, where the second raises.  Raises ValueError if its other results, which the second
    does not give, are used.
    """
    for module in exported.graph_module.modules():
        if isinstance(module, GraphModule):
            _replace_unchecked(module)


def _replace_unchecked(module: GraphModule) -> None:
    graph = module.graph
    target = torch.ops.aten._native_batch_norm_legit_no_training.default
    norms = [node for node in graph.nodes if node.op == "call_function" and node.target is target]
    for node in norms:
        for user in [user for user in node.users if not user.users]:  # torch writes all three
            graph.erase_node(user)
        users = [*node.users]
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in users):
            raise ValueError("statistics of a batch as a result")
        x, weight, bias, mean, variance, momentum, eps = node.args
        for user in users:
            with graph.inserting_before(user):
                new = graph.call_function(
                    torch.ops.aten.batch_norm.default,
                    (x, weight, bias, mean, variance, False, momentum, eps, False),
                )
            new.meta.update(user.meta)
            user.replace_all_uses_with(new)
            graph.erase_node(user)
        graph.erase_node(node)
    if norms:
        module.recompile()
