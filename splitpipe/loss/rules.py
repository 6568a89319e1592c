"""The list of functions that are recognised: for each, what its result is. Those of all others are Unknown."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from splitpipe.core.tensors import tensors_in
from splitpipe.loss.ledger import GIVEN, MAY_COUNT, UNIFORM, VARIED, Constant, FunctionCall, Meaning, Rows, scalars_in
from splitpipe.loss.numbers import Number, Unknown

#: What a result of a call is; None: not recognised.
Rule = Callable[[FunctionCall], Meaning | None]
_RESHAPING = frozenset("view reshape view_as reshape_as flatten unflatten ravel repeat_interleave".split())
_TURNING = frozenset("t T mT H mH adjoint transpose swapaxes permute movedim unsqueeze".split())
_DIVIDING = frozenset("unbind split chunk tensor_split".split())
#: Functions that repeat entries, perhaps for each row.
REPEATING = frozenset("expand expand_as broadcast_to repeat tile repeat_interleave".split())


def dims_of(x: Tensor, dims: Any) -> list[int]:
    """The dimensions that an argument names; None: all."""
    if dims is None or dims == () or dims == []:
        return [*range(x.dim())]
    return [dim % max(1, x.dim()) for dim in (dims if isinstance(dims, (tuple, list)) else [dims])]


def keep(call: FunctionCall) -> Meaning | None:
    """The same values in another dtype or place, or some more entries of each row."""
    sized = call.name != "one_hot" or call.argument(1, "num_classes", -1) > 0
    same = not isinstance(call.meaning, Rows) or len(call.out) == len(call.args[0])
    return call.meaning if sized and same and not isinstance(call.meaning, Number) else None  # Not loss.to(rows).


def view(call: FunctionCall) -> Meaning | None:
    """Another shape or order of dimensions, some of the entries, or each of them several times; or a piece."""
    rows, x, out, name, ledger = call.meaning, call.args[0], call.out, call.name, call.ledger
    if not isinstance(rows, Rows):
        made = rows is GIVEN and name in REPEATING or rows is Constant.POSITIONS
        return VARIED if made else None if isinstance(rows, Number) else rows  # loss.expand_as(rows)
    each = [*call.args[1:], *call.kwargs.values()]
    given = [y for some in each for y in (some if isinstance(some, (tuple, list)) else [some])]
    if name in _RESHAPING:  # No entry of the first dimension may have parts of several rows.
        size = ledger.rows if rows.chosen is None else len(x)
        plain = len(call.operands) == 1 or "as" in name  # Or each entry is repeated as often as a tensor says.
        # Given by a number, the first dimension may be of groups of rows, unless it has the entries of some dimensions.
        groups = name in ("view", "reshape") and given[:1] not in ([], [-1]) and not (
            ledger.sizes and len(out) in [ledger.rows, *accumulate(x.shape, mul)])
        return rows if out.dim() and plain and not groups and len(out) and not len(out) % size else None
    if name in _DIVIDING and not call.argument(2 - (name == "unbind"), "dim", 0) % x.dim():
        ledger.note_size(x, rows)  # Python may count the pieces.
        return None
    if name in _TURNING:  # Strides of a single row don't show which dimension is in front.
        dims = dims_of(out, given)
        if dims[0] != 0 if name == "permute" else 0 in dims and (given or out.dim() == 2):
            return None
    if not out.dim():
        return rows if name == "squeeze" and ledger.most > 1 else None  # Of a single row.
    added = name in REPEATING and out.dim() != x.dim()
    return rows if out.shape[:1] == x.shape[:1] and out.stride(0) == x.stride(0) and not added else None


def join(call: FunctionCall) -> Meaning | None:
    """Rows that are joined along another dimension."""
    parts = tensors_in(call.args[0])
    like = next((x for x in parts if isinstance(call.of(x), Rows)), parts[0])
    joined = call.joined(parts, like.shape) if len({x.dim() for x in parts}) < 2 else None
    if not isinstance(joined, Rows):  # Constants may be there for each row.
        return VARIED if isinstance(joined, Constant) else None
    return joined if call.argument(1, "dim", 0) % call.out.dim() or len(parts) == 1 and "cat" in call.name else None


def index(call: FunctionCall) -> Meaning | None:
    """Entries by slices and numbers, by a mask, or one of each row."""
    (x, given), rows, ledger = call.args, call.meaning, call.ledger
    places = given if isinstance(given, tuple) else (given,)
    if not any([isinstance(each, (Tensor, list)) or hasattr(each, "__array__") for each in places]):
        bounds = [y for each in places for y in ((each.start, each.stop) if isinstance(each, slice) else (each,))]
        if ledger.read and ledger.variable([y for y in scalars_in(bounds) if abs(y) > 1]):
            return Unknown(ledger.read)
        if not all([isinstance(ledger.of(y), Constant) for y in bounds]):
            return None  # x[:, :lengths.max()]
        if not isinstance(rows, Rows):
            return view(call)
        first: Any = places[0] if places else Ellipsis
        behind = first is Ellipsis and sum([each is not None for each in places[1:]]) < x.dim()
        whole = (behind or first == slice(None)) and call.out.shape[:1] == x.shape[:1]
        return rows if whole else Unknown("a part of the rows")
    [first, *rest], kinds = places, [call.of(each) for each in places]
    if not isinstance(rows, Rows):  # A table with an entry for each class.
        table = rows is GIVEN and isinstance(kinds[0], Rows) and first.dtype != torch.bool and not rest
        return kinds[0] if table else None
    if kinds[0] is Constant.POSITIONS and len(first) == len(x):  # x[arange(len(x)), labels]
        of_rows = [isinstance(y, int) or y.dim() == 1 and y.dtype != torch.bool and rows.alike(kind)
                   for y, kind in zip(rest, kinds[1:])]
        return rows if all(of_rows) else None
    selects = not rest and first.dtype == torch.bool and first.dim() and first.shape == x.shape[: first.dim()]
    return replace(rows, chosen=first, selected=True) if selects and rows.alike(kinds[0]) else None


def gather(call: FunctionCall) -> Meaning | None:
    """Entries that an index takes from each row, or to which it writes."""
    plain = 0 not in dims_of(call.args[0], call.argument(1, "dim"))
    return call.joined(shape=call.out.shape) if plain and isinstance(call.of(call.argument(2, "index")), Rows) else None


#: Functions along dimensions: the position of these among the arguments, and their default (None: all).
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys("sum mean nansum count_nonzero softmax log_softmax cumsum cumprod logsumexp var std amax amin prod "
                    "argmax argmin all any is_all_true is_any_true max min median flip".split(), (1, None)),
    **dict.fromkeys("norm vector_norm linalg_vector_norm linalg_norm".split(), (2, None)),
    **dict.fromkeys("sort argsort".split(), (1, -1)),
    **dict.fromkeys("normalize cosine_similarity".split(), (2, 1)), "topk": (2, -1),
}
#: Those that add up: along the rows, they make numbers of the batch.
_ADDS = frozenset("sum mean nansum count_nonzero".split())


def along(call: FunctionCall) -> Meaning | None:
    """A function along dimensions: if the rows' is one of them, rows are added up, or meet."""
    at, default = _ALONG[call.name]
    dims = call.argument(at, "dim", call.kwargs.get("axis", call.kwargs.get("dims", default)))
    if isinstance(dims, Tensor):  # torch.max(x, y)
        return call.joined()
    if isinstance(dims, bool) or call.name == "flip" and len(call.args) > 2:  # std(unbiased), flip(0, 1)
        return None
    one = len(call.operands) == 1
    whole = call.args[0] if one else torch.broadcast_tensors(*call.operands)[0]
    rows = call.meaning if one and isinstance(call.meaning, Rows) else call.joined(shape=whole.shape)
    dims = dims_of(whole, dims) or [0]  # What was squeezed out of a single row.
    if not isinstance(rows, Rows):  # The sum of what code makes may count rows: torch.ones_like(output).sum()
        made = isinstance(rows, Constant) and rows is not GIVEN
        counts = made and call.ledger.rows == call.ledger.most and not whole.numel() % call.ledger.rows
        return MAY_COUNT if counts and call.name in _ADDS else VARIED if made else rows
    if 0 not in dims:
        return rows
    if call.name == "mean":
        return call.added(rows, float(len(whole) if whole.dim() else 1))
    return call.added(rows) if call.name in _ADDS else None


