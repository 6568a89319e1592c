"""The list of functions that are recognised: for each, what its result is. Any other function makes it Unknown."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss import views
from splitpipe.loss.function_call import FunctionCall, Rule, dims_of
from splitpipe.loss.ledger import GIVEN, MAY_COUNT, UNIFORM, VARIED, Aggregate, Constant, Meaning, Rows
from splitpipe.loss.numbers import SCALING, Atom, Instruction, Unknown, tensors, weighted


def each_entry(call: FunctionCall) -> Meaning | None:
    """A function of entries, which broadcasting brings together."""
    rows, filled = call.joined(), call.name in ("where", "masked_fill", "fill")
    factors = call.scalars if filled else [call.kwargs.get("alpha")]
    counting = call.ledger.may_count(*factors) or call.ledger.has_size(*[x for x in call.scalars if type(x) is float])
    return replace(rows, counting=True) if counting and isinstance(rows, Rows) else rows


def multiply(call: FunctionCall) -> Meaning | None:
    """A product or quotient of entries, of which some may be numbers that count rows."""
    joined, values = call.joined(), [x for x in map(call.scalar, call.args) if x is not None]
    if isinstance(joined, Rows):
        return replace(joined, counting=True) if call.ledger.may_count(*values) else joined
    if joined == UNIFORM and len(values) == 2:
        x, y = values[::-1] if call.name in ("rdiv", "rtruediv") else values
        return replace(UNIFORM, value=x * y if call.name in SCALING else x / y)
    return Unknown(MAY_COUNT) if joined is not None and call.ledger.has_size(*values) else joined


def divide(call: FunctionCall) -> Meaning | None:
    """As ``multiply``; or entries divided by a count, such as weights by their sum."""
    above, below = call.meaning, call.of(call.args[-1])
    if not isinstance(above, Rows) or not isinstance(below, Aggregate) or call.kwargs:
        return multiply(call)
    severed = below.severed and call.ledger.scheduled
    plain = not severed and not below.tensor.requires_grad and below.tensor.numel() == 1
    return replace(above, share=below) if plain and above.share is None and not above.counting else None


def reduce(call: FunctionCall) -> Meaning | None:
    """Sums and means, over some dimensions or all."""
    x, meaning, mean = call.args[0], call.meaning, "mean" in call.name
    dims = dims_of(x, call.argument(1, "dim", call.kwargs.get("axis"))) or [0]  # Of a single row.
    if isinstance(meaning, Constant):
        if not mean and meaning.made and 0 in dims and meaning.value != 0 and x.dim() and not len(x) % call.ledger.rows:
            return Unknown(MAY_COUNT)  # torch.ones_like(output).sum()
        return replace(meaning, value=meaning.value if mean else None, positions=None)
    if not isinstance(meaning, Rows) or 0 not in dims:
        return meaning if isinstance(meaning, Rows) else None
    if meaning.counting and not mean:
        return Unknown(MAY_COUNT)
    if meaning.share is not None and "sum" not in call.name:
        return None
    if meaning.share is not None:
        total = call.ledger.atom(weighted(call.out, meaning.share.tensor), call.name, meaning)
        quotient = Instruction("div", torch.div, (total, meaning.share), {}, False, call.out.requires_grad, 0)
        return Aggregate(quotient, call.out, not meaning.share.sums)
    return call.ledger.atom(call.out, call.name, meaning, float(x.shape[0] if x.dim() else 1) if mean else None)


def add_up(call: FunctionCall) -> Meaning | None:
    """Sums of entries for each place, as in torch.zeros(n).scatter_add(0, places, entries)."""
    _, dim, places, entries = call.args
    rows, by = call.of(entries), call.of(places)
    if call.meaning != replace(UNIFORM, value=0.0) or dim or places.dim() != 1 or not isinstance(rows, Rows):
        return None
    plain = isinstance(by, Rows) and by.alike(rows) and not rows.counting
    return call.ledger.atom(call.out, call.name, rows) if plain else None


def histogram(call: FunctionCall) -> Meaning | None:
    """Numbers of entries within fixed bounds."""
    rows, bounds = call.meaning, [call.argument(2, "min"), call.argument(3, "max")]
    return call.ledger.atom(call.out, call.name, rows) if isinstance(rows, Rows) and None not in bounds else None


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
    dims = call.argument(at, "dim", call.kwargs.get("dims", call.kwargs.get("other", default)))
    if isinstance(dims, Tensor):  # torch.max(x, y)
        return each_entry(call)
    if isinstance(dims, bool) or call.name == "flip" and len(call.args) > 2:  # std(unbiased), flip(0, 1)
        return None
    whole = torch.broadcast_tensors(*call.operands)[0]
    rows = call.joined(shape=whole.shape)
    if isinstance(rows, Rows):
        return None if 0 in dims_of(whole, dims) else rows
    return VARIED if rows is not None and rows.made else rows


def matmul(call: FunctionCall) -> Meaning | None:
    """Products of rows with constant weights."""
    x, rows, others = call.args[0], call.meaning, call.operands[1:]
    if not isinstance(rows, Rows):
        return call.joined() if all([isinstance(call.of(y), Constant) for y in others]) else None
    return rows if x.dim() > 1 and all([y.dim() < 3 and call.of(y) == GIVEN for y in others]) else None


def pad(call: FunctionCall) -> Meaning | None:
    """Entries before and after those of the last dimensions, or between those of all but the first two."""
    rows, last = call.meaning, 2 if call.name == "interpolate" else len(call.argument(1, "pad")) // 2
    if not isinstance(rows, Rows):
        return rows
    if call.args[0].dim() <= last:
        return None
    return replace(rows, counting=True) if call.ledger.has_size(call.argument(3, "value", 0.0)) else rows


def create(call: FunctionCall) -> Meaning | None:
    """A new tensor: of a single number, of several, or a copy."""
    name, args, read = call.name, call.args, call.ledger.host_reads.values
    if name in _COPIES and isinstance(args[0], Tensor):
        return call.meaning
    one: Any = args[-1] if args else next(iter(call.kwargs.values()), None)
    one = one[0] if name in (*_COPIES, "new_tensor") and type(one) in (list, tuple) and len(one) == 1 else one
    value = 0.0 if "zeros" in name else 1.0 if "ones" in name else None
    if value is None and "empty" not in name:
        if "like" not in name and not all([isinstance(call.of(x), Constant) for x in tensors((one,))]):
            return None  # torch.tensor([mask.sum()])
        value = None if isinstance(one, Tensor) else call.scalar(call.kwargs.get("fill_value", one))
        if value is None or call.ledger.is_read(value):
            return Unknown(read) if read else None if "full" in name else VARIED
    return replace(UNIFORM, value=value)


_COPIES = "tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor"


def vary(call: FunctionCall) -> Meaning:
    """Numbers of positions, which begin again in each microbatch; or random ones."""
    plain = call.name == "arange" and len(call.args) == 1 and not {"start", "end", "step"} & {*call.kwargs}
    return replace(VARIED, positions=len(call.out)) if plain else VARIED


def ask(call: FunctionCall) -> Meaning:
    """A condition, which Python asks for each microbatch; it may be whether anything counts."""
    reading, meaning = call.ledger.host_reads, call.meaning
    reading.asked += not isinstance(meaning, Constant)
    some, none = meaning == Unknown("any"), meaning == Unknown("all")  # mask.any(); that all are ignored.
    if isinstance(meaning, Aggregate):
        name, args = getattr(meaning.entry, "name", ""), [*getattr(meaning.entry, "args", ()), None, None]
        zero = not isinstance(args[1], Tensor) and args[1] == 0
        none = zero and name in ("eq", "le")
        some = zero and name in ("gt", "ne") or isinstance(meaning.entry, Atom)  # if mask.sum():
    reading.empty |= some and not call.out or none and bool(call.out)
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
#: Rules that answer Python, or make a tensor, also of numbers.
NOT_RECORDED = frozenset([ask, read, size, create])
#: Rules that say themselves what Unknown arguments mean.
_OF_ANYTHING = frozenset([*NOT_RECORDED, vary, views.index])
#: Rules for which a number of Python is a size or a position, not a factor.
BY_PLACE = frozenset([views.view, views.index, views.join, views.keep, along, reduce, vary])
#: Rules that are linear in entries, so that these may have been divided by a count.
_LINEAR = frozenset([multiply, divide, reduce, views.view, views.keep, views.index, views.gather, views.choose, size])
_GROUPS: list[tuple[Rule, str]] = [
    (each_entry, "abs absolute acos asin atan atan2 bitwise_and bitwise_or bitwise_xor ceil celu cos cosh digamma elu "
                 "erf erfc erfinv exp exp2 expit expm1 fill floor floor_divide floordiv fmod frac gelu hardsigmoid "
                 "hardswish hardtanh leaky_relu lgamma log log10 log1p log2 log_sigmoid "
                 "logsigmoid logaddexp logical_and logical_or logical_xor logit masked_fill mish mod positive pow "
                 "remainder relu relu6 rpow rsqrt round sgn sigmoid sign silu sin sinh softplus softshrink softsign "
                 "sqrt square tan tanh threshold trunc xlogy and rand or ror xor invert logical_not bitwise_not "
                 "isfinite isinf isnan where neg negative "
                 "eq ne lt gt le ge less greater less_equal greater_equal not_equal "
                 "add radd iadd sub subtract isub rsub clamp clamp_min clip clamp_max maximum minimum"),
    (multiply, "mul multiply rmul imul rdiv rtruediv reciprocal"),
    (divide, "div divide true_divide truediv itruediv idiv"),
    (reduce, "sum mean nansum count_nonzero"), (along, " ".join(_ALONG)),
    (add_up, "scatter_add"), (histogram, "histc"), (matmul, "matmul mm linear"), (pad, "pad interpolate"),
    (vary, "arange range linspace logspace randperm eye rand randn randint"),
    (create, "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like "
             f"new_tensor {' '.join(_COPIES)}"),
    (views.keep, "to type type_as float double half bfloat16 long int bool detach clone contiguous requires_grad cpu "
                 "cuda alias data real one_hot rand_like randn_like bernoulli dropout view_as_real"),
    (views.view, "view reshape view_as reshape_as flatten unflatten ravel t transpose swapaxes permute movedim "
                 "adjoint T mT H mH unsqueeze squeeze expand expand_as broadcast_to select narrow unbind split chunk "
                 "broadcast_tensors repeat_interleave"),
    (views.join, "stack cat concat concatenate hstack"),
    (views.index, "__getitem__"), (views.write, "__setitem__"),
    (views.gather, "gather scatter"), (views.choose, "masked_select"),
    (ask, "__bool__ equal allclose is_nonzero __contains__"),
    (read, "item tolist __int__ __float__ __index__ __complex__ numpy __array__"),
    (size, "shape size numel nelement len"),
]
RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS for name in names.split()}
#: What a rule may raise for arguments that it doesn't know.
_ODD = AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError


def meaning_of(call: FunctionCall) -> Any:
    """What a call's result is, or several of them, by a rule for its arguments: numbers aren't among them."""
    rule, operands = RULES.get(call.name), call.meanings
    unknown = next((each for each in operands if isinstance(each, Unknown)), None) if Unknown in call.kinds else None
    if rule is None:
        if not call.kinds <= {Constant}:
            return unknown
        return GIVEN if operands and all([each == GIVEN for each in operands]) else VARIED
    if rule not in _LINEAR and any([type(each) is Rows and each.share is not None for each in operands]):
        return None
    if unknown is not None and rule not in _OF_ANYTHING:
        return unknown
    try:
        return rule(call)
    except _ODD:
        return None
