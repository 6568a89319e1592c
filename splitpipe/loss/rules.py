"""Rules for torch's functions that make numbers or are linear in them: what their results consist of.

A rule is called after its function, and returns what the result consists of; ``arithmetic.before`` may change the
arguments first.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss.arithmetic import (
    DIVISIONS,
    add,
    axes_of,
    divide,
    in_place,
    multiply,
    negative,
    number_of,
    one_row,
    reduce,
    single,
)
from splitpipe.loss.counts import counted
from splitpipe.loss.facts import CONSTANT, ROWS, Facts, Made, Row, Share, Stack, is_constant, tensors, term
from splitpipe.loss.indexing import apart, indexed, listed, moved, places, selected, set_entries
from splitpipe.loss.products import einsum, matmul
from splitpipe.loss.quotients import tensor_of, undivided
from splitpipe.loss.terms import CONSTANT as A_CONSTANT
from splitpipe.loss.terms import SUM, Number, Unknown

Rule = Callable[[Facts, str, Sequence[Any], dict[str, Any], Any], "Made | None"]


def _unsqueeze(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    if facts.of(x) is ROWS and x.dim() and dim % out.dim() <= facts.axis(x):
        facts.turn(out, facts.axis(x) + 1)
    return _same(facts, name, args, kwargs, out)


def _reshaped(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """A reshaped tensor: the rows are in the dimension into which theirs went."""
    x = args[0]
    if facts.of(x) is ROWS and x.dim() and out.dim() and (facts.axis(x) or out.shape[0] < facts.rows == x.shape[0]):
        before, dims = math.prod(x.shape[: facts.axis(x)]), range(out.dim())
        facts.turn(out, max(dim for dim in dims if math.prod(out.shape[:dim]) <= before))
    return _same(facts, name, args, kwargs, out)


def _expanded(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """A tensor that is repeated along dimensions, of which there may be more now."""
    x = args[0]
    if facts.of(x) is ROWS and x.dim() and out.dim() > x.dim():
        facts.turn(out, facts.axis(x) + out.dim() - x.dim())
    return _same(facts, name, args, kwargs, out) if "expand" in name else facts.other(name, [x], out)


def _fitted(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Tensors that are broadcast to one shape; those that have it stay what they are."""
    given = list(tensors(args))
    for x, each in zip(given, out):
        made = facts.of(x) if x.shape == each.shape else facts.other(name, given, each)
        facts.put(each, CONSTANT if is_constant(made) else made)
    return None


