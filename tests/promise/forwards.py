"""Modules whose forward does what those of helpers/randomized_models.py do not: hooks, modes, odd arguments."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.helpers.modules import linears, module_of


class Net(nn.Module):
    """Five blocks; the forward is a function of the net and x."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        make = block or (lambda: nn.Linear(4, 4))
        self.blocks = nn.ModuleList(make() for _ in range(5))
        self.own = forward

    def forward(self, x: Tensor) -> Any:
        return self.own(self, x)


#: Where a Net is cut.
CUTS = ["blocks.2", "blocks.4"]


def unused(net: Net, x: Tensor) -> Tensor:
    """Of one block's output nothing is used, and of another's a part."""
    a, b, c, d, e = net.blocks
    y = a(x)
    b(y)
    return e(d(c(y)).chunk(2, dim=1)[0].repeat(1, 2))  # type: ignore[no-any-return]


def hooked(net: Net, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 3)
    for block in net.blocks:
        x = block(x)
        x.register_hook(lambda grad: grad * 2)
    return x.tanh()


def unseen(net: Net, x: Tensor) -> Tensor:
    """Writes to what blocks have returned, of which autograd is not to know; they are given it by keyword."""
    for block in net.blocks:
        x = block(input=x)
        x.detach().mul_(2)
    return x


def regions(net: Net, x: Tensor) -> Tensor:
    """Switches grad mode and autocast around borders of stages."""
    a, b, c, d, e = net.blocks
    x = a(x)
    with torch.no_grad():
        y = c(b(x)) + x
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        x = e(d(x + y))
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    return x.detach() * x + y


def repeated(net: Net, x: Tensor) -> Tensor:
    """Gives its blocks one tensor as several arguments."""
    for block in net.blocks:
        x = x + block(x, x)
    return x


def asking(self: Any, a: Tensor, b: Tensor) -> Tensor:
    """Asks whether its arguments are one tensor, as attention does."""
    return self.other(self.one(a).tanh() * (2 if a is b else 1)) + b  # type: ignore[no-any-return]


def handed(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        same, name, y = block(x, name="handed on")
        assert name == "handed on"
        x = y + same
    return x


def handing(self: Any, x: Tensor, name: str) -> Any:
    """Returns its arguments themselves."""
    return x, name, self.layer(x)


def iterating(net: Net, x: Tensor) -> Tensor:
    """Gives its blocks iterators, which are spent when a block runs again."""
    outputs: list[Tensor] = []
    for block in net.blocks:
        outputs.append(x)
        x = block(x, (2 * each for each in outputs)).tanh()
    return x


def summing(self: Any, x: Tensor, others: Any) -> Tensor:
    return self.layer(sum(others, x)).tanh()  # type: ignore[no-any-return]


@dataclass
class State:
    """What blocks may change, since pytree doesn't know it."""

    h: Tensor
    kept: list[Tensor]


def contained(net: Net, x: Tensor) -> Any:
    """Gives its blocks containers."""
    h = net.blocks[0].layer(x)  # type: ignore[union-attr, operator]
    given: list[Any] = [[h * 2], {"inner": {"of": [(h, None)]}}, deque([h, x]), State(h * 2, [x])]
    for block in net.blocks:
        x = block(x, *given)
    return x, given[3].h, *given[3].kept


def reading(self: Any, x: Tensor, tensors: list[Tensor], names: Any, last: deque[Tensor], state: State) -> Tensor:
    """Reads them, and changes the object."""
    y: Tensor = self.layer(x).tanh() + tensors[0] + names["inner"]["of"][0][0] + sum(last) + state.h
    state.h = state.h + y
    state.kept.append(y)
    return y


def other_weights(net: Net, x: Tensor) -> Tensor:
    """Calls a block with weights of others, and with one that it has computed; and between, as it is."""
    a, b, c, d, e = net.blocks
    computed = a.weight * 3  # type: ignore[operator]
    x = functional_call(b, {"weight": computed}, (functional_call(b, {"weight": computed}, (x,)).tanh(),)).tanh()
    for weight in b.weight, a.weight * 2:
        x = functional_call(d, {"weight": weight}, (a(x),)).tanh()
    return e(d(c(x)))  # type: ignore[no-any-return]


def viewing(net: Net, x: Tensor) -> Tensor:
    """Writes to what one block has made a view of, and to one of two outputs of another."""
    a, b, c, d, e = net.blocks
    h = a(x, 1) * 1
    a(h, 0).mul_(2)
    y, z = b(h, 2)
    z.mul_(3)
    return e(d(c(y, 1).tanh(), 1), 1)  # type: ignore[no-any-return]


def view(self: Any, x: Tensor, many: int) -> Any:
    y = self.layer(x) if many else x
    return (y, y[:, :2]) if many == 2 else y if many else y[:, 1:3]


def returned(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """Goes on with a value, with what a function that wrote to it has returned, which is it, and a view of that."""
    a, b, c, d, e = net.blocks
    h = a(x)
    k = h.tanh() * 1
    x = c(b(h * 1))
    y = h.mul_(2)
    k.mul_(3)
    x = e(x + y)
    view = y[:, :2]
    x = x + view.repeat(1, 2)
    y.add_(1)
    return x + h, k


def derived(net: Net, x: Tensor) -> Tensor:
    """Differentiates between blocks, to a value of the same stage."""
    a, b, c, d, e = net.blocks
    y = c(b(a(x))) * 1
    [slope] = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    return e(d(slope))  # type: ignore[no-any-return]


def rerun(net: Net, x: Tensor) -> Tensor:
    """Has checkpoints of its own."""
    for block in net.blocks:
        x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=False)
    return x


def packed(net: Net, x: Tensor) -> Any:
    """Packs a sequence, which blocks take and return."""
    y = pack_padded_sequence(x[:, :, None], [4] * len(x), batch_first=True)
    for block in net.blocks:
        y, _ = block(y)
    return pad_packed_sequence(y, batch_first=True)[0]


def layered(forward: Callable[..., Any], *names: str) -> Callable[[], nn.Module]:
    """Makes blocks with such a forward and linear layers of these names."""
    return lambda: module_of(forward, **linears(*names or ("layer",)))


FORWARDS: dict[str, Callable[[], Net]] = {
    **{function.__name__: lambda function=function: Net(function) for function in (  # type: ignore[misc]
        unused, hooked, unseen, regions, other_weights, returned, derived, rerun,
    )},
    "one tensor in two arguments": lambda: Net(repeated, layered(asking, "one", "other")),
    "handed on": lambda: Net(handed, layered(handing)),
    "iterators": lambda: Net(iterating, layered(summing)),
    "views": lambda: Net(viewing, layered(view)),
    "packed sequences": lambda: Net(packed, lambda: nn.LSTM(1, 1, batch_first=True)),
    "containers": lambda: Net(contained, layered(reading)),
}
