"""The list of functions that are recognised: for each, what its result is. Those of all others are Unknown."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitpipe.loss import torch_losses, views
from splitpipe.loss.function_call import FunctionCall, Rule, dims_of, numbers_among
from splitpipe.loss.ledger import GIVEN, MAY_COUNT, UNIFORM, VARIED, Constant, Meaning, Rows, TimeMajor
from splitpipe.loss.numbers import Formula, Number, Unknown, product, tensors

#: Elementwise functions, with broadcasting.
each_entry: Rule = FunctionCall.joined


#: Functions along dimensions: the position of these among the arguments, and their default (None: all).
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys("sum mean nansum count_nonzero softmax log_softmax softmin cumsum cumprod logsumexp var std amax "
                    "amin prod argmax argmin all any is_all_true is_any_true max min median flip".split(), (1, None)),
    **dict.fromkeys("norm vector_norm linalg_vector_norm linalg_norm".split(), (2, None)),
    **dict.fromkeys("sort argsort".split(), (1, -1)),
    **dict.fromkeys("normalize cosine_similarity".split(), (2, 1)), "topk": (2, -1),
}
#: Those that add up: along the rows, they make numbers of the batch. Those that grow with the number of entries.
_ADDS = frozenset("sum mean nansum count_nonzero".split())
_GROWS = _ADDS - {"mean"} | set("prod logsumexp norm vector_norm linalg_vector_norm linalg_norm".split())


def along(call: FunctionCall) -> Meaning | None:
    """A function along dimensions: if the rows' is one of them, rows are added up, or meet."""
    at, default = _ALONG[call.name]
    named = [call.kwargs[key] for key in ("axis", "dims", "other") if key in call.kwargs]
    dims = call.argument(at, "dim", named[0] if named else default)
    if isinstance(dims, Tensor):  # torch.max(x, y)
        return call.joined()
    if isinstance(dims, bool) or call.name == "flip" and len(call.args) > 2:  # std(unbiased), flip(0, 1)
        return None
    one = len(call.operands) == 1
    whole = call.args[0] if one else torch.broadcast_tensors(*call.operands)[0]
    rows = call.meaning if one and isinstance(call.meaning, Rows) else call.joined(shape=whole.shape)
    dims = dims_of(whole, dims) or [0]  # What was squeezed out of a single row.
    if isinstance(call.meaning, TimeMajor):
        return call.meaning if call.name in ("softmax", "log_softmax") and 1 not in dims else None
    if not isinstance(rows, Rows):  # The sum of what code makes may count rows: torch.ones_like(output).sum()
        made = isinstance(rows, Constant) and rows is not GIVEN and whole.dim() and 0 in dims and call.name in _GROWS
        counts = made and call.ledger.rows == call.ledger.most and not len(whole) % call.ledger.rows
        kept = rows in (GIVEN, None) or rows in (UNIFORM, Constant.ZEROS) and call.name in _ADDS
        return MAY_COUNT if counts else rows if kept else VARIED
    if 0 not in dims:
        return rows
    if call.name == "mean":
        count = float(len(whole) if whole.dim() else 1)
        return call.averaged(rows, product(call.out, count), count)
    return call.summed(rows) if call.name in _ADDS else None


def add_up(call: FunctionCall) -> Meaning | None:
    """Sums of entries for each place, as in torch.zeros(n).scatter_add(0, places, entries)."""
    _, dim, places, entries = call.args
    rows, zeros = call.joined([entries, places], places.shape), call.meaning is Constant.ZEROS
    plain = zeros and not dim and places.dim() == 1 and len(call.out) != call.ledger.rows
    return call.summed(rows) if isinstance(rows, Rows) and plain else None


def matmul(call: FunctionCall) -> Meaning | None:
    """Products of rows with constant weights, or of each row's matrices."""
    if call.kinds == {Rows} and min([x.dim() for x in call.operands]) > 2:
        return call.joined()
    x, others = call.args[0], [call.of(y) == GIVEN and y.dim() < 3 for y in call.operands[1:]]
    return call.joined() if Rows not in call.kinds else call.meaning if x.dim() > 1 and all(others) else None


def pad(call: FunctionCall) -> Meaning | None:
    """Entries before and after those of the last dimensions, or between those of all but the first two."""
    last = 2 if call.name == "interpolate" else len(call.argument(1, "pad")) // 2
    return None if isinstance(call.meaning, Rows) and call.args[0].dim() <= last else call.meaning


def create(call: FunctionCall) -> Meaning | None:
    """A new tensor: of a single number, of several, or a copy."""
    name, args, ledger = call.name, call.args, call.ledger
    if name in _COPIES and isinstance(args[0], Tensor):
        return call.meaning if call.out.requires_grad == args[0].requires_grad else None  # torch.tensor(loss)
    if "zeros" in name or "ones" in name or "empty" in name:
        like = "like" in name and Rows in call.kinds
        return call.meaning if like else Constant.ZEROS if "zeros" in name else UNIFORM
    value: Any = call.kwargs.get("fill_value", args[-1] if args else None)
    each = value if isinstance(value, (list, tuple)) else [value]
    if not all([isinstance(call.of(x), Constant) for x in tensors(each)]):
        return None  # torch.tensor([mask.sum()])
    if ledger.may_be_read(each):
        return Unknown(ledger.read)
    if ledger.may_count(numbers_among(each), size=each is value or not call.out.is_floating_point()):
        return MAY_COUNT
    return UNIFORM if len(each) == len(numbers_among(each)) == 1 else VARIED