def add_up(call: FunctionCall) -> Meaning | None:
    """Sums of entries for each place, as in torch.zeros(n).scatter_add(0, places, entries)."""
    _, dim, places, entries = call.args
    rows, zeros = call.joined([entries, places], places.shape), call.meaning is Constant.ZEROS
    plain = zeros and not dim and places.dim() == 1 and len(call.out) != call.ledger.rows
    return call.added(rows) if isinstance(rows, Rows) and plain else None


def matmul(call: FunctionCall) -> Meaning | None:
    """Products of rows with constant weights."""
    constant = all([call.of(y) is GIVEN and y.dim() < 3 for y in call.operands[1:]])
    return call.meaning if constant and call.args[0].dim() > 1 else None


def create(call: FunctionCall) -> Meaning | None:
    """A new tensor: of a single number, of several, or a copy."""
    name, args, ledger = call.name, call.args, call.ledger
    if name == "arange":  # Numbers of positions begin again in each microbatch.
        return Constant.POSITIONS if len(args) == 1 else VARIED
    if name in _COPIES and isinstance(args[0], Tensor):
        return call.meaning if call.out.requires_grad == args[0].requires_grad else None  # torch.tensor(loss)
    if "zeros" in name or "ones" in name or "empty" in name:
        made = Constant.ZEROS if "zeros" in name else Constant.UNIFORM
        return call.meaning if "like" in name and Rows in call.kinds else made
    value: Any = call.kwargs.get("fill_value", args[-1] if args else None)
    each = value if isinstance(value, (list, tuple)) else [value]
    if not all([isinstance(call.of(x), Constant) for x in tensors_in(value)]) or ledger.read and ledger.variable(each):
        return None  # torch.tensor([mask.sum()])
    if ledger.may_count(scalars_in(each), size=each is value or not call.out.is_floating_point()):
        return MAY_COUNT
    return Constant.UNIFORM if len(each) == len(scalars_in(each)) == 1 else GIVEN if len(each) % ledger.most else VARIED


