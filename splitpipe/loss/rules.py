"""The list of functions that are recognised: for each, what its result is. Any other function makes it Unknown."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss import views
from splitpipe.loss.arithmetic import A_COUNT, add, count_of, divide, multiply, reduce
from splitpipe.loss.function_call import FunctionCall, Rule, dims_of
from splitpipe.loss.ledger import GIVEN, MAY_COUNT, VARIED, Condition, Constant, Least, Meaning, Rows, tensors
from splitpipe.loss.terms import SUM, Number, Unknown

#: Functions that keep a factor of their arguments.
_SCALING = frozenset("abs relu masked_fill where positive maximum minimum".split())


def each_entry(call: FunctionCall) -> Meaning | None:
    """A function of entries, which broadcasting brings together."""
    rows = call.joined()
    if not isinstance(rows, Rows):
        return rows
    if rows.share is not None and call.name != "masked_fill":
        return None
    return rows if call.name in _SCALING else replace(rows, doubt=0)


#: Functions along dimensions: the position of these among the arguments, and their default (None: all).
_ALONG: dict[str, tuple[int, Any]] = {
    **dict.fromkeys("softmax log_softmax softmin cumsum cumprod logsumexp var std amax amin prod argmax argmin "
                    "var_mean std_mean all any is_all_true is_any_true max min".split(), (1, None)),
    **dict.fromkeys("kthvalue quantile norm vector_norm linalg_vector_norm linalg_norm roll".split(), (2, None)),
    **dict.fromkeys("sort argsort median flip glu".split(), (1, -1)),
    **dict.fromkeys("normalize cosine_similarity".split(), (2, 1)), "pairwise_distance": (9, -1), "topk": (2, -1),
}


def along(call: FunctionCall) -> Meaning | None:
    """A function along dimensions: if the batch's is one of them, rows meet."""
    at, default = _ALONG[call.name]
    dims = call.argument(at, "dim", call.kwargs.get("dims", default))
    extreme = call.name in ("max", "min", "amax", "amin")
    if isinstance(dims, Tensor):
        return each_entry(replace(call, name="maximum"))
    whole, out = torch.broadcast_tensors(*call.operands)[0], next(tensors((call.out,)))
    rows, asked = call.ledger.joined(call.operands, whole.shape), call.meaning
    if not isinstance(rows, Rows):
        plain = isinstance(asked, Condition) and not asked.extreme and call.name in ("any", "all")
        return asked if plain else VARIED if isinstance(rows, Constant) and rows.made else rows
    if 0 not in dims_of(whole, dims):
        return None if rows.share is not None else replace(rows, doubt=0)
    decides = "any" in call.name or "max" in call.name
    plain = not out.dim() and not out.requires_grad and (decides or extreme or "all" in call.name)
    return Condition(decides, extreme) if plain and call.name[:3] != "arg" else None


def compare(call: FunctionCall) -> Meaning | None:
    """A comparison of entries; or a condition, if it is one of numbers that a single microbatch may decide."""
    x, name, meaning = call.args[0], call.name, call.meaning
    value, more = call.number(call.args[1]), call.name[:1] == "g"
    if isinstance(meaning, Condition) and meaning.extreme and isinstance(call.ledger.of(call.args[1]), Constant):
        return Condition(more is meaning.decisive) if name not in ("eq", "ne", "not_equal") else None
    if is_count(meaning) and value is not None and x.numel() == 1:
        if (name, value) in _SOME or (name, value) in _NONE:
            return Condition((name, value) in _SOME)
        return Condition(name == "ne") if name in ("eq", "ne") and value in call.ledger.reading.sizes else None
    return call.joined()


_SOME, _NONE = frozenset([("gt", 0), ("ne", 0), ("ge", 1)]), frozenset([("eq", 0), ("le", 0), ("lt", 1)])


def is_count(meaning: Meaning) -> bool:
    """True for the sum of a mask."""
    one = meaning.terms[0] if isinstance(meaning, Number) and len(meaning.terms) == 1 else None
    return one is not None and one.kind is SUM and one.factor == 1 and one.function in (A_COUNT, "count_nonzero")


def invert(call: FunctionCall) -> Meaning | None:
    """The opposite, of entries or of a condition."""
    meaning = call.meaning
    return Condition(not meaning.decisive) if _is_plain(meaning) else each_entry(call)  # type: ignore[union-attr]


def _is_plain(meaning: Meaning) -> bool:
    return isinstance(meaning, Condition) and not meaning.extreme


def check(call: FunctionCall) -> Meaning | None:
    """Whether values are finite, which one microbatch may decide."""
    plain = isinstance(call.meaning, Number) and not call.out.dim()
    return Condition(call.name != "isfinite") if plain else each_entry(call)


def choose(call: FunctionCall) -> Meaning | None:
    """Entries chosen one by one."""
    return each_entry(call) if len(call.args) == 3 else None


def bound(call: FunctionCall) -> Meaning | None:
    """Entries within bounds; or a count with a minimum."""
    given = [*call.args, *call.kwargs.values()]
    if call.name in ("max", "min") and (len(given) < 2 or not isinstance(given[1], Tensor)):
        return along(call)
    x, *bounds = given[::-1] if isinstance(call.ledger.of(given[0]), Constant) else given
    if call.name in ("clamp", "clamp_min", "clip", "max", "maximum") and len(bounds) == 1 and "max" not in call.kwargs:
        least, count = call.number(bounds[0]), count_of(call.ledger.of(x))
        if least is not None and count is not None and x.numel() == 1:
            return Least(replace(count, least=float(least)))
    return each_entry(call)


