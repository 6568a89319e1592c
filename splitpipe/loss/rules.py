"""The list of functions that are recognised: for each, what its result is. Any other function makes it Unknown."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss import views
from splitpipe.loss.arithmetic import add, count_of, divide, multiply, reduce
from splitpipe.loss.function_call import FunctionCall, Rule, dims_of
from splitpipe.loss.ledger import GIVEN, UNIFORM, VARIED, Constant, Meaning, Quotient, Rows, tensors
from splitpipe.loss.terms import Number, Unknown


def each_entry(call: FunctionCall) -> Meaning | None:
    """A function of entries, which broadcasting brings together."""
    rows = call.joined()
    if not isinstance(rows, Rows) or call.name not in _FILLING:
        return call.entries()
    values = [x for x in map(call.number, (*call.args, *call.kwargs.values())) if x is not None]
    if rows.share is not None and any(values):
        return None
    return replace(rows, doubt=max([rows.doubt, *map(call.ledger.doubt, values)]))


_FILLING = frozenset(["where", "masked_fill", "fill"])


def compare(call: FunctionCall) -> Meaning | None:
    """A comparison; that of a count with 0 asks whether anything counts."""
    plain = isinstance(call.meaning, Number) and call.number(call.args[1]) == 0
    found = {"gt": _SOME, "ne": _SOME, "eq": _NONE, "le": _NONE}.get(call.name) if plain else None
    return call.joined() if found is None else found


_SOME, _NONE = Unknown("any"), Unknown("all")  # That all are ignored.


#: Functions along dimensions: the position of these among the arguments, and their default (None: all).
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys("softmax log_softmax softmin cumsum cumprod logsumexp var std amax amin prod argmax argmin "
                    "var_mean std_mean all any is_all_true is_any_true max min median flip".split(), (1, None)),
    **dict.fromkeys("kthvalue quantile norm vector_norm linalg_vector_norm linalg_norm roll".split(), (2, None)),
    **dict.fromkeys("sort argsort glu".split(), (1, -1)),
    **dict.fromkeys("normalize cosine_similarity".split(), (2, 1)), "pairwise_distance": (9, -1), "topk": (2, -1),
}


def along(call: FunctionCall) -> Meaning | None:
    """A function along dimensions: if the batch's is one of them, rows meet."""
    at, default = _ALONG[call.name]
    dims = call.argument(at, "dim", call.kwargs.get("dims", default))
    if isinstance(dims, Tensor):  # torch.max(x, y)
        return each_entry(call)
    if isinstance(dims, bool) or call.name == "flip" and len(call.args) > 2:  # std(unbiased), flip(0, 1)
        return None
    whole = torch.broadcast_tensors(*call.operands)[0]
    rows = call.ledger.joined(call.operands, whole.shape)
    if isinstance(rows, Rows):
        return None if rows.share is not None or 0 in dims_of(whole, dims) else rows
    return VARIED if rows is not None and rows.made else rows


def bound(call: FunctionCall) -> Meaning | None:
    """Entries within bounds; or a count with a minimum."""
    given = [*call.args, *call.kwargs.values()]
    if call.name in ("max", "min") and (len(given) < 2 or not isinstance(given[1], Tensor)):
        return along(call)
    x, *bounds = given[::-1] if isinstance(call.ledger.of(given[0]), Constant) else given
    if call.name in ("clamp", "clamp_min", "clip", "max", "maximum") and len(bounds) == 1 and "max" not in call.kwargs:
        least, count = call.number(bounds[0]), count_of(call.ledger.of(x))
        if least is not None and count is not None:
            return Quotient(None, replace(count, least=max(float(least), count.least or float(least))))
    return each_entry(call)


def matmul(call: FunctionCall) -> Meaning | None:
    """Products of rows with constant weights."""
    x, rows, others = call.args[0], call.meaning, call.operands[1:]
    if not isinstance(rows, Rows):
        return call.joined() if all(isinstance(call.ledger.of(y), Constant) for y in others) else None
    return rows if x.dim() > 1 and all(y.dim() < 3 and call.ledger.of(y) == GIVEN for y in others) else None


def pad(call: FunctionCall) -> Meaning | None:
    """Entries before and after those of the last dimensions, or between those of all but the first two."""
    rows, last = call.meaning, 2 if call.name == "interpolate" else len(call.argument(1, "pad")) // 2
    return rows if not isinstance(rows, Rows) or call.args[0].dim() > last else None


def create(call: FunctionCall) -> Meaning | None:
    """A new tensor: of a single number, of several, or a copy."""
    name, args, read = call.name, call.args, call.ledger.reading.values
    if name in _COPIES and isinstance(args[0], Tensor):
        return call.meaning
    one: Any = args[-1] if args else next(iter(call.kwargs.values()), None)
    one = one[0] if name in (*_COPIES, "new_tensor") and type(one) in (list, tuple) and len(one) == 1 else one
    value = 0.0 if "zeros" in name else 1.0 if "ones" in name else None
    if value is None and "empty" not in name:
        if "like" not in name and not all(isinstance(call.ledger.of(x), Constant) for x in tensors((one,))):
            return None  # torch.tensor([mask.sum()])
        value = None if isinstance(one, Tensor) else call.number(call.kwargs.get("fill_value", one))
        if value is None or call.ledger.may_be_read(value):
            return Unknown(read) if read else None if "full" in name else VARIED
    return Number() if value == 0 and call.out.numel() == 1 else replace(UNIFORM, value=value)


_COPIES = "tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor"


