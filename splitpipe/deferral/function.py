"""SplitFunction: an autograd function whose backward has two halves.

Inside a stage of a pipeline, the halves run separately: ``backward_input`` when the gradient arrives,
``backward_weight`` when there is time. Anywhere else, it is an ordinary autograd function, and one half runs after the
other.

Tensors that only the first half needs are freed after it, so there are two methods to save tensors with, one per half.
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
    """The state that a SplitFunction's methods share during one call: ``ctx``.

    Attributes:
        needs_input_grad: whether x requires grad.
        needs_weight_grad: the same for each weight.

    Other attributes may be set, as on the ctx of an autograd function, but not to tensors, which wouldn't be freed.
    """

    # A node keeps the contents rather than the context: the garbage collector has one object less to walk.
    __slots__ = ("__dict__", "needs_input_grad", "needs_weight_grad", "saved_for_input", "saved_for_weight")

    def __init__(self, needs_input_grad: bool, needs_weight_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.needs_weight_grad = needs_weight_grad
        self.saved_for_input: Weights = ()
        self.saved_for_weight: Weights = ()

    def save_for_input(self, *tensors: Tensor | None) -> None:
        """Saves tensors that only ``backward_input`` needs, as ``ctx.saved_for_input``."""
        self.saved_for_input = tensors

    def save_for_weight(self, *tensors: Tensor | None) -> None:
        """Saves tensors for ``backward_weight`` as ``ctx.saved_for_weight``. ``backward_input`` may use them too."""
        self.saved_for_weight = tensors

    def __getattr__(self, name: str) -> Any:
        if name == "saved_for_input":
            raise AttributeError(
                "ctx.saved_for_input is freed after backward_input: expected backward_weight to use "
                "ctx.saved_for_weight. Save there what both need; backward_input may use it too."
            )
        raise AttributeError(f"ctx has no attribute {name!r}: forward() didn't set it")


class SplitFunction:
    """Base class of functions with a split backward: the input's gradient first, the weights' gradients later.

    It is for custom kernels in custom layers: inside a SplitPipe with ``backward="split"``, their weight gradients are
    deferred like those of nn.Linear (2BP, arXiv 2405.18047; zero bubble, arXiv 2401.10241). Elsewhere, it is an
    ordinary autograd function. All methods are static, as in ``torch.autograd.Function``:

    * ``forward(ctx, x, *weights, **options)`` returns one tensor. It saves what only the input's gradient needs with
      ``ctx.save_for_input(...)``, and what the weights' gradients need with ``ctx.save_for_weight(...)``.
    * ``backward_input(ctx, grad_output)`` returns the gradient of x. It is called if ``ctx.needs_input_grad``, and may
      use ``ctx.saved_for_input`` and ``ctx.saved_for_weight``.
    * ``backward_weight(ctx, grad_output)`` returns a tuple with a gradient for each weight, or None where
      ``ctx.needs_weight_grad`` is False. It may only use ``ctx.saved_for_weight``.

    Both backwards must consist of differentiable operations if second derivatives are needed (``create_graph=True``).
    They run without autocast.

    Call it with ``apply(x, *weights, **options)``: x is a tensor, weights are tensors or None, options anything else.
    Gradients are deferred for parameters and for views of a parameter (``weight.t()``). A call with a weight that is
    computed in forward, as in a parametrized layer, is left to autograd.

    Raises:
        NotImplementedError: in ``apply``: one of the three methods is missing.
        TypeError: in forward or backward: a method returned or saved something other than tensors.

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
        """Computes the output."""
        raise NotImplementedError("a SplitFunction needs a static method forward(ctx, x, *weights, **options)")

    @staticmethod
    def backward_input(ctx: Any, grad_output: Tensor) -> Tensor | None:
        """Computes the gradient of x."""
        raise NotImplementedError("a SplitFunction needs a static method backward_input(ctx, grad_output)")

    @staticmethod
    def backward_weight(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradient of each weight."""
        raise NotImplementedError("a SplitFunction needs a static method backward_weight(ctx, grad_output)")

    @classmethod
    def accumulate(cls, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Tensor]]) -> None:
        """Adds the weight gradients of several microbatches. Override it if fewer kernels can compute them together.

        Args:
            totals: one per weight, or None where no gradient is needed.
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
        """True if a stage gains by a split call. Override it if that depends on the call.

        Args:
            x: the input.
            weights: those of the call.
            options: those of the call.
            fills: whether weight gradients are computed when the device has time, during or between other ops.
            gathers: whether they wait for those of other microbatches, to be computed together.
        """
        return True

    @classmethod
    def apply(cls, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        """Calls the function.

        Args:
            x: the input.
            weights: tensors, or None. Those that require grad get a gradient.
            options: passed to ``forward`` as they are.

        Raises:
            TypeError: x isn't a tensor, a weight is neither a tensor nor None, or forward returns something else.
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
                f"{cls.__name__}.backward_weight returned {what}: expected a tuple of {count}, a gradient or None for "
                "each weight that apply() was given."
            )
        for number, gradient in enumerate(found):
            if gradient is not None and not isinstance(gradient, Tensor):
                raise TypeError(
                    f"{cls.__name__}.backward_weight returned a {type(gradient).__name__} for weight {number}: "
                    "expected a tensor or None."
                )
        return found


class WeightGradients(Protocol):
    """Computes the gradients of a call's weights: a SplitFunction, or the second half of a compiled backward."""

    def accumulate(self, totals: Sequence[Total | None], parts: Sequence[tuple[Any, Any]]) -> None:
        """Adds, for several calls, the weight gradients that follow from what they left and their output gradients."""


class Caller:
    """The running stage, as its layers' functions see it. Nodes with a W are found in the graph afterwards."""

    def __init__(self, gains: tuple[bool, bool], uncompiled: Callable[[Tensor, str], None] | None = None) -> None:
        """Takes the ``fills`` and ``gathers`` of SplitFunction.pays, and a function to report uncompiled layers to."""
        self._gains = gains
        self._uncompiled = uncompiled
        #: The running layer, and where it runs, for messages.
        self.where = "", ""

    def pays(
        self, function: type[SplitFunction], x: Tensor, weights: Sequence[Tensor | None], options: dict[str, Any]
    ) -> bool:
        """Whether the call pays, according to the function."""
        return function.pays(x, weights, options, *self._gains)

    def uncompiled(self, parameters: Iterable[Tensor], why: str) -> None:
        """Reports that the layer with these parameters runs uncompiled, or with an unsplit backward, and why."""
        note = self._uncompiled
        if note is not None:
            for parameter in parameters:
                note(parameter, why)


#: Set for a stage's layers, in their own context.
_caller: ContextVar[Caller | None] = ContextVar("splitpipe.deferral", default=None)


def calling(caller: Caller | None) -> Bound[Caller | None]:
    """Makes calls of split functions inside the block use a stage; None: ordinary autograd."""
    return Bound(_caller, caller)


def caller_here() -> Caller | None:
    """The stage whose layers run in this context, if any."""
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
                "or None. Pass anything else by keyword, as an option."
            )


class SplitCall(Function):
    """A call: both halves in one backward, or only the first if a stage has set ``left``, to fill for the second."""

    @staticmethod
    def forward(
        ctx: Any, function: type[SplitFunction], options: dict[str, Any], x: Tensor, *weights: Tensor | None
    ) -> Tensor:
        needs = tuple([weight is not None and weight.requires_grad for weight in weights])
        caller = _caller.get()
        ctx.function, ctx.left, ctx.where = function, None, None if caller is None else caller.where
        ctx.pays = caller is None or caller.pays(function, x, weights, options)
        #: The edge that leads to each weight, after that of x.
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
        raise TypeError(f"{function.__name__}.forward returned a {type(y).__name__}: expected one tensor.")
    saved = *shared.saved_for_input, *shared.saved_for_weight
    # The next layer could not write to a view (such as a reshaped output of a linear layer), and a weight would become
    # a node's output.
    if y._is_view() or any([y is weight for weight in weights]):
        given, y = y, y.detach()
        if given._is_view():  # Save the output itself: a second derivative continues from there.
            saved = tuple([y if x is given else x for x in saved])
    ctx.save_for_backward(*saved)
    ctx.cut = len(shared.saved_for_input)
    ctx.own = shared.__dict__ or None
    return y


def backward_input(
    ctx: Any, function: type[SplitFunction], needs_input: bool, needs: tuple[bool, ...], grad: Tensor
) -> tuple[Context, Tensor | None]:
    """The context, with what the weight gradient needs, and the input gradient."""
    # A new one for each backward: with retain_graph, there may be several, even at the same time.
    shared = opened(ctx, needs_input, needs)
    found = function.backward_input(shared, grad) if needs_input else None
    del shared.saved_for_input
    if not tensors(found):
        raise TypeError(
            f"{function.__name__}.backward_input returned a {type(found).__name__}: expected the gradient of x, a "
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