def matmul(call: FunctionCall) -> Meaning | None:
    """Products of rows with constant weights."""
    x, rows = call.args[0], call.meaning
    if not all(isinstance(call.ledger.of(y), Constant) for y in call.operands[1:]):
        return None
    if not isinstance(rows, Rows):
        return call.joined()
    plain = x.dim() > 1 and all(y.dim() < 3 and call.ledger.of(y) == GIVEN for y in call.operands[1:])
    return replace(rows, doubt=0) if plain else None


def pad(call: FunctionCall) -> Meaning | None:
    """Entries before and after those of the last dimensions, or between those of all but the first two."""
    rows, last = call.meaning, 2 if call.name == "interpolate" else len(call.argument(1, "pad")) // 2
    return rows if not isinstance(rows, Rows) or call.args[0].dim() > last else None


def create(call: FunctionCall) -> Meaning | None:
    """A new tensor: of a single number, of several, or a copy."""
    name, args, out = call.name, call.args, call.out
    if name in _COPIES and isinstance(args[0], Tensor):
        return call.meaning
    one: Any = args[-1] if args else next(iter(call.kwargs.values()), None)
    one = one[0] if name in (*_COPIES, "new_tensor") and type(one) in (list, tuple) and len(one) == 1 else one
    value = 0.0 if "zeros" in name else 1.0 if "ones" in name else None
    if value is None and "empty" not in name:
        value = None if isinstance(one, Tensor) else call.number(call.kwargs.get("fill_value", one))
        read = call.ledger.reading.values
        if value is None or call.ledger.may_be_read(value):
            return Unknown(read) if read else None if "full" in name else VARIED
    return Number() if value == 0 and out.numel() == 1 else Constant(True, True, value)


_COPIES = "tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor"


def positions(call: FunctionCall) -> Meaning:
    """Numbers of positions, which begin again in each microbatch; or random ones."""
    args, plain = call.args, call.name == "arange" and call.kwargs.get("step", 1) == 1
    start = args[0] if len(args) > 1 else call.kwargs.get("start", 0)
    return Constant(True, positions=call.out.numel() if plain and start == 0 and len(args) < 3 else None)


def ask(call: FunctionCall) -> Meaning:
    """A condition that Python asks."""
    reading, meaning = call.ledger.reading, call.meaning
    meaning = Condition(True) if is_count(meaning) else meaning
    if isinstance(meaning, Condition) and not meaning.extreme:
        reading.answers += (bool(call.out) is meaning.decisive,)
    elif any(not isinstance(call.ledger.of(x), Constant) and call.ledger.of(x) != _SIZE for x in call.operands):
        function = meaning.function if isinstance(meaning, Unknown) else call.name
        reading.condition = reading.condition or f"if ({function})"
    return GIVEN


_SIZE = Unknown(MAY_COUNT)  # Conditions on sizes are those of any microbatch.


def read(call: FunctionCall) -> Meaning:
    """A value that Python reads."""
    if _is_plain(call.meaning):
        return ask(call)
    if not isinstance(call.meaning, Constant):
        call.ledger.note_read(call.out if isinstance(call.out, (int, float)) else 1, call.name)
    return GIVEN


def size(call: FunctionCall) -> Meaning:
    """A size that Python reads."""
    x, meaning, dim = call.args[0], call.meaning, 0 if call.name == "len" else call.argument(1, "dim")
    if isinstance(meaning, Unknown) and meaning.function in _RAGGED and x.dim():
        call.ledger.note_read(call.out if isinstance(call.out, int) else 1, meaning.function)
    elif isinstance(meaning, Rows) and (dim is None or not dim % max(1, x.dim())):
        call.ledger.note_size(x, meaning)
    return GIVEN


#: Where recognition ended at values whose number depends on the batch.
_RAGGED = frozenset(["an entry of a list with one per row", "__getitem__", "nonzero", "argwhere", "unique", "where"])
#: Rules that say themselves what Unknown arguments mean.
_OF_ANYTHING = frozenset([ask, read, size, create, positions, add])
#: Rules for which a number of Python is a size or a position, not a factor.
_BY_PLACE = frozenset([views.view, views.index, views.join, views.keep, along, reduce, positions])
_GROUPS: list[tuple[Rule, str]] = [
    (each_entry, "abs absolute acos asin atan atan2 bitwise_and bitwise_or bitwise_xor ceil celu cos cosh digamma elu "
                 "erf erfc erfinv exp exp2 expit expm1 fill floor floor_divide floordiv fmod frac gelu hardsigmoid "
                 "hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid "
                 "logsigmoid logaddexp logical_and logical_or logical_xor logit masked_fill mish mod positive pow "
                 "remainder relu relu6 rpow rsqrt round sgn sigmoid sign silu sin sinh softplus softshrink softsign "
                 "sqrt square tan tanh threshold trunc xlogy and rand or ror xor"),
    (add, "add radd iadd sub subtract isub rsub"), (multiply, "mul multiply rmul imul neg negative"),
    (divide, "div divide true_divide truediv itruediv idiv rdiv rtruediv reciprocal"),
    (reduce, "sum mean nansum count_nonzero"), (along, " ".join(_ALONG)),
    (bound, "clamp clamp_min clip clamp_max maximum minimum max min"),
    (compare, "eq ne lt gt le ge less greater less_equal greater_equal not_equal"),
    (check, "isfinite isinf isnan"),
    (invert, "invert logical_not bitwise_not"), (choose, "where nan_to_num"),
    (matmul, "matmul mm linear"), (pad, "pad interpolate"),
    (positions, "arange range linspace logspace randperm eye rand randn randint"),
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
    elif rule not in _BY_PLACE and _has_read(call):
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