_COPIES = "tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor"


def read(call: FunctionCall) -> Meaning:
    """A value that Python reads, or a condition, which it asks for each microbatch."""
    if not isinstance(call.meaning, Constant) and not isinstance(call.out, bool):
        call.ledger.read = call.ledger.read or call.name
    return GIVEN


def size(call: FunctionCall) -> Meaning:
    """A size that Python reads."""
    x, meaning, dim = call.args[0], call.meaning, 0 if call.name == "len" else call.argument(1, "dim")
    if isinstance(meaning, Rows) and (dim is None or not dim % max(1, x.dim())):
        call.ledger.note_size(x, meaning)
    elif isinstance(meaning, Unknown) and meaning.function in _RAGGED and x.dim():
        call.ledger.read = call.ledger.read or meaning.function
    elif meaning is not GIVEN and not isinstance(meaning, (Rows, Number)):  # ones_like(x)
        sizes = call.out if isinstance(call.out, tuple) else [call.out]
        call.ledger.sizes |= {each for each in sizes if each and not each % call.ledger.rows}
    return GIVEN


#: torch's losses. Their means divide by class indices that aren't ignored, weighted by class; by elements; by samples.
_COUNTED = frozenset("cross_entropy nll_loss linear_cross_entropy".split())
_ELEMENTS = frozenset("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss "
                      "binary_cross_entropy_with_logits hinge_embedding_loss soft_margin_loss gaussian_nll_loss "
                      "margin_ranking_loss".split())
_SAMPLES = frozenset("multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss cosine_embedding_loss "
                     "triplet_margin_loss triplet_margin_with_distance_loss".split())
LOSSES = _COUNTED | _ELEMENTS | _SAMPLES


def loss(call: FunctionCall) -> Meaning | None:
    """A loss of rows, by its reduction."""
    rows, how = _entries(call), call.kwargs.get("reduction", "mean")
    if not isinstance(rows, Rows) or how == "none":
        return rows
    return call.added(rows, None if how == "sum" else _count(call))


