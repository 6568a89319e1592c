"""SplitFunction: an autograd function whose backward comes in two halves.

Inside a stage of a pipeline the halves run apart: ``backward_input`` when the gradient arrives, ``backward_weight``
when there is time. Anywhere else it is an ordinary autograd function, one half after the other.

What only the first half needs is freed with it. So there are two saves, and a backward of its own for each.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function

from splitpipe.core.note import add_note
from splitpipe.core.thread_state import Bound, without_autocast
from splitpipe.deferral.accumulator import Total

Weights = tuple[Tensor | None, ...]

class Context:
    """The state that a SplitFunction's methods share for one call: ``ctx``.

    Attributes:
        needs_input_grad: whether x requires grad.
        needs_weight_grad: the same of each weight.

    Others may be set, as on the ctx of an autograd function. Keep tensors out of them: they would not be freed.
    """

    # A node keeps what is in it, and not the context: the garbage collector has one object less to walk.
    __slots__ = ("__dict__", "needs_input_grad", "needs_weight_grad", "saved_for_input", "saved_for_weight")

    def __init__(self, needs_input_grad: bool, needs_weight_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.needs_weight_grad = needs_weight_grad
        self.saved_for_input: Weights = ()
        self.saved_for_weight: Weights = ()

    def save_for_input(self, *tensors: Tensor | None) -> None:
        """Saves what ``backward_input`` alone needs, read there as ``ctx.saved_for_input``."""
        self.saved_for_input = tensors

    def save_for_weight(self, *tensors: Tensor | None) -> None:
        """Saves what ``backward_weight`` needs, read there, and in ``backward_input``, as ``ctx.saved_for_weight``."""
        self.saved_for_weight = tensors

    def __getattr__(self, name: str) -> Any:
        if name == "saved_for_input":
            raise AttributeError(
                "ctx.saved_for_input is freed when backward_input is done: expected backward_weight to read "
                "ctx.saved_for_weight. Save there what both need; backward_input may read it too."
            )
        raise AttributeError(f"ctx has no attribute {name!r}: forward() did not set it")


class SplitFunction:
    """Base of functions whose backward is split: the input's gradient first, the weights' gradients later.

    For kernels of one's own, in layers of one's own: inside a SplitPipe with ``backward="split"`` the weight gradients
    are deferred as those of nn.Linear are (2BP, arXiv 2405.18047; zero bubble, arXiv 2401.10241). Elsewhere it is an
    ordinary autograd function. Everything is a static method, as in ``torch.autograd.Function``:

    * ``forward(ctx, x, *weights, **options)`` gives one tensor. It saves by ``ctx.save_for_input(...)`` what only the
      input's gradient needs, by ``ctx.save_for_weight(...)`` what the weights' need.
    * ``backward_input(ctx, grad_output)`` gives the gradient of x. Called if ``ctx.needs_input_grad``; reads
      ``ctx.saved_for_input`` and ``ctx.saved_for_weight``.
    * ``backward_weight(ctx, grad_output)`` gives a tuple with a gradient for each weight, None where
      ``ctx.needs_weight_grad`` says that it is not needed. Reads ``ctx.saved_for_weight`` alone.

    Both backwards are made of differentiable operations if second derivatives are asked for
    (``create_graph=True``), and run outside of autocast.

    Call it by ``apply(x, *weights, **options)``: x is a tensor, weights are tensors or None, options anything else.
    Deferred are the gradients of parameters and of views of one (``weight.t()``). A call with a weight that is
    computed in forward, as in a parametrised layer, is autograd's as a whole.

    Raises:
        NotImplementedError: when applied: one of the three methods is missing.
        TypeError: in forward or backward: a method gave, or saved, something else than tensors.

    Example:
        >>> class Scale(SplitFunction):
        ...     @staticmethod
        ...     def forward(ctx, x, weight):
        ...         ctx.save_for_input(weight)
        ...         ctx.save_for_weight(x)
        ...         return x * weight
        ...     @staticmethod
        ...     def backward_input(ctx, grad_output):
        ...         (weight,) = ctx.saved_for_input
        ...         return grad_output * weight
        ...     @staticmethod
        ...     def backward_weight(ctx, grad_output):
        ...         (x,) = ctx.saved_for_weight
        ...         return ((grad_output * x).sum(0),)
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> Scale.apply(torch.ones(2, 3), weight).sum().backward()
        >>> weight.grad
        tensor([2., 2., 2.])
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        """The output."""
        raise NotImplementedError("a SplitFunction needs a static method forward(ctx, x, *weights, **options)")

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor | None:
        """The gradient of x."""
        raise NotImplementedError("a SplitFunction needs a static method backward_input(ctx, grad_output)")

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of each weight."""
        raise NotImplementedError("a SplitFunction needs a static method backward_weight(ctx, grad_output)")

    @classmethod
    def accumulate(cls, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds the weight gradients of several microbatches; overridden where they are fewer kernels together.

        Args:
            totals: one a weight, None where no gradient is needed.
            parts: ctx and output gradient of each microbatch.
        """
        for ctx, grad in parts:
            for total, found in zip(totals, cls._gradients(ctx, grad)):
                if total is not None:
                    total.add(found)

    @classmethod
    def pays(
        cls, x: Tensor, weights: Sequence[Tensor | None], options: dict[str, Any], fills: bool, gathers: bool
    ) -> bool:
        """True if a stage gains by a call in two halves; overridden where it does not always.

        Args:
            x: the input.
            weights: of the call.
            options: of the call.
            fills: whether weight gradients are computed when the device has time: beside other ops, or between them.
            gathers: whether they wait for those of other microbatches, to be computed with them.
        """
        return True

    @classmethod
    def apply(cls, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        """Calls the function.

        Args:
            x: the input.
            weights: tensors, or None. Those that require grad get one.
            options: passed to ``forward`` as they are.

        Raises:
            TypeError: x is no tensor, a weight is neither a tensor nor None, or forward gives no tensor.
        """
        _verify(cls, x, weights)
        y: Tensor = SplitCall.apply(cls, options, x, *weights)
        return y

    @classmethod
    def _gradients(cls, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = cls.backward_weight(ctx, grad)
        count = len(ctx.needs_weight_grad)
        if not isinstance(found, tuple) or len(found) != count:
            what = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
            raise TypeError(
                f"{cls.__name__}.backward_weight gave {what}: expected a tuple of {count}, a gradient or None for "
                "each weight that apply() was given."
            )
        for number, gradient in enumerate(found):
            if gradient is not None and not isinstance(gradient, Tensor):
                raise TypeError(
                    f"{cls.__name__}.backward_weight gave a {type(gradient).__name__} for weight {number}: expected a "
                    "tensor or None."
                )
        return found


class WeightGradients(Protocol):
    """Computes the gradients of a call's weights: a SplitFunction, or the second half of a compiled backward."""

    def accumulate(self, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Any]]) -> None:
        """Adds what several calls have left, and their output gradients, to the sums of the weights'."""


