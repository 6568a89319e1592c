"""Rules, by the name of an autograd node: what W needs of what the node has saved, and which function computes it.

A node without a rule keeps its whole backward in B. So does a node to which a newer torch gives another name, or that
saves what a rule reads under another name.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from splitpipe.core.dtensor import meshed, under_way, waited
from splitpipe.core.tensors import is_plain
from splitpipe.core.thread_state import unchanged
from splitpipe.deferral.convolution import Convolution
from splitpipe.deferral.embedding import Embedding
from splitpipe.deferral.function import SplitCall, WeightGradients, opened
from splitpipe.deferral.linear import Linear, MatMul, MeshedLinear
from splitpipe.deferral.standins import StandIns

#: The ``fills`` and ``gathers`` of SplitFunction.pays.
GainsOf = tuple[bool, bool]


class Rule(Protocol):
    """The rule for one kind of node."""

    @property
    def whole(self) -> bool:
        """True if either all weights that need a gradient are deferred, or none."""

    @property
    def partial(self) -> bool:
        """True if gradients also flow through the node, in addition to those of W: B continues to its weights."""

    def weights(self, node: Any) -> Sequence[int | None]:
        """The edges that lead to weights, in the order of the function's; None for one that the node lacks."""

    def fits(self, number: int, shape: Sequence[int]) -> bool:
        """True if the function can compute the gradient of its weight with this number, given its shape."""

    def refuses(self, node: Any, weight: Tensor, turned: bool, gains: GainsOf) -> str | None:
        """Why a node is left to autograd, or None; given its first weight, and whether it uses its transpose."""

    def function(self, node: Any, weight: Tensor, turned: bool) -> WeightGradients:
        """The function that computes the gradients, given the same."""

    def keep(self, node: Any) -> Any:
        """What the node has saved for W, as ``ctx``. Called before autograd frees it."""

    def take(self, ctx: Any) -> Any:
        """The same, after B; None if nothing has a W."""


class Kept:
    """What a node has saved for W."""

    __slots__ = ("geometry", "padding", "rows", "saved_for_weight")

    geometry: tuple[Any, ...]
    rows: int
    padding: int

    def __init__(self, *tensors: Tensor) -> None:
        self.saved_for_weight = tensors


def _unfit(raw: Any, weight: Tensor, meshes: bool = False) -> str | None:
    """Why a node that has saved this is left to autograd."""
    hook = raw.unpack_hook
    if hook is not None and hook is not unchanged:
        return "what it saves has hooks"  # Unpacking may take long, or not be allowed twice.
    x = raw.data
    if type(x) is not Tensor and under_way(x) and is_plain(weight):
        return None
    if type(x) is not Tensor and isinstance(x, Parameter):
        return "its input is a parameter"  # A hook may update it before its value is read.
    if type(x) is not Tensor or not is_plain(x) or not is_plain(weight):
        return None if meshes and meshed(x, weight) else "its input or its weight has a custom class"
    return "it is complex" if weight.is_complex() else None


@lru_cache
def _has(kind: Any, names: tuple[str, ...]) -> bool:
    return all([hasattr(kind, name) for name in names])


_OTHER = "this version of torch saves other things for it"


class _Of:
    """What most rules share: ``edges`` that lead to weights, and the names that are read on the node."""

    whole = partial = False

    def __init__(self, edges: tuple[int | None, ...], *names: str) -> None:
        self._edges = edges
        self._names = names

    def weights(self, node: Any) -> Sequence[int | None]:
        return self._edges

    def fits(self, number: int, shape: Sequence[int]) -> bool:
        return True

    def take(self, ctx: Any) -> Any:
        return ctx

    def lacks(self, node: Any) -> bool:
        """True if a name is missing."""
        kind: Any = type(node)
        return not _has(kind, self._names)


class _Product(_Of):
    """A product with a matrix of weights on the right; ``raw`` and ``saved`` are the names of the left factor."""

    def __init__(self, edges: tuple[int | None, ...], raw: str, saved: str, *factors: str) -> None:
        super().__init__(edges, raw, saved, *factors)
        self._raw, self._saved, self._factors = raw, saved, factors

    def fits(self, number: int, shape: Sequence[int]) -> bool:
        return number == 0 or len(shape) < 2  # A bias with rows, or per row, is summed differently.

    def refuses(self, node: Any, weight: Tensor, turned: bool, gains: GainsOf) -> str | None:
        if self.lacks(node):
            return _OTHER
        for name in self._factors:
            if getattr(node, name) != 1:
                return "it has more inputs than a bias and two matrices"
        return _unfit(getattr(node, self._raw), weight, meshes=turned)

    def function(self, node: Any, weight: Tensor, turned: bool) -> WeightGradients:
        if not turned:
            return MatMul
        return Linear if is_plain(weight) else MeshedLinear

    def keep(self, node: Any) -> Any:
        return Kept(waited(getattr(node, self._saved)))