def _same(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """The same values in another shape, dtype or place."""
    made = facts.of(args[0])
    if isinstance(made, Number):
        if name == "detach":
            return made.detached()
        return single(made, out, name) if out.numel() > 1 else made
    if isinstance(made, Stack) and out.shape != args[0].shape:
        return Unknown(name)
    return made


def _finite(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """The same values with 0 in place of NaN, as where nothing counts."""
    made, nan = _same(facts, name, args, kwargs, out), args[1] if len(args) > 1 else kwargs.get("nan")
    if not isinstance(made, Number) or nan:
        return made
    return replace(made, terms=tuple([
        t if t.divisor is None else replace(t, divisor=replace(t.divisor, safe=True)) for t in made.terms
    ]))


def _together(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Rows that are joined make a batch again; numbers make a Stack."""
    parts = list(tensors(args[:1]))
    made = [facts.of(x) for x in parts]
    if name != "stack" and any(isinstance(each, (Number, Stack)) for each in made):
        parts = [x for x in parts if x.numel()] or parts
        made = [facts.of(x) for x in parts]
        if len(parts) == 1:
            return _same(facts, name, parts, {}, out)  # Joined with nothing.
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if any(isinstance(each, Row) for each in made) and all(isinstance(each, Row) or is_constant(each) for each in made):
        row = one_row(made)
        if row is not None and len(parts) > 1 and facts.rows > 1 and all(isinstance(each, Row) for each in made):
            return row  # Parts of one image.
        if isinstance(dim, int) and out.dim() and (row is None or len(parts) == 1):
            facts.turn(out, dim % out.dim())
        return ROWS
    if facts.by_row and len(parts) == facts.rows and all(isinstance(each, Number) and not each.terms for each in made):
        return ROWS  # Each row has a 0.
    if any(isinstance(each, Number) for each in made) and all(x.numel() == 1 for x in parts):
        numbers = [
            Number((term(x, A_CONSTANT),)) if each is CONSTANT else number_of(facts, x) for x, each in zip(parts, made)
        ]
        known = tuple([each for each in numbers if isinstance(each, Number) and each.least is None])
        return Stack(known) if len(known) == len(parts) else facts.other(name, parts, out)
    if "cat" in name and dim == 0 and all(each is ROWS and facts.axis(x) == 0 for x, each in zip(parts, made)):
        if all(x.shape[0] == facts.rows for x in parts):
            facts.reading.joined.add(out.shape[0])
    if name == "stack" and ROWS in made and parts[0].dim() and isinstance(dim, int):
        axis = facts.axis(parts[made.index(ROWS)])
        facts.turn(out, axis + 1 if dim % out.dim() <= axis else axis)
    return facts.other(name, parts, out)


def _turned(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Permuted dimensions."""
    x, given = args[0], [*args[1:], *kwargs.values()]
    if facts.of(x) is ROWS and x.dim() > 1:
        order = list(range(x.dim()))
        if name == "permute":
            order = [dim % x.dim() for dim in (given[0] if isinstance(given[0], (tuple, list)) else given)]
        elif name in ("t", "adjoint") or len(given) < 2:
            order[-1], order[-2] = order[-2], order[-1]
        else:
            one, other = given[0] % x.dim(), given[1] % x.dim()
            order[one], order[other] = order[other], order[one]
        facts.turn(out, order.index(facts.axis(x)))
    return facts.other(name, [x], out)


def _clamp(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    given = [*args, *kwargs.values()]
    made = [facts.of(x) for x in given]
    read = [isinstance(each, Number) and [t.function for t in each.terms] == ["a number's tensor"] for each in made]
    numbers = [each for each, plain in zip(made, read) if isinstance(each, Number) and not plain]
    bounds = [x for x, each, plain in zip(given, made, read) if each is CONSTANT or plain]
    plain = len(given) == 2 and not kwargs.keys() - {"min", "other"}
    if plain and len(numbers) == len(bounds) == 1 and numbers[0].least is None:
        return replace(numbers[0], least=bounds[0])
    return _along(facts, name, args, kwargs, out)


def _where(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """A choice between two numbers, one of which is 0."""
    if len(args) < 3 or not isinstance(out, Tensor):
        for each in tensors((out,)):
            facts.put(each, facts.other(name, list(tensors([*args, *kwargs.values()])), each))
        return None
    condition = facts.of(args[0])
    if isinstance(condition, Unknown):
        return condition
    made = [each for each in map(facts.of, args[1:3]) if isinstance(each, Number) and any(t.factor for t in each.terms)]
    others = [x for x in args[1:3] if facts.of(x) is CONSTANT or isinstance(facts.of(x), Number)]
    return made[0] if len(made) == 1 and len(others) == 2 else facts.other(name, args, out)


def _compare(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    made = facts.of(args[0])
    if isinstance(made, Number) and len(args) > 1:
        return facts.compared(made, name, args[1])
    if isinstance(made, Row) and not args[0].dim() and type(args[1]) is int and args[0] <= args[1]:
        facts.of_rows.taken(made.row, args[1])
    return facts.other(name, [*args, *kwargs.values()], out)


def _asked(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Whether any or all are true: a condition, rather than a part of a number."""
    return CONSTANT if not out.dim() else facts.other(name, args, out)


def _truth(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    facts.asked += 1
    made = facts.of(args[0])
    if isinstance(made, Unknown) and made.function in _COMPARISONS:
        facts.condition = facts.condition or f"if ({made.function})"
    return None


def _read(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    made = facts.of(args[0])
    facts.reading.arrays = facts.reading.arrays or made is not CONSTANT and not isinstance(out, (int, float))
    facts.read(out if isinstance(out, (int, float)) else 0, made, name != "item")
    return None


def _size(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    facts.sized(args[0], name == "__len__")
    return None


def _attribute(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """An attribute that is read: a shape, or a tensor such as x.T."""
    if isinstance(out, torch.Size):
        facts.sized(args[0], False)
    elif isinstance(out, Tensor) and out.dim() > 1 and out.shape != args[0].shape and facts.of(args[0]) is ROWS:
        return _turned(facts, "t", args, kwargs, out)
    return _same(facts, "detach", args, kwargs, out) if isinstance(out, Tensor) else None


def _gradient(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Gradients of a sum over rows belong to the rows, as in a gradient penalty."""
    starts = list(tensors([args[0]]))
    inputs = list(tensors([args[1] if len(args) > 1 else kwargs["inputs"]]))
    plain = all(each is ROWS or isinstance(each, Number) and undivided(each) for each in map(facts.of, starts))
    for x, found in zip(inputs, tensors([out])):
        facts.put(found, ROWS if plain and facts.of(x) is ROWS else Unknown(name))
    return None


def _couples(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """Functions in which rows meet, or are added up by class."""
    given = list(tensors([*args, *kwargs.values()]))
    meet = any(facts.of(x) is ROWS for x in given) and not ("svd" in name and facts.axis(given[0]) < given[0].dim() - 2)
    for each in tensors((out,)):
        facts.put(each, Unknown(name) if meet else facts.other(name, given, each))
    return None


def _new(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """A new tensor of given values: a single 0 may be the start of a sum."""
    one: Any = args[-1][0] if type(args[-1]) is list and len(args[-1]) == 1 else args[-1]
    given = name in ("tensor", "as_tensor", "new_tensor", "scalar_tensor") and isinstance(one, (int, float))
    count = counted(facts, one)
    if count is not None and (given or "full" in name):
        made = tensor_of(count)
        if out.numel() == 1:
            return made
        if isinstance(made, Share) and not out.shape[0] % facts.rows:
            return Share(made.divisor, True)
    if given and one is args[-1] and (one > 1 or facts.sizes.has(one)):
        # A count that Python has read is also one as a tensor. A small one is a constant: a scale of 1.0.
        divisor = facts.divisor(float(one), Number(()), small=False)
        if divisor is not None:
            return divisor if isinstance(divisor, Unknown) else Number((term(out, SUM, None, "a number's tensor"),))
    several = out.numel() > 1 or "ones" in name or "full" in name
    if out.dim() and several and not out.shape[0] % facts.rows and not name.endswith("like"):
        sizes = [] if "tensor" in name else list(args[1:] if name.startswith("new_") else args)
        size = sizes[0][0] if sizes and isinstance(sizes[0], (tuple, list)) else next(iter(sizes), None)
        if "tensor" in name:
            listed(facts, out)
        if not facts.sizes.is_other(size) or size in facts.reading.plain:
            return ROWS  # As many as there are rows: for example, a mask.
    zero = "zeros" in name or given and one == 0
    if zero and out.numel() == 1 and (out.dim() == 0 or not name.endswith("like")):
        return Number(())
    if name.endswith("like") and isinstance(facts.of(args[0]), Number):
        return CONSTANT
    return facts.other(name, args, out) if name.endswith("like") or name == "as_tensor" else CONSTANT


#: Functions that work along a dimension: its position among their arguments, and its default (None: all).
_ALONG = {
    **dict.fromkeys("softmax log_softmax cumsum cumprod logsumexp var std amax amin max min prod argmax argmin "
                    "var_mean std_mean all any logcumsumexp softmin".split(), (1, None)),
    **dict.fromkeys("topk kthvalue quantile nanquantile".split(), (2, -1)),
    **dict.fromkeys("sort argsort median nanmedian mode msort".split(), (1, -1)),
    "norm": (2, None), "normalize": (2, 1), "renorm": (2, None), "vector_norm": (2, None),
    "linalg_vector_norm": (2, None), "linalg_norm": (2, None),
}


def _along(facts: Facts, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Made | None:
    """A nonlinear function along a dimension: if that is the batch's, rows meet."""
    given = list(tensors([*args, *kwargs.values()]))
    at, default = _ALONG.get(name, (1, None))
    dims = args[at] if len(args) > at else kwargs.get("dim", default)
    meet = name in _ALONG and dims is not None and not isinstance(dims, Tensor) and bool(given) and (
        given[0].dim() > 0 and facts.of(given[0]) is ROWS and facts.axis(given[0]) in axes_of(given[0], dims)
    )
    for each in tensors((out,)):
        facts.put(each, Unknown(name) if meet else facts.other(name, given, each))
    return None


_COMPARISONS = frozenset("lt gt le ge __lt__ __gt__ __le__ __ge__ less greater less_equal greater_equal".split())
_GROUPS: list[tuple[Rule, str]] = [
    (_same, "float to double half bfloat16 type type_as clone detach squeeze "
            "contiguous requires_grad_ cpu cuda alias long int"),
    (_finite, "nan_to_num nan_to_num_"), (_fitted, "broadcast_tensors"),
    (_expanded, "expand expand_as broadcast_to repeat tile"),
    (_reshaped, "view reshape view_as reshape_as flatten unflatten ravel"), (einsum, "einsum"),
    (_unsqueeze, "unsqueeze"), (negative, "neg negative neg_ negative_ __neg__"),
    (add, "add add_ __radd__ __iadd__ __add__ sub sub_ subtract subtract_ __sub__ __isub__ rsub __rsub__"),
    (multiply, "mul mul_ multiply multiply_ __mul__ __rmul__ __imul__"),
    (divide, f"reciprocal {' '.join(DIVISIONS)}"),
    (reduce, "sum mean nansum nanmean count_nonzero"),
    (matmul, "matmul __matmul__ __rmatmul__ mm mv bmm linear cdist dot vdot inner"),
    (indexed, "__getitem__"), (places, "nonzero argwhere"), (set_entries, "__setitem__"),
    (apart, "unbind split chunk tensor_split"),
    (_together, "stack cat concat concatenate hstack vstack"),
    (_along, " ".join(_ALONG)),
    (_turned, "t transpose swapaxes swapdims permute adjoint"),
    (_clamp, "clamp clamp_min clip maximum max clamp_ clamp_min_"),
    (_where, "where"),
    (_compare, f"eq ne __eq__ __ne__ {' '.join(_COMPARISONS)}"),
    (_asked, "any all"), (_truth, "__bool__"),
    (_read, "item tolist __int__ __float__ __index__ numpy __array__"),
    (_size, "size numel nelement __len__"),
    (_attribute, "__get__"), (_gradient, "grad"),
    (_couples, "bincount histc unique scatter_add scatter_add_ index_add index_add_ scatter_reduce scatter_reduce_ cov "
               "corrcoef pdist tensordot diff cummax cummin aminmax batch_norm instance_norm trace outer ger kron "
               "addmm addbmm baddbmm meshgrid take take_along_dim linalg_svd linalg_svdvals svd"),
    (selected, "narrow index_select gather"),
    (moved, "roll flip flipud"),
    (_new, "ones full empty scalar_tensor zeros zeros_like ones_like full_like tensor as_tensor new_zeros new_ones "
           "new_full new_empty new_tensor"),
]
RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS for name in names.split()}
#: Functions whose arguments ``arithmetic.before`` looks at.
LOOKED_AT = frozenset(name for name in RULES if name in DIVISIONS or in_place(name))