class Caller:
    """The stage that runs here. What has a W is found in the graph afterwards."""

    def __init__(self, gains: tuple[bool, bool], uncompiled: Callable[[Tensor, str], None] | None = None) -> None:
        """Takes the ``fills`` and ``gathers`` of SplitFunction.pays, and who is told of layers that run as they are."""
        self._gains = gains
        self._uncompiled = uncompiled
        #: The layer that runs, and where, for messages.
        self.where = "", ""

    def pays(
        self, function: type[SplitFunction], x: Tensor, weights: Sequence[Tensor | None], options: dict[str, Any]
    ) -> bool:
        """What the function says."""
        return function.pays(x, weights, options, *self._gains)

    def uncompiled(self, parameters: Iterable[Tensor], why: str) -> None:
        """The layer of these parameters, which was to be compiled, runs as it is, or with its backward whole."""
        note = self._uncompiled
        if note is not None:
            for parameter in parameters:
                note(parameter, why)


#: Set for a stage's layers, in their own context.
_caller: ContextVar[Caller | None] = ContextVar("splitpipe.deferral", default=None)


def calling(caller: Caller | None) -> Bound[Caller | None]:
    """Gives the calls of split functions inside the block to a stage; None: to autograd."""
    return Bound(_caller, caller)


def caller_here() -> Caller | None:
    """The stage whose layers run in this context; None if none does."""
    return _caller.get()