def _entries(call: FunctionCall) -> Meaning | None:
    """What the losses are before they are added up; None: not recognised."""
    x, weight, target = call.operands[0], call.kwargs.get("weight"), call.kwargs.get("target")
    if any([call.kwargs.get(old) is not None for old in ("size_average", "reduce")]):  # torch's deprecated options.
        return None
    if call.name in _ELEMENTS:
        if weight is not None and not call.name.startswith("binary"):
            return None  # Its mean divides by their sum.
        if call.kwargs.get("reduction") == "batchmean" and not isinstance(call.of(x), Rows):
            return None  # It divides by the length of a constant.
        return call.joined(shape=torch.broadcast_tensors(*call.operands)[0].shape)
    rows, others = call.of(x), [(y, call.of(y)) for y in call.operands if y is not x and y is not weight]
    if not isinstance(rows, Rows) or not isinstance(call.of(weight), Constant):
        return None
    counted = call.name in _COUNTED  # Of classes of rows, and not of a single one.
    plain = x.dim() > 1 and isinstance(call.of(target), Rows) if counted else x.dim() == 2
    return rows if plain and all([
        rows.alike(each) or isinstance(each, Constant) and (each in UNIFORM or counted and y is not target)
        for y, each in others
    ]) else None


def _count(call: FunctionCall) -> Tensor | float:
    """What a loss's mean divides by, or what is in proportion to that."""
    x = next((y for y in call.operands if isinstance(call.of(y), Rows)), call.operands[0])
    target, weight = call.kwargs.get("target"), call.kwargs.get("weight")
    if call.name not in _COUNTED or not isinstance(target, Tensor) or target.is_floating_point():
        return float(len(x) if x.dim() else 1)
    ignored = call.kwargs.get("ignore_index")
    counts = target != (-100 if ignored is None else ignored)
    count: Any = counts.sum() if weight is None else torch.where(
        counts, weight.detach()[torch.where(counts, target, 0)], 0).sum()
    return count.full_tensor() if hasattr(count, "full_tensor") else count  # type: ignore[no-any-return]


#: Where recognition ended at values whose number depends on the batch.
_RAGGED = frozenset(["an entry of a list with one per row", *"nonzero argwhere unique unique_consecutive bincount "
                     "__getitem__ where index_select masked_select".split()])
#: Rules that answer Python, or make a tensor, also of numbers.
ANSWERS = frozenset([read, size, create])
#: Rules that say themselves what Unknown arguments mean.
OF_ANYTHING = frozenset([*ANSWERS, index])
#: Rules for which a number of Python is a size or a position, not a factor.
BY_PLACE = frozenset([view, index, join, keep, along, create])
_GROUPS: list[tuple[Rule, str]] = [
    (FunctionCall.joined, "abs absolute acos and asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil "
                           "cos cosh digamma elu erf exp exp2 expit expm1 fill floor floor_divide floordiv fmod gelu "
                           "hardtanh invert leaky_relu lgamma log log10 log1p log2 log_sigmoid logaddexp logical_and "
                           "logical_not logical_or logical_xor logit logsigmoid masked_fill mish mod or positive pow "
                           "relu relu6 remainder ror round rpow rsqrt sgn sigmoid sign silu sin softplus sqrt square "
                           "tan tanh trunc xlogy xor isfinite isinf isnan where neg negative rand_like randn_like "
                           "bernoulli dropout eq ne lt gt le ge less greater less_equal greater_equal not_equal add "
                           "radd iadd sub subtract isub rsub clamp clamp_min clip clamp_max maximum minimum mul "
                           "multiply rmul imul reciprocal div divide true_divide truediv itruediv idiv rdiv rtruediv "
                           "broadcast_tensors"),
    (along, " ".join(_ALONG)), (matmul, "matmul linear"), (add_up, "scatter_add"),
    (create, "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like "
             f"new_tensor arange {' '.join(_COPIES)}"),
    (keep, "to type type_as float double half bfloat16 long int bool detach clone contiguous requires_grad cpu "
           "cuda alias data real one_hot view_as_real pad interpolate"),
    (view, " ".join({"squeeze", "expand", "expand_as", "broadcast_to", "select"}.union(
        _RESHAPING, _TURNING, _DIVIDING))),
    (join, "stack cat concat concatenate hstack"),
    (index, "__getitem__ masked_select"),
    (gather, "gather scatter"),
    (loss, " ".join(LOSSES)),
    (read, "__bool__ equal allclose is_nonzero __contains__ item tolist __int__ __float__ __index__ __complex__ numpy "
           "__array__"),
    (size, "shape size numel nelement len"),
]
RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS for name in names.split()}
