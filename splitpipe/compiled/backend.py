"""The backend "splitpipe" of torch.compile, inductor with a split backward; and the values of ``compile=``.

AOTAutograd makes a forward and a backward graph from what was traced. The backward is split in two (``halves``), and
each part is compiled. In a stage of a pipeline, the first half runs when autograd reaches the call, and the second
half's arguments wait for W, as with split functions. Anywhere else, one half runs after the other.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.fx import GraphModule

from splitpipe.compiled.halves import TracedGraph, boxed

INNER = ("inductor", "aot_eager")
_GRAPHED = ("reduce-overhead", "max-autotune")
#: Of AOTAutograd: the backward is compiled with the forward, since a call must know what its backward leaves for W.
_SETTINGS = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}


@dataclass(frozen=True)
class CompileOptions:
    """Options of torch.compile."""

    backend: str = "inductor"  # The compiler of the graphs, or aot_eager, which runs them op by op.
    dynamic: bool | None = None  # As for torch.compile: None compiles again for a second batch size, then for all.
    mode: str | None = None  # Of inductor, such as "max-autotune-no-cudagraphs".
    options: Mapping[str, Any] = field(default_factory=dict)  # Of inductor.

    def of_inductor(self) -> dict[str, Any]:
        """The settings for inductor."""
        if self.mode in (None, "default"):
            return {**self.options}
        from splitpipe.compiled.torch_private import mode_options

        return {**mode_options(str(self.mode), self.dynamic), **self.options}


def verify_compile(compile: object) -> CompileOptions | None:
    """The options to compile with; None: nothing is compiled. Raises TypeError or ValueError for wrong ones."""
    if compile is None or compile is False:
        return None
    if compile is True:
        return CompileOptions()
    names = list(CompileOptions.__dataclass_fields__)
    if not isinstance(compile, Mapping):
        raise TypeError(f"compile is {compile!r}: expected True, False, or a dict of {', '.join(names)}.")
    unknown = [name for name in compile if name not in names]
    if unknown:
        why = ", since each layer is compiled as one graph" if "fullgraph" in unknown else ""
        raise TypeError(f"compile has {', '.join(map(repr, unknown))}: expected some of {', '.join(names)}{why}.")
    found = CompileOptions(**compile)
    if found.backend not in INNER:
        raise ValueError(
            f"compile has the backend {found.backend!r}: expected {' or '.join(map(repr, INNER))}, whose backward "
            "can be split in two. For another backend, compile layers yourself: layer.compile(backend=...)."
        )
    if found.dynamic is not None and not isinstance(found.dynamic, bool):
        raise TypeError(f"compile has dynamic={found.dynamic!r}: expected True, False or None.")
    if not isinstance(found.options, Mapping):
        raise TypeError(f"compile has options={found.options!r}: expected a dict of inductor's options.")
    if found.mode in _GRAPHED or found.options.get("triton.cudagraphs"):
        raise ValueError(
            "compile asks for CUDA graphs, which have memory for only one microbatch at a time: expected another mode "
            "than 'reduce-overhead', and 'max-autotune-no-cudagraphs' instead of 'max-autotune'."
        )
    return found


class Backend:
    """A backend for torch.compile; without ``halves``, a backward stays whole, for a model that defers nothing."""

    def __init__(self, options: CompileOptions, halves: bool = True) -> None:
        # Halves that aren't separated in time cost more: W recomputes what B has computed.
        self._inner, self._options, self._halves = options.backend, options.of_inductor(), halves

    def __call__(self, graph: GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from splitpipe.compiled.torch_private import graph_config

        traced = TracedGraph(examples, self._halves)
        with graph_config.patch(_SETTINGS):
            call = (self._by_inductor if self._inner == "inductor" else self._as_it_is)(graph, examples, traced)
        return partial(traced.call, call)

    def _by_inductor(self, graph: GraphModule, examples: Sequence[Any], traced: TracedGraph) -> Any:
        from splitpipe.compiled.torch_private import inductor

        compile_fx, compile_fx_inner = inductor()

        def inner(part: GraphModule, given: Sequence[Any], **options: Any) -> Any:
            halves = None
            if options.get("is_backward"):
                more = {name: value for name, value in options.items() if name != "static_input_idxs"}
                halves = traced.backward(part, given, partial(compile_fx_inner, **more))
            return halves or compile_fx_inner(part, given, **options)

        return compile_fx(graph, examples, inner_compile=inner, config_patches=self._options or None)

    def _as_it_is(self, graph: GraphModule, examples: Sequence[Any], traced: TracedGraph) -> Any:
        from splitpipe.compiled.torch_private import aot_autograd, min_cut_partition

        def compile(part: GraphModule, given: Sequence[Any]) -> Any:
            return boxed(lambda given: part.forward(*given))

        def backward(part: GraphModule, given: Sequence[Any]) -> Any:
            return traced.backward(part, given, compile) or compile(part, given)

        return aot_autograd(fw_compiler=compile, bw_compiler=backward, partition_fn=min_cut_partition)(graph, examples)


def backend(
    graph: GraphModule, examples: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(layer, backend="splitpipe")``, for layers that the user compiles; the name under which torch
    knows it.

    Args:
        graph: the traced graph.
        examples: its example inputs.
        mode: as for torch.compile, for inductor.
        options: options of inductor; ``{"backend": "aot_eager"}`` runs graphs as they are.

    Example:
        >>> layer = torch.compile(torch.nn.Linear(2, 2), backend="splitpipe")
    """
    more = dict(options or {})
    inner = more.pop("backend", "inductor")
    found = verify_compile({"backend": inner, "mode": mode, "options": more})
    assert found is not None
    return Backend(found)(graph, examples)