_COPIES = "tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor"


def vary(call: FunctionCall) -> Meaning:
    """Numbers of positions, which begin again in each microbatch; or random ones, perhaps of each row."""
    ledger, drawn = call.ledger, call.name in ("rand", "randn", "randint") and call.kwargs.get("generator") is None
    if drawn and ledger.sizes and ledger.most > 1 and call.out.shape[:1] == (ledger.rows,):
        return Rows(counting=True)  # It may be a coincidence, which no mean would show.
    plain = call.name == "arange" and len(call.args) == 1 and not {"start", "end", "step"} & {*call.kwargs}
    return Constant.POSITIONS if plain else VARIED


def ask(call: FunctionCall) -> Meaning:
    """A condition, which Python asks for each microbatch; it may be whether anything counts."""
    ledger, meaning = call.ledger, call.meaning
    ledger.asked += not isinstance(meaning, Constant)
    some, none = meaning == Unknown("any"), meaning == Unknown("all")  # if used.any(): or if ignored.all():
    if isinstance(meaning, Number):
        of = meaning.formula
        zero = len(of.args) > 1 and not isinstance(of.args[1], (Tensor, Formula)) and of.args[1] == 0
        none = zero and of.name in ("eq", "le")
        some = zero and of.name in ("gt", "ne") or of.function is None  # if mask.sum():
    ledger.empty |= some and not call.out or none and bool(call.out)
    return GIVEN


def read(call: FunctionCall) -> Meaning:
    """A value that Python reads."""
    if not isinstance(call.meaning, Constant) and not isinstance(call.out, bool):
        call.ledger.read = call.ledger.read or call.name
    return GIVEN


def size(call: FunctionCall) -> Meaning:
    """A size that Python reads."""
    x, meaning, dim = call.args[0], call.meaning, 0 if call.name == "len" else call.argument(1, "dim")
    if isinstance(meaning, Rows) and (dim is None or not dim % max(1, x.dim())):
        views.note_size(call, meaning)
    elif isinstance(meaning, Unknown) and meaning.function in _RAGGED and x.dim():
        call.ledger.read = call.ledger.read or meaning.function
    elif meaning is not GIVEN and not isinstance(meaning, (Rows, Number)):  # ones_like(x)
        sizes = call.out if isinstance(call.out, tuple) else [call.out]
        call.ledger.sizes |= {each for each in sizes if each and not each % call.ledger.rows}
    return GIVEN


#: Where recognition ended at values whose number depends on the batch.
_RAGGED = frozenset(["an entry of a list with one per row", *"nonzero argwhere unique unique_consecutive bincount "
                     "__getitem__ where index_select masked_select".split()])
#: Rules that answer Python, or make a tensor, also of numbers.
ANSWERS = frozenset([ask, read, size, create])
#: Rules that say themselves what Unknown arguments mean.
OF_ANYTHING = frozenset([*ANSWERS, vary, views.index])
#: Rules for which a number of Python is a size or a position, not a factor.
BY_PLACE = frozenset([*views.VIEWS, views.index, views.join, views.keep, along, vary, create])
_GROUPS: list[tuple[Rule, str]] = [
    (each_entry, "abs absolute acos and asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu cos "
                 "cosh digamma elu erf erfc erfinv exp exp2 expit expm1 fill floor floor_divide floordiv fmod frac "
                 "gelu hardsigmoid hardswish hardtanh invert leaky_relu lgamma log log10 log1p log2 log_sigmoid "
                 "logaddexp logical_and logical_not logical_or logical_xor logit logsigmoid masked_fill mish mod or "
                 "positive pow rand relu relu6 remainder ror round rpow rsqrt sgn sigmoid sign silu sin sinh "
                 "softplus softshrink softsign sqrt square tan tanh threshold trunc xlogy xor isfinite isinf isnan "
                 "where neg negative rand_like randn_like bernoulli dropout eq ne lt gt le ge less greater "
                 "less_equal greater_equal not_equal add radd iadd sub subtract isub rsub clamp clamp_min clip "
                 "clamp_max maximum minimum mul multiply rmul imul reciprocal div divide true_divide truediv "
                 "itruediv idiv rdiv rtruediv broadcast_tensors"),
    (along, " ".join(_ALONG)), (add_up, "scatter_add"), (matmul, "matmul mm bmm linear"), (pad, "pad interpolate"),
    (vary, "arange range linspace logspace randperm eye rand randn randint"),
    (create, "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like "
             f"new_tensor {' '.join(_COPIES)}"),
    (views.keep, "to type type_as float double half bfloat16 long int bool detach clone contiguous requires_grad cpu "
                 "cuda alias data real one_hot view_as_real"),
    (views.reshape, "view reshape view_as reshape_as flatten unflatten ravel repeat_interleave"),
    (views.turn, "t T mT H mH adjoint transpose swapaxes permute movedim unsqueeze"),
    (views.view, "squeeze expand expand_as broadcast_to select narrow unbind split chunk tensor_split"),
    (views.join, "stack cat concat concatenate hstack"),
    (views.index, "__getitem__ masked_select"), (views.gather, "gather scatter"),
    (torch_losses.loss, " ".join(torch_losses.NAMES)),
    (ask, "__bool__ equal allclose is_nonzero __contains__"),
    (read, "item tolist __int__ __float__ __index__ __complex__ numpy __array__"),
    (size, "shape size numel nelement len"),
]
RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS for name in names.split()}
