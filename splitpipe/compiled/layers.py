"""Layers that a pipeline compiles. Their calls are in nn.Module's slot for compiled calls, as with ``layer.compile()``.

Equal layers share one function to compile, and thus the compiled code: 24 equal blocks are compiled once. Layers that
can't be compiled run uncompiled, and the reason is reported.
"""
from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from splitpipe.compiled.backend import Backend
from splitpipe.compiled.gate import gate
from splitpipe.compiled.options import CompileOptions
from splitpipe.core.generator import state_lock, undisturbed
from splitpipe.core.torch_private import _has_any_global_hook
from splitpipe.deferral.function import caller_here

#: Each is a single op, whose weight gradient is deferred anyway.
_ONE_OP = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
#: Settings of torch's compiler: as many graphs as equal layers may need, for batch sizes and modes; above that, an
#: error. Hooks that are added later are seen. A number that a layer counts in an attribute may have any value, rather
#: than a graph for each.
_SETTINGS = {
    "recompile_limit": 16, "fail_on_recompile_limit_hit": True, "skip_nnmodule_hook_guards": False,
    "allow_unspec_int_on_nn_module": True,
}
#: The compiled function, which includes the layer's hooks. Torch keeps graphs per code, so each kind of layer has its
#: own.
_CALLED = """
def called(layer, args, kwargs):
    return layer._call_impl(*args, **kwargs)
"""
#: True where layers run uncompiled: in a rehearsal, whose sizes and modes aren't worth compiling for.
rehearsing: ContextVar[bool] = ContextVar("splitpipe.rehearsing", default=False)
#: Names of the errors that inductor raises if there is no compiler to use.
_NO_COMPILER = ("InvalidCxxCompiler", "TritonMissing")
#: Seconds of compiling from which on a line is printed.
_LONG = 1.0


class Compiler:
    """Compiles the layers of one model; without options, it leaves them as they are. ``halves``: of the backward."""

    def __init__(self, options: CompileOptions | None, halves: bool = True) -> None:
        self._options = options
        self._halves = halves
        self._codes: dict[Any, Code] = {}

    def compile(self, layers: Iterable[nn.Module]) -> None:
        """Makes layers run compiled from now on, unless they already do, or the user has compiled them."""
        if self._options is None:
            return
        for layer in layers:
            if compiled_call(layer) is None and fit(layer):
                key = _key(layer)
                code = self._codes.get(key)
                if code is None:
                    code = self._codes[key] = Code(self._options, type(layer).__name__, self._halves)
                _set_compiled_call(layer, CompiledCall(layer, code))


def release(module: nn.Module) -> None:
    """Makes everything in a module that a pipeline has compiled run uncompiled again."""
    for part in module.modules():
        if isinstance(compiled_call(part), CompiledCall):
            _set_compiled_call(part, None)


def compiled_call(layer: nn.Module) -> Any:
    """A layer's compiled call, by a pipeline or by ``layer.compile()``; None if it isn't compiled."""
    slot: Any = layer._compiled_call_impl
    return getattr(slot, "compiled", slot)  # A block's call hook may be in the slot, with the compiled call inside.


def is_compiled(module: nn.Module) -> bool:
    """True for a module that is compiled, by torch.compile(module), module.compile() or a pipeline."""
    return compiled_call(module) is not None or type(module).__name__ == "OptimizedModule"


def _set_compiled_call(layer: nn.Module, call: CompiledCall | None) -> None:
    slot: Any = layer._compiled_call_impl
    if hasattr(slot, "compiled"):
        slot.compiled = call
    else:
        vars(layer)["_compiled_call_impl"] = call


def fit(layer: nn.Module) -> bool:
    """True if compiling gains something: several ops, or one whose weight gradient is only deferred if compiled."""
    if type(layer).__name__ == "OptimizedModule" or any(map(_lost, layer.buffers())):
        return False
    if next(layer.children(), None) is not None or not type(layer).__module__.startswith("torch.nn."):
        return True
    return next(layer.parameters(), None) is not None and not isinstance(layer, _ONE_OP)


def _lost(buffer: Tensor) -> bool:
    """True if torch.compile loses writes to a buffer: one with a single number, which it treats as Python's."""
    return buffer.dim() == 0 and buffer.dtype is torch.float64 and buffer.device.type == "cpu"


def _key(layer: nn.Module) -> Any:
    """Equal for layers that are built equally. torch's guards check whether they can share compiled code."""
    return (
        tuple([(name, type(module)) for name, module in layer.named_modules(remove_duplicate=False)]),
        tuple([
            (name, x.shape, x.dtype, x.device, x.requires_grad) for name, x in layer.named_parameters()
        ]),
    )


