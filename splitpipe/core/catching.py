"""Function modes that see the random functions of torch, and what each of them draws.

A function mode can't see what compiled code draws, nor what a layer draws under ``no_grad``, after seeding, or inside
``torch.utils.checkpoint``, which saves and restores the generator's state itself.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _autograd
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from splitpipe.core.generator import own_state
from splitpipe.core.note import uncompiled
from splitpipe.core.thread_state import set_function_modes, unobserved


def moved(state: Tensor) -> bool:
    """Whether the default generator has drawn since it had this state."""
    return _differ(state, torch.default_generator.get_state())


def _differ(state: Tensor, other: Tensor) -> bool:
    with unobserved():
        return not torch.equal(state, other)


class Catching(TorchFunctionMode):
    """Sees the random functions that are called for CPU tensors, as they are called by the layers themselves."""

    def __init__(self, generators: dict[torch.Generator, Tensor]) -> None:
        super().__init__()
        self._generators = generators
        self._hooks = _autograd._top_saved_tensors_default_hooks(True)
        self._grad = torch.is_grad_enabled()
        self.called = False

    def watch(self, call: Callable[[], Any]) -> Any:
        """Runs the call under this mode, outermost: the user's modes see every function before it does."""
        stack = tuple(_get_current_function_mode_stack())
        set_function_modes((self, *stack))
        try:
            return call()
        finally:
            set_function_modes(stack)

    @uncompiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # is_compiling() is true in every thread while any of them compiles.
        if torch.compiler.is_dynamo_compiling() or func not in RANDOM:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and _INTO is not None and PLAIN.issuperset(types):
            with self:  # Written in Python: its body draws, one function further down.
                return _INTO(func, types, args, kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            if generator not in self._generators:
                self._generators[generator] = generator.get_state()
            return func(*args, **kwargs)
        if not self._mine(args):
            return func(*args, **kwargs)
        self.called = True
        return self.draw(lambda: func(*args, **kwargs))

    def _mine(self, args: tuple[Any, ...]) -> bool:
        if args and isinstance(args[0], Tensor) and args[0].device.type != "cpu":
            return False  # Drawn by the device's generator, which has one worker.
        return (
            torch.is_grad_enabled() == self._grad and _autograd._top_saved_tensors_default_hooks(True) == self._hooks
        )

    def draw(self, call: Callable[[], Any]) -> Any:
        """Runs one random function."""
        return call()


class Swapping(Catching):
    """Each random function draws from the microbatch's own generator, which takes the default one's place for it.

    Args:
        generators: that random functions are given, by the states that they were found in.
        seed: of the microbatch's own, which is made when something draws.
    """

    def __init__(self, generators: dict[torch.Generator, Tensor], seed: int) -> None:
        super().__init__(generators)
        self._seed = seed
        self._state: Tensor | None = None
        self._start: Tensor | None = None

    @property
    def drew(self) -> bool:
        """Whether something was drawn: dropout of probability 0 draws nothing."""
        return self._start is not None and self._state is not None and _differ(self._start, self._state)

    def draw(self, call: Callable[[], Any]) -> Any:
        if self._state is None:
            self._state = self._start = torch.Generator().manual_seed(self._seed).get_state()
        with own_state(self._state):
            try:
                return call()
            finally:
                self._state = torch.default_generator.get_state()


class Witness(Catching):
    """Finds out whether the default generator moves in random functions alone."""

    def __init__(self, generators: dict[torch.Generator, Tensor], start: Tensor) -> None:
        super().__init__(generators)
        self._last = start
        self._missed = False

    def draw(self, call: Callable[[], Any]) -> Any:
        self.saw_all()
        try:
            return call()
        finally:
            self._last = torch.default_generator.get_state()

    def saw_all(self) -> bool:
        """Whether nothing has drawn unseen so far."""
        self._missed = self._missed or moved(self._last)
        return not self._missed


def _functions(owner: object, names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


#: Calls a function's body with modes that see what it calls. Without it (torch 2.11) the whole function draws in turn.
_INTO = getattr(torch._C, "_skip_one_hop_torch_function", None)

#: A subclass of Tensor has a say in what a function does; one hop further down it would not be asked.
PLAIN = frozenset([Tensor, torch.nn.Parameter])

RANDOM = frozenset([
    F.multi_head_attention_forward,
    *_functions(F, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu rrelu_ "
                   "gumbel_softmax scaled_dot_product_attention fractional_max_pool2d fractional_max_pool3d "
                   "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices"),
    *_functions(torch, "dropout dropout_ native_dropout feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ "
                       "feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ rand randn randint rand_like "
                       "randn_like randint_like randperm bernoulli multinomial normal poisson binomial "
                       "_standard_gamma _sample_dirichlet"),
    *_functions(torch._VF, "lstm gru rnn_tanh rnn_relu"),
    *_functions(Tensor, "bernoulli bernoulli_ normal_ uniform_ exponential_ random_ geometric_ cauchy_ log_normal_ "
                        "multinomial"),
])