_GEOMETRY = (
    "_saved_stride", "_saved_padding", "_saved_dilation", "_saved_transposed", "_saved_output_padding", "_saved_groups"
)


def _geometry(node: Any) -> tuple[Any, ...]:
    found = [getattr(node, name) for name in _GEOMETRY]
    return tuple([tuple(each) if isinstance(each, (list, tuple)) else each for each in found])


class _Convolution(_Of):
    def refuses(self, node: Any, weight: Tensor, turned: bool, gains: GainsOf) -> str | None:
        if self.lacks(node):
            return _OTHER
        raw = node._raw_saved_input
        why = _unfit(raw, weight)
        if why is None and not Convolution.pays(raw.data, weight, _geometry(node), *gains):
            why = "its gradients would take longer separately"
        return why

    def function(self, node: Any, weight: Tensor, turned: bool) -> WeightGradients:
        return Convolution

    def keep(self, node: Any) -> Any:
        found = Kept(node._saved_input, node._saved_weight)  # Its gradient needs the weight's shape and layout.
        found.geometry = _geometry(node)
        return found


class _Embedding(_Of):
    def refuses(self, node: Any, weight: Tensor, turned: bool, gains: GainsOf) -> str | None:
        if self.lacks(node):
            return _OTHER
        if node._saved_sparse:
            return "its gradient is sparse"
        if node._saved_scale_grad_by_freq:
            return "scale_grad_by_freq counts over each microbatch"
        if turned:
            return "its table is transposed"
        return _unfit(node._raw_saved_indices, weight)

    def function(self, node: Any, weight: Tensor, turned: bool) -> WeightGradients:
        return Embedding

    def keep(self, node: Any) -> Any:
        found, padding = Kept(node._saved_indices), node._saved_padding_idx
        found.rows = node._saved_weight_sym_argsize_0
        found.padding = padding if padding < 2**63 else padding - 2**64  # It is read as an unsigned number.
        return found


_CALL: Any = SplitCall
_STAND_INS: Any = StandIns


class _Call:
    """A call of a user's SplitFunction."""

    whole = True
    partial = False

    def fits(self, number: int, shape: Sequence[int]) -> bool:
        return True

    def weights(self, node: Any) -> Sequence[int | None]:
        found: Sequence[int | None] = node.edges
        return found

    def refuses(self, node: Any, weight: Tensor, turned: bool, gains: GainsOf) -> str | None:
        if not node.pays:
            return "its gradients would take longer separately"
        hooks = [raw.unpack_hook for raw in node._raw_saved_tensors]
        return "what it saves has hooks" if any(hook not in (None, unchanged) for hook in hooks) else None

    def function(self, node: Any, weight: Tensor, turned: bool) -> WeightGradients:
        found: WeightGradients = node.function
        return found

    def keep(self, node: Any) -> Any:
        _, _, needs_input, *needs = node.needs_input_grad
        node.left = []
        shared: Any = opened(node, needs_input, tuple(needs))
        del shared.saved_for_input
        shared.left = node.left
        return shared

    def take(self, ctx: Any) -> Any:
        left = vars(ctx).pop("left")  # Set by the call's backward, which hasn't run if no input needs a gradient.
        return left[0] if left else ctx


class _Left:
    """What compiled code has left in the stand-ins of its weights."""

    __slots__ = ("node", "saved_for_weight")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.saved_for_weight: tuple[Tensor, ...] = ()


class _StandIns:
    """The stand-ins of compiled code."""

    whole = partial = True

    def fits(self, number: int, shape: Sequence[int]) -> bool:
        return True

    def weights(self, node: Any) -> Sequence[int | None]:
        return range(len(node.next_functions))

    def refuses(self, node: Any, weight: Tensor, turned: bool, gains: GainsOf) -> str | None:
        return None

    def function(self, node: Any, weight: Tensor, turned: bool) -> WeightGradients:
        found: WeightGradients = node.function
        return found

    def keep(self, node: Any) -> Any:
        node.left = []
        return _Left(node)

    def take(self, ctx: Any) -> Any:
        left, ctx.node.left = ctx.node.left, None
        return left[0] if left else None


RULES: dict[str, Rule] = {
    "AddmmBackward0": _Product((2, 0), "_raw_saved_mat1", "_saved_mat1", "_saved_alpha", "_saved_beta"),
    "MmBackward0": _Product((1, None), "_raw_saved_self", "_saved_self"),
    "ConvolutionBackward0": _Convolution((1, 2), "_raw_saved_input", "_saved_input", "_saved_weight", *_GEOMETRY),
    "EmbeddingBackward0": _Embedding(
        (0,), "_raw_saved_indices", "_saved_indices", "_saved_weight_sym_argsize_0", "_saved_padding_idx",
        "_saved_sparse", "_saved_scale_grad_by_freq",
    ),
    _CALL._backward_cls.__name__: _Call(),
    _STAND_INS._backward_cls.__name__: _StandIns(),
}
