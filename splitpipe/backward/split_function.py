"""SplitFunction: an autograd function whose backward has two halves; what only the first needs is freed after it."""
from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from splitpipe.backward.graph_walk import total_version
from splitpipe.backward.stand_ins import leftovers_of, stand_ins
from splitpipe.backward.weight_gradients import Total
from splitpipe.core import thread_state


class Context:
    """The state that a SplitFunction's methods share during one call: ``ctx``.

    Attributes:
        needs_input_grad: whether x requires grad.
        needs_weight_grad: the same for each weight.
        saved_for_input, saved_for_weight: the saved tensors; the first are freed after ``backward_input``.

    Other attributes may be set, as on the ctx of an autograd function, but not to tensors, which wouldn't be freed.
    """

    def __init__(self, needs_input_grad: bool, needs_weight_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.needs_weight_grad = needs_weight_grad
        self.saved_for_input: tuple[Tensor | None, ...] = ()
        self.saved_for_weight: tuple[Tensor | None, ...] = ()

    def save_for_input(self, *tensors: Tensor | None) -> None:
        """Saves tensors that only ``backward_input`` needs, as ``ctx.saved_for_input``."""
        self.saved_for_input = tensors

    def save_for_weight(self, *tensors: Tensor | None) -> None:
        """Saves tensors for ``backward_weight`` as ``ctx.saved_for_weight``. ``backward_input`` may use them too."""
        self.saved_for_weight = tensors


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
    Gradients are deferred for parameters, and casts of them. A call with any other weight that requires grad, such as a
    view of a parameter or the weight of a parametrized layer, runs both halves in the first.

    Raises:
        NotImplementedError: one of the three methods is missing, but was called.
        TypeError: a method saved something other than tensors, or ``backward_weight`` returned something other than a
            gradient or None for each weight.

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
    def apply(cls, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        """Calls the function.

        Args:
            x: the input.
            weights: tensors, or None. Those that require grad get a gradient.
            options: passed to ``forward`` as they are.

        Raises:
            TypeError: x isn't a tensor, or a weight is neither a tensor nor None.
        """
        for k, value in enumerate((x, *weights)):
            if not isinstance(value, Tensor) and (value is not None or k == 0):
                place = f"weight {k - 1}: expected a tensor or None" if k else "x: expected a tensor"
                kind = type(value).__name__
                raise TypeError(f"{cls.__name__}.apply was given a {kind} as {place}. Pass options by keyword.")
        y: Tensor = SplitCall.apply(cls, options, weights, x, *stand_ins(cls, weights))
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
        return found


class SplitCall(Function):
    """A call: both halves in one backward, or only the first, if the second is left to W (see ``stand_ins``)."""

    @staticmethod
    def forward(
        ctx: Any, function: type[SplitFunction], options: dict[str, Any], weights: Sequence[Tensor | None], x: Tensor,
        *stands: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        shared = Context(x.requires_grad, tuple([weight is not None and weight.requires_grad for weight in weights]))
        y = function.forward(shared, x, *weights, **options)
        ctx.for_input = len(shared.saved_for_input)
        ctx.save_for_backward(*shared.saved_for_input, *shared.saved_for_weight)
        del shared.saved_for_input, shared.saved_for_weight
        ctx.function, ctx.shared = function, shared
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        shared = copy(ctx.shared)  # There may be several backwards.
        of_input, of_weights = None, (None,) * len(shared.needs_weight_grad)
        if grad is not None:
            with thread_state.use(thread_state.capture().outside_forward()._replace(grad=torch.is_grad_enabled())):
                saved, leftovers = ctx.saved_tensors, leftovers_of(ctx, ctx.function)
                shared.saved_for_input, shared.saved_for_weight = saved[: ctx.for_input], saved[ctx.for_input :]
                if shared.needs_input_grad:
                    of_input = ctx.function.backward_input(shared, grad)
                del shared.saved_for_input
                if leftovers is not None:
                    # A graph would be kept alive.
                    shared.saved_for_weight = tuple([x if x is None else x.detach() for x in shared.saved_for_weight])
                    leftovers.append((shared, grad, total_version([*shared.saved_for_weight, grad])))
                elif any(shared.needs_weight_grad):
                    of_weights = ctx.function._gradients(shared, grad)
        return None, None, None, of_input, *of_weights
