"""Layers that a pipeline compiles. Their calls stand in nn.Module's slot for these, as those of ``layer.compile()`` do.

Layers that are equal share one function to be compiled, and so what is compiled: 24 equal blocks compile once.
What can't be compiled runs as it is, and says why.
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

#: Each is one op, whose weight gradient is deferred as it is.
_ONE_OP = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
#: Of torch's compiler: as many graphs as equal layers may need, of batch sizes and modes; beyond them, an error. Hooks
#: that come later are seen.
#: A number that a layer counts in an attribute is one of any value, not a graph for each.
_SETTINGS = {
    "recompile_limit": 16, "fail_on_recompile_limit_hit": True, "skip_nnmodule_hook_guards": False,
    "allow_unspec_int_on_nn_module": True,
}
#: What is compiled, with the layer's hooks. To torch it belongs to the code: so each kind of layer has some of its own.
_CALLED = """
def called(layer, args, kwargs):
    return layer._call_impl(*args, **kwargs)
"""
#: True where layers run as they are: in a rehearsal, for whose sizes and modes nothing needs to be compiled.
rehearsing: ContextVar[bool] = ContextVar("splitpipe.rehearsing", default=False)
#: Names of what inductor raises where there is nothing to compile with.
_NO_COMPILER = ("InvalidCxxCompiler", "TritonMissing")
#: Seconds of compiling that are worth a line.
_LONG = 1.0


class Compiler:
    """Compiles the layers of one model; without options it leaves them as they are. ``halves``: of the backward."""

    def __init__(self, options: CompileOptions | None, halves: bool = True) -> None:
        self._options = options
        self._halves = halves
        self._codes: dict[Any, Code] = {}

    def compile(self, layers: Iterable[nn.Module]) -> None:
        """Has layers called compiled from now on. Does nothing to one that is, or that its user has compiled."""
        if self._options is None:
            return
        for layer in layers:
            slot: Any = layer._compiled_call_impl
            if getattr(slot, "compiled", slot) is None and fit(layer):
                key = _key(layer)
                code = self._codes.get(key)
                if code is None:
                    code = self._codes[key] = Code(self._options, type(layer).__name__, self._halves)
                call = CompiledCall(layer, code)
                if slot is None:
                    vars(layer)["_compiled_call_impl"] = call
                else:  # A border stands there.
                    slot.compiled = call


def release(module: nn.Module) -> None:
    """Has all in a module that a pipeline compiled called as it is again."""
    for part in module.modules():
        slot: Any = part._compiled_call_impl
        if isinstance(slot, CompiledCall):
            vars(part)["_compiled_call_impl"] = None
        elif isinstance(getattr(slot, "compiled", None), CompiledCall):
            slot.compiled = None


def fit(layer: nn.Module) -> bool:
    """True if there is something to gain: several ops, or one whose weight gradient is deferred if it is compiled."""
    if type(layer).__name__ == "OptimizedModule" or any(map(_lost, layer.buffers())):
        return False
    if next(layer.children(), None) is not None or not type(layer).__module__.startswith("torch.nn."):
        return True
    return next(layer.parameters(), None) is not None and not isinstance(layer, _ONE_OP)


def _lost(buffer: Tensor) -> bool:
    """True if torch.compile loses what a layer writes to a buffer: of one number, which it takes for Python's."""
    return buffer.dim() == 0 and buffer.dtype is torch.float64 and buffer.device.type == "cpu"


def _key(layer: nn.Module) -> Any:
    """Equal for layers that are built equally. Whether they are compiled equally is for torch's guards to say."""
    return (
        tuple([(name, type(module)) for name, module in layer.named_modules(remove_duplicate=False)]),
        tuple([
            (name, x.shape, x.dtype, x.device, x.requires_grad) for name, x in layer.named_parameters()
        ]),
    )