def tensors(*values: object) -> bool:
    """True if all are tensors, or None."""
    return all([value is None or isinstance(value, Tensor) for value in values])


def _verify(function: type[SplitFunction], x: object, weights: Sequence[object]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{function.__name__}.apply was given a {type(x).__name__} as x: expected a tensor.")
    for number, weight in enumerate(weights):
        if not tensors(weight):
            raise TypeError(
                f"{function.__name__}.apply was given a {type(weight).__name__} as weight {number}: expected a tensor "
                "or None. Pass what is no tensor by keyword, as an option."
            )


class SplitCall(Function):
    """A call: both halves in one backward; or the first alone, if a stage has ``left`` to be filled for the second."""

    @staticmethod
    def forward(
        ctx: Any, function: type[SplitFunction], options: dict[str, Any], x: Tensor, *weights: Tensor | None
    ) -> Tensor:
        needs = tuple([weight is not None and weight.requires_grad for weight in weights])
        caller = _caller.get()
        ctx.function, ctx.left, ctx.where = function, None, None if caller is None else caller.where
        ctx.pays = caller is None or caller.pays(function, x, weights, options)
        #: Of each weight: the edge that leads to it, behind that of x.
        ctx.edges = tuple([
            None if weight is None else len([other for other in weights[:k] if other is not None]) + 1
            for k, weight in enumerate(weights)
        ])
        return forward(ctx, function, Context(x.requires_grad, needs), x, weights, options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        _, _, needs_input, *needs = ctx.needs_input_grad
        nothing = (None,) * len(needs)
        if grad is None:
            return None, None, None, *nothing
        function = ctx.function
        try:
            with without_autocast():
                shared, found = backward_input(ctx, function, needs_input, tuple(needs), grad)
                if ctx.left is not None:
                    ctx.left.append(shared)
                    return None, None, found, *nothing
                gradients = function._gradients(shared, grad) if any(needs) else nothing
        except BaseException as error:
            if ctx.where is not None:
                add_note(error, "in the backward of {}, {}".format(*ctx.where))
            raise
        return None, None, found, *gradients


def forward(
    ctx: Any, function: type[SplitFunction], shared: Context, x: Tensor, weights: Weights, options: dict[str, Any]
) -> Tensor:
    """Calls a function's forward for a node, which keeps what it has saved."""
    ctx.set_materialize_grads(False)
    y = function.forward(shared, x, *weights, **options)
    if not isinstance(y, Tensor):
        raise TypeError(f"{function.__name__}.forward gave a {type(y).__name__}: expected one tensor.")
    saved = *shared.saved_for_input, *shared.saved_for_weight
    # A view (of what a linear layer of three dimensions made, say) could not be written to by the next layer, and a
    # weight would become a node's output.
    if y._is_view() or any([y is weight for weight in weights]):
        given, y = y, y.detach()
        if given._is_view():  # Saved, it is the output that is meant: a second derivative goes on from there.
            saved = tuple([y if x is given else x for x in saved])
    ctx.save_for_backward(*saved)
    ctx.cut = len(shared.saved_for_input)
    ctx.own = shared.__dict__ or None
    return y


def backward_input(
    ctx: Any, function: type[SplitFunction], needs_input: bool, needs: tuple[bool, ...], grad: Tensor
) -> tuple[Context, Tensor | None]:
    """The context, with what the weight gradient needs, and the input gradient."""
    # A new one for each backward: with retain_graph there may be several, even at once.
    shared = opened(ctx, needs_input, needs)
    found = function.backward_input(shared, grad) if needs_input else None
    del shared.saved_for_input
    if not tensors(found):
        raise TypeError(
            f"{function.__name__}.backward_input gave a {type(found).__name__}: expected the gradient of x, a "
            "tensor or None."
        )
    return shared, found


def opened(ctx: Any, needs_input: bool, needs: tuple[bool, ...]) -> Context:
    """The context of a node's call, with what it has saved."""
    shared = Context(needs_input, needs)
    if ctx.own:
        shared.__dict__.update(ctx.own)
    saved, cut = ctx.saved_tensors, ctx.cut
    shared.saved_for_input, shared.saved_for_weight = saved[:cut], saved[cut:]
    return shared
