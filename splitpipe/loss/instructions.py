"""Records functions of numbers of the batch, to compute them again of the batch's sums and means."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from splitpipe.loss.function_call import FunctionCall
from splitpipe.loss.ledger import MAY_COUNT, Aggregate, Constant, Meaning
from splitpipe.loss.numbers import ADDING, CONSTANT, DIVIDING, SCALING, Atom, Instruction, Unknown, mapped

#: Results that differ between microbatches, whatever their arguments are.
_RANDOM = frozenset("dropout bernoulli multinomial normal rand_like randn_like randint_like rrelu".split())


def record(
    call: FunctionCall, function: Callable[..., Any], in_place: bool, results: Sequence[Tensor]
) -> list[Meaning]:
    """What the results of a function are that was called with numbers of the batch, and with constants."""
    name, ledger, numbers = call.name, call.ledger, call.numbers
    known = [each for each in call.meanings if isinstance(each, Aggregate)]
    sums = any([each.sums for each in known])
    if name in _RANDOM or call.kwargs.get("out") is not None:
        return [Unknown(name)] * len(results)
    if name in ADDING:  # mask.numel() - mask.sum() counts elements, but 0.5 doesn't.
        numbers = [x for x in numbers if abs(x) >= 1 and x is not call.kwargs.get("alpha")]
    size = name in SCALING and ledger.has_size(*[x for x in numbers if type(x) is int])  # loss * len(x)
    if name in ADDING | SCALING | DIVIDING and (sums or size):
        if ledger.counts(*numbers) or call.kwargs.get("alpha", 1) != 1 and ledger.counts(call.kwargs["alpha"]):
            return [Unknown(MAY_COUNT)] * len(results)
    if name in SCALING and 0 in numbers:
        return [Aggregate(Atom(CONSTANT, "0", grad=x.requires_grad), x, False, nothing=True) for x in results]
    nodes: dict[int, Aggregate] = {}
    for x in call.operands:
        meaning = call.of(x)
        if isinstance(meaning, Constant) and (meaning.value is not None or not meaning.made):
            if x.requires_grad:
                nodes[id(x)] = Aggregate(Atom(CONSTANT, "a constant", grad=True), x, False)
        elif isinstance(meaning, Aggregate):
            nodes[id(x)] = meaning
        else:
            return [meaning if isinstance(meaning, Unknown) else Unknown(name)] * len(results)
    args, kwargs = mapped([call.args, call.kwargs], lambda x: nodes.get(id(x), x))
    nothing = not numbers and all([each.nothing for each in known]) and len(known) == len(call.operands)
    return [
        Aggregate(Instruction(name, function, args, kwargs, in_place, x.requires_grad, which), x, sums, nothing=nothing)
        for which, x in enumerate(results)
    ]
