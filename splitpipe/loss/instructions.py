"""Records functions of numbers of the batch, to compute them again of the batch's sums and means."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from splitpipe.loss import views
from splitpipe.loss.function_call import FunctionCall
from splitpipe.loss.ledger import MAY_COUNT, Aggregate, Constant, Meaning
from splitpipe.loss.numbers import ADDING, CONSTANT, DIVIDING, MEAN, SCALING, Atom, Instruction, Unknown, mapped
from splitpipe.loss.rules import RULES, reduce

#: Functions that are linear in all arguments, or in one.
_LINEAR = frozenset([views.keep, views.view, views.index, views.join, reduce])
_PRODUCTS = SCALING | {"neg", "negative", "dot"}
_QUOTIENTS = DIVIDING - {"rdiv", "rtruediv"}  #: Not 1 / x.
#: Results that differ between microbatches, whatever their arguments are.
_RANDOM = frozenset("dropout bernoulli multinomial normal rand_like randn_like randint_like rrelu".split())
#: Functions that may multiply or divide numbers by those of Python.
_FACTORS = ADDING | SCALING | DIVIDING | {"addcmul", "addcdiv", "lerp"}
#: Functions that repeat numbers, perhaps for each row.
_REPEATING = frozenset("expand broadcast_to repeat tile repeat_interleave".split())


def record(
    call: FunctionCall, function: Callable[..., Any], in_place: bool, results: Sequence[Tensor]
) -> list[Meaning]:
    """What the results of a function are that was called with numbers of the batch, and with constants."""
    name, ledger, numbers = call.name, call.ledger, call.scalars
    known = [each for each in call.meanings if isinstance(each, Aggregate)]
    sums = any([each.sums for each in known])
    unseen = in_place and results[0].requires_grad and not torch.is_grad_enabled()  # By the graph.
    if name in _RANDOM or unseen or call.kwargs.get("out") is not None:
        return [Unknown(name)] * len(results)
    if name in ADDING:  # mask.numel() - mask.sum() counts elements, but 0.5 doesn't.
        numbers = [x for x in numbers if abs(x) >= 1 and x is not call.kwargs.get("alpha")]
    # A mean is only taken to be multiplied or divided by a size itself: loss * len(x)
    size = name in SCALING | DIVIDING and ledger.has_size(*[x for x in numbers if type(x) is int])
    if name in _FACTORS and (sums or size):
        if ledger.may_count(*numbers) or call.kwargs.get("alpha", 1) != 1 and ledger.may_count(call.kwargs["alpha"]):
            return [Unknown(MAY_COUNT)] * len(results)
    live = [x for x in call.operands if getattr(call.of(x), "live", False)]
    severed = any([each.severed or each.live for each in known]) and not any([x.requires_grad for x in results])
    if ledger.scheduled and any([each.severed for each in known]) and not severed:
        return [Unknown(name)] * len(results)
    if live and ledger.scheduled and results and not severed:
        one = len(live) == 1 and (name in _PRODUCTS or name in _QUOTIENTS and call.args[0] is live[0])
        vectors = [x.entry.function for x in known if isinstance(x.entry, Atom) and x.tensor.numel() > 1]
        linear = one or name in ADDING or RULES.get(name) in _LINEAR
        if vectors or not linear:
            return [Unknown([*vectors, name][0])] * len(results)
    if name in SCALING and 0 in numbers:
        return [Aggregate(Atom(CONSTANT, grad=x.requires_grad), x, False, nothing=True) for x in results]
    nodes: dict[int, Aggregate] = {}
    for x in call.operands:
        meaning = call.of(x)
        if isinstance(meaning, Unknown) and name in ADDING and x.numel() == 1 and x.is_floating_point():
            entry = Atom(MEAN, meaning.function, float(ledger.rows), grad=x.requires_grad, unknown=True)
            nodes[id(x)] = Aggregate(entry, x, False, x.requires_grad)
        elif isinstance(meaning, Constant) and (meaning.value is not None or not meaning.made):
            if x.requires_grad:
                nodes[id(x)] = Aggregate(Atom(CONSTANT, "a constant", grad=True), x, False)
        elif isinstance(meaning, Aggregate):
            nodes[id(x)] = meaning
        else:
            return [meaning if isinstance(meaning, Unknown) else Unknown(name)] * len(results)
    quotient = name in DIVIDING and len(known) == 2 and all([each.sums for each in known])  # A sum by a count.
    widest = max([each.tensor.numel() for each in known], default=1)
    made = [x for x in call.operands if getattr(call.of(x), "made", False)]
    repeated = [*made, *(results if name in _REPEATING else [])]
    if not in_place and any([ledger.may_be_rows(x, widest) for x in repeated]):
        return [Unknown(MAY_COUNT)] * len(results)
    args, kwargs = mapped([call.args, call.kwargs], lambda x: nodes.get(id(x), x))
    nothing = not numbers and all([each.nothing for each in known]) and len(known) == len(call.operands)
    return [
        Aggregate(
            Instruction(name, function, args, kwargs, in_place, x.requires_grad, which), x, sums and not quotient,
            x.requires_grad and any([each.live for each in nodes.values()]), nothing=nothing, severed=severed,
        )
        for which, x in enumerate(results)
    ]