class Code:
    """What is compiled for equal layers."""

    def __init__(self, options: CompileOptions, what: str, halves: bool = True) -> None:
        self._what = what
        self._halves = halves
        #: Why one of them runs uncompiled; None if none does.
        self.why: str | None = None
        self._options = options
        self._made: Callable[..., Any] | None = None

    def call(self, own: CompiledCall, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a layer. If it can't be compiled, others stay compiled, since their recomputations must be equal."""
        if rehearsing.get():
            return layer._call_impl(*args, **kwargs)
        failed = False
        if own.why is None:
            if not _has_any_global_hook():  # Torch wouldn't notice new ones.
                try:
                    return self._run(layer, args, kwargs)
                except Exception as error:
                    why = self._gave_up(error)
                    if why is None:
                        raise
                    own.why, self.why, failed = why, why, True
            caller = caller_here()
            if caller is not None:
                caller.uncompiled(layer.parameters(), own.why or "torch.compile: there are hooks of all modules")
        try:
            return layer._call_impl(*args, **kwargs)
        except Exception:
            if failed:  # The compiler met an error of the layer's own.
                own.why = self.why = None
            raise

    def _run(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with gate().passing(), suppress(_New):
            if self._made is not None:
                return self._made(layer, args, kwargs)
        # Torch looks again, alone: it may have missed existing code because other lookups reordered the list meanwhile.
        # And when it has compiled, it restores the default generator, to a state in which another stage may have drawn.
        # So that lock is taken before the gate, as by those who hold it and pass.
        with undisturbed(), gate().alone():
            if self._made is None:
                self._made = self._make()
            return self._made(layer, args, kwargs)

    def _make(self) -> Callable[..., Any]:
        from splitpipe.compiled.torch_private import optimize

        names: dict[str, Any] = {}
        exec(compile(_CALLED, f"<{self._what}, compiled by splitpipe>", "exec"), names)
        backend = Backend(self._options.backend, self._options.of_inductor(), self._halves)
        # A graph break is an error: such a layer runs uncompiled, and no part of it twice.
        context: Any = optimize(backend, error_on_graph_break=True, dynamic=self._options.dynamic)
        context.callback = _Compiling(self, names["called"].__code__, context.callback)
        made: Callable[..., Any] = context(names["called"])
        return made

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Compiles in the block; raises _New if the thread isn't alone."""
        from splitpipe.compiled.torch_private import config

        if not gate().is_alone:
            raise _New
        # Under the lock of generators' states, since torch reads and sets the default generator's.
        with state_lock(), config.patch(_SETTINGS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Torch's own, about what it traces: as errors, they would stop it.
            began = time.monotonic()
            try:
                yield
            except Exception as error:
                error.by_compiler = True  # type: ignore[attr-defined]
                raise
            finally:
                self._told(time.monotonic() - began)

    def _told(self, seconds: float) -> None:
        if seconds >= _LONG and sys.stderr is not None and sys.stderr.isatty():
            with suppress(OSError, ValueError):  # stderr may be full or closed.
                sys.stderr.write(f"splitpipe: compiled {self._what} in {seconds:.1f} s\n")

    def _gave_up(self, error: BaseException) -> str | None:
        """Why the layer runs uncompiled from now on, if the error is the compiler's, so that nothing has run."""
        chain: list[BaseException] = []
        each: BaseException | None = error
        while each is not None and each not in chain:
            chain.append(each)
            each = getattr(each, "inner_exception", None) or each.__cause__ or each.__context__
        if not any(getattr(one, "by_compiler", False) for one in chain):
            return None
        missing = [one for one in chain if type(one).__name__ in _NO_COMPILER]
        if missing:
            raise RuntimeError(
                f"compile=True, but torch has no compiler to use: {_line(missing[0])} Install a C++ compiler (on "
                "GPUs: Triton) or name it in CXX; compile={'backend': 'aot_eager'} needs none, and compiles nothing."
            ) from error
        return f"torch.compile: {_line(chain[-1] if str(chain[-1]) else error)}"


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _New(Exception):
    """Raised if there is something to compile. Nothing has run."""


class _Compiling:
    """Called by torch if there is something to compile, in the thread that needs it, before anything is locked.

    Other frames that begin meanwhile aren't compiled: a layer's assignment may free an object whose finalizer or weak
    reference's callback then runs.
    """

    def __init__(self, code: Code, called: CodeType, callback: Any) -> None:
        self._code = weakref.ref(code)  # The code refers to this.
        self._called = called
        self._torchdynamo_orig_backend = callback  # Torch identifies the backend of compiled code by this.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from splitpipe.compiled.torch_private import ConvertFrameReturn

        if args[0].f_code is not self._called:
            return ConvertFrameReturn()
        code = self._code()
        if code is None:
            return self._torchdynamo_orig_backend(*args, **kwargs)
        with code.compiling():
            return self._torchdynamo_orig_backend(*args, **kwargs)


class CompiledCall:
    """The call of one layer. It isn't copied with the layer: copies of it are None."""

    __slots__ = ("_layer", "code", "why")

    def __init__(self, layer: nn.Module, code: Code) -> None:
        self._layer = weakref.ref(layer)  # The layer refers to this.
        self.code = code
        #: Why the layer runs uncompiled; None if it doesn't.
        self.why: str | None = None

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        return self.code.call(self, layer, args, kwargs)


def runs_compiled(layer: object) -> bool:
    """True if a pipeline has compiled a layer, and its call runs nothing but compiled code."""
    call = compiled_call(layer) if isinstance(layer, nn.Module) else None
    return isinstance(call, CompiledCall) and call.why is None