def vary(call: FunctionCall) -> Meaning:
    """Numbers of positions, which begin again in each microbatch; or random ones."""
    plain = call.name == "arange" and len(call.args) == 1 and not {"start", "end", "step"} & {*call.kwargs}
    return replace(VARIED, positions=len(call.out)) if plain else VARIED


def ask(call: FunctionCall) -> Meaning:
    """A condition, which Python asks for each microbatch."""
    reading, meaning = call.ledger.reading, call.meaning
    reading.asked += not isinstance(meaning, Constant)
    some = meaning == _SOME or isinstance(meaning, Number)  # if mask.sum():
    reading.empty |= some and not call.out or meaning == _NONE and bool(call.out)
    return GIVEN


def read(call: FunctionCall) -> Meaning:
    """A value that Python reads."""
    if not isinstance(call.meaning, Constant) and not isinstance(call.out, bool):
        call.ledger.note_read(call.out, call.name)
    return GIVEN


def size(call: FunctionCall) -> Meaning:
    """A size that Python reads."""
    x, meaning, dim = call.args[0], call.meaning, 0 if call.name == "len" else call.argument(1, "dim")
    if isinstance(meaning, Unknown) and meaning.function in _RAGGED and x.dim():
        call.ledger.note_read(call.out, meaning.function)
    elif isinstance(meaning, Rows) and (dim is None or not dim % max(1, x.dim())):
        call.ledger.note_size(x, meaning)
    return GIVEN


#: Where recognition ended at values whose number depends on the batch.
_RAGGED = frozenset(["an entry of a list with one per row", "__getitem__", "nonzero", "argwhere", "unique",
                     "unique_consecutive", "where", "index_select", "bincount"])
#: Rules that say themselves what Unknown arguments mean.
_OF_ANYTHING = frozenset([ask, read, size, create, vary, add, views.index])
#: Rules for which a number of Python is a size or a position, not a factor.
_BY_PLACE = frozenset([views.view, views.index, views.join, views.keep, along, reduce, vary])
_GROUPS: list[tuple[Rule, str]] = [
    (each_entry, "abs absolute acos asin atan atan2 bitwise_and bitwise_or bitwise_xor ceil celu cos cosh digamma elu "
                 "erf erfc erfinv exp exp2 expit expm1 fill floor floor_divide floordiv fmod frac gelu hardsigmoid "
                 "hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid "
                 "logsigmoid logaddexp logical_and logical_or logical_xor logit masked_fill mish mod positive pow "
                 "remainder relu relu6 rpow rsqrt round sgn sigmoid sign silu sin sinh softplus softshrink softsign "
                 "sqrt square tan tanh threshold trunc xlogy and rand or ror xor invert logical_not bitwise_not "
                 "isfinite isinf isnan where"),
    (compare, "eq ne lt gt le ge less greater less_equal greater_equal not_equal"),
    (add, "add radd iadd sub subtract isub rsub"), (multiply, "mul multiply rmul imul neg negative"),
    (divide, "div divide true_divide truediv itruediv idiv rdiv rtruediv reciprocal"),
    (reduce, "sum mean nansum count_nonzero"), (along, " ".join(_ALONG)),
    (bound, "clamp clamp_min clip clamp_max maximum minimum max min"),
    (matmul, "matmul mm linear"), (pad, "pad interpolate"),
    (vary, "arange range linspace logspace randperm eye rand randn randint"),
    (create, "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like "
             f"new_tensor {' '.join(_COPIES)}"),
    (views.keep, "to type type_as float double half bfloat16 long int bool detach clone contiguous requires_grad cpu "
                 "cuda alias data real one_hot rand_like randn_like bernoulli dropout view_as_real"),
    (views.view, "view reshape view_as reshape_as flatten unflatten ravel t transpose swapaxes permute movedim "
                 "adjoint T mT H mH unsqueeze squeeze expand expand_as broadcast_to select narrow unbind split chunk "
                 "broadcast_tensors"),
    (views.join, "stack cat concat concatenate hstack"),
    (views.index, "__getitem__"), (views.write, "__setitem__"),
    (views.gather, "gather"), (views.choose, "masked_select"),
    (ask, "__bool__ equal allclose is_nonzero __contains__"),
    (read, "item tolist __int__ __float__ __index__ __complex__ numpy __array__"),
    (size, "shape size numel nelement len"),
]
RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS for name in names.split()}
#: What a rule may raise for arguments that it doesn't know.
_ODD = AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError


def meanings(call: FunctionCall, count: int) -> list[Meaning]:
    """What each of the ``count`` tensors is that a call has returned, or written to."""
    ledger, rule = call.ledger, RULES.get(call.name)
    operands = [ledger.of(x) for x in call.operands]
    unknown = next((each for each in operands if isinstance(each, Unknown)), None)
    found: Any = unknown
    if rule is None or call.kwargs.get("out") is not None:
        if all(isinstance(each, Constant) for each in operands):
            found = GIVEN if operands and all(each == GIVEN for each in operands) else VARIED
    elif ledger.reading.values and rule not in _BY_PLACE and _has_read(call):
        found = Unknown(ledger.reading.values)
    elif unknown is None or rule in _OF_ANYTHING:
        try:
            found = rule(call)
        except _ODD:
            found = None
    each = found if isinstance(found, list) else [found] * count
    return [Unknown(call.name) if meaning is None else meaning for meaning in each]


def _has_read(call: FunctionCall) -> bool:
    """True if an argument may be computed from values of the batch."""
    numbers = [call.number(x) for x in (*call.args, *call.kwargs.values())]
    whole = isinstance(call.out, Tensor) and call.out.is_floating_point()  # Else it may be a class or a position.
    return any((whole or isinstance(x, float)) and call.ledger.may_be_read(x) for x in numbers if x is not None)