class Code:
    """What is compiled of equal layers."""

    def __init__(self, options: CompileOptions, what: str, halves: bool = True) -> None:
        self._what = what
        self._halves = halves
        #: Why one of them runs as it is; None if none does.
        self.why: str | None = None
        self._options = options
        self._made: Callable[..., Any] | None = None

    def call(self, own: CompiledCall, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a layer. One that can't be compiled is alone in that: others may wait to be run again, as they ran."""
        if rehearsing.get():
            return layer._call_impl(*args, **kwargs)
        failed = False
        if own.why is None:
            if not _has_any_global_hook():  # Torch would not see that one is new.
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
            if failed:  # It was the layer's own error that the compiler met.
                own.why = self.why = None
            raise

    def _run(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with gate().passing(), suppress(_New):
            if self._made is not None:
                return self._made(layer, args, kwargs)
        # Torch looks again, alone: it may have missed what there is, where others who looked sorted the list meanwhile.
        # And it puts the default generator back when it has compiled: to a state in which another stage drew, if one
        # does. That lock comes before the gate, as those who have it pass.
        with undisturbed(), gate().alone():
            if self._made is None:
                self._made = self._make()
            return self._made(layer, args, kwargs)

    def _make(self) -> Callable[..., Any]:
        from splitpipe.compiled.torch_private import optimize

        names: dict[str, Any] = {}
        exec(compile(_CALLED, f"<{self._what}, compiled by splitpipe>", "exec"), names)
        backend = Backend(self._options.backend, self._options.of_inductor(), self._halves)
        # Where a graph would break, an error: such a layer runs as it is, and none of it twice.
        context: Any = optimize(backend, error_on_graph_break=True, dynamic=self._options.dynamic)
        context.callback = _Compiling(self, names["called"].__code__, context.callback)
        made: Callable[..., Any] = context(names["called"])
        return made

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """The block compiles.

        Raises:
            _New: the thread is not alone.
        """
        from splitpipe.compiled.torch_private import config

        if not gate().is_alone:
            raise _New
        # Under the lock of generators' states: torch asks for the default one's, and sets it.
        with state_lock(), config.patch(_SETTINGS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Torch's own, of what it traces: as errors, they would end that.
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
            with suppress(OSError, ValueError):  # A full one, or one that was closed.
                sys.stderr.write(f"splitpipe: compiled {self._what} in {seconds:.1f} s\n")

    def _gave_up(self, error: BaseException) -> str | None:
        """Why the layer runs as it is from now on, if what was raised is the compiler's, so that nothing has run."""
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
                f"compile=True, but torch has nothing to compile with: {_line(missing[0])} Install a C++ compiler (on "
                "GPUs: Triton) or name it in CXX; compile={'backend': 'aot_eager'} needs none, and compiles nothing."
            ) from error
        return f"torch.compile: {_line(chain[-1] if str(chain[-1]) else error)}"


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class _New(Exception):
    """There is something to compile. Nothing has run."""


class _Compiling:
    """What torch calls where there is something to compile, in the thread that needs it, before anything is locked.

    Of other frames that begin meanwhile, nothing is compiled: what a layer sets may free what was there, whose
    finalizer or weak reference's callback runs then.
    """

    def __init__(self, code: Code, called: CodeType, callback: Any) -> None:
        self._code = weakref.ref(code)  # Which has this.
        self._called = called
        self._torchdynamo_orig_backend = callback  # By which torch knows the backend of what it has compiled.

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
    """The call of one layer. A layer's copy has none: copies of it are None."""

    __slots__ = ("_layer", "code", "why")

    def __init__(self, layer: nn.Module, code: Code) -> None:
        self._layer = weakref.ref(layer)  # Which has this.
        self.code = code
        #: Why the layer runs as it is; None if it doesn't.
        self.why: str | None = None

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self._layer()
        return self.code.call(self, layer, args, kwargs)


def runs_compiled(layer: object) -> bool:
    """True if a pipeline has compiled a layer, and nothing but compiled code runs in its call."""
    slot = vars(layer).get("_compiled_call_impl") if isinstance(layer, nn.Module) else None
    slot = getattr(slot, "compiled", slot)  # A block's is inside of the one that its border stands in.
    return isinstance(slot, CompiledCall) and slot.why is None
