"""The backend "splitpipe" of torch.compile: inductor, with a split backward.

AOTAutograd makes a forward and a backward graph from what was traced. The backward is split in two (``halves``), and
each part is compiled. In a stage of a pipeline, the first half runs when autograd reaches the call, and the second
half's arguments wait for W, as with split functions. Anywhere else, one half runs after the other.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule, Node
from torch.nn import Parameter

from splitpipe.compiled.deferred import Deferred, Leftover
from splitpipe.compiled.halves import halved, only_views, values
from splitpipe.compiled.options import verify_compile
from splitpipe.core.torch_private import _current_autograd_node
from splitpipe.deferral.standins import left_in, stand_ins

#: Compiles a graph for some example inputs; ``is_backward``.
Compile = Callable[..., Callable[[list[Any]], Sequence[Any]]]


class Backend:
    """A backend for torch.compile.

    Args:
        inner: the compiler of the graphs: ``"inductor"``, or ``"aot_eager"``, which runs them as they are.
        options: options of inductor.
        halves: False leaves the backward whole, for a model that defers nothing: W would recompute what B has computed.
    """

    def __init__(self, inner: str = "inductor", options: dict[str, Any] | None = None, halves: bool = True) -> None:
        self._inner = inner
        self._options = options or {}
        self._halves = halves

    def __call__(self, graph: GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
        from splitpipe.compiled.torch_private import graph_config

        made = Made(examples, self._halves)
        # The backward is compiled with the forward, since nothing may be compiled in autograd's threads.
        settings = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        with graph_config.patch(settings):
            call = (self._by_inductor if self._inner == "inductor" else self._as_it_is)(graph, examples, made)
        return partial(made.call, call)

    def _by_inductor(self, graph: GraphModule, examples: Sequence[Any], made: Made) -> Callable[..., Any]:
        from splitpipe.compiled.torch_private import inductor

        compile_fx, compile_fx_inner = inductor()

        def inner(part: GraphModule, given: Sequence[Any], **options: Any) -> Any:
            if not options.get("is_backward"):
                return compile_fx_inner(part, given, **options)
            more = {name: value for name, value in options.items() if name != "static_input_idxs"}
            compile = partial(compile_fx_inner, **more)
            return made.backward(part, given, compile) or compile_fx_inner(part, given, **options)

        found: Callable[..., Any] = compile_fx(
            graph, examples, inner_compile=inner, config_patches=self._options or None
        )
        return found

    def _as_it_is(self, graph: GraphModule, examples: Sequence[Any], made: Made) -> Callable[..., Any]:
        from splitpipe.compiled.torch_private import aot_autograd, make_boxed_func, min_cut_partition

        def compile(part: GraphModule, given: Sequence[Any]) -> Any:
            return make_boxed_func(part.forward)

        def backward(part: GraphModule, given: Sequence[Any]) -> Any:
            return made.backward(part, given, compile) or compile(part, given)

        make = aot_autograd(fw_compiler=compile, bw_compiler=backward, partition_fn=min_cut_partition)
        found: Callable[..., Any] = make(graph, examples)
        return found


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
    return Backend(found.backend, found.of_inductor())(graph, examples)


class Made:
    """What is compiled from one traced graph."""

    def __init__(self, examples: Sequence[Any], halves: bool) -> None:
        self._halves = halves
        self._count = len(examples)
        #: Their shapes, by which of the examples they are.
        self._weights = {k: x.shape for k, x in enumerate(examples) if isinstance(x, Parameter) and x.requires_grad}
        self._deferred: Deferred | None = None

    def call(self, compiled: Callable[..., Any], *args: Any) -> Any:
        """Calls the compiled graph."""
        deferred = self._deferred
        stands = None if deferred is None else stand_ins(deferred, [args[k] for k in self._weights])
        if stands is not None:
            given = list(args)
            for k, x in zip(self._weights, stands):
                given[k] = x
            return compiled(*given)
        return compiled(*args)

    def backward(
        self, whole: GraphModule, given: Sequence[Any], compile: Compile
    ) -> Callable[[list[Any]], Sequence[Any]] | None:
        """Compiles a backward in two halves; None if it must stay whole."""
        from splitpipe.compiled.torch_private import keep_what_backward_is_given, strides_of_outputs

        keep_what_backward_is_given()
        if any("rng_state" in str(node.target) for node in whole.graph.nodes):
            raise RuntimeError(
                "its backward draws random numbers again (torch.utils.checkpoint in a layer that draws), for which it "
                "would set the process's generator while other stages draw"
            )
        if not self._halves:
            return None
        outputs: Any = whole.graph.output_node().args[0]
        as_given = len(outputs) == self._count and all(
            not isinstance(outputs[k], Node) or outputs[k].meta["val"].shape == shape
            for k, shape in self._weights.items()
        )
        if not as_given:  # AOTAutograd has replaced the given inputs.
            return None
        found = halved(whole, self._weights, given)
        if found is None:
            return None
        first, strides = None, list[Any]()
        if found.first is not None:
            with strides_of_outputs() as strides:
                first = compile(found.first, values(found.first))
        examples = values(found.second, strides[len(found.inputs):])
        second = found.second.forward if only_views(found.second) else compile(found.second, examples)
        boxed = getattr(second, "_boxed_call", False)
        deferred = Deferred(second if boxed else lambda given: second(*given), found, [*self._weights])
        self._deferred = deferred

        def backward(given: list[Any]) -> list[Any]:
            return _backward(deferred, first, len(outputs), found.inputs, given)

        backward._boxed_call = True  # type: ignore[attr-defined]  # It empties the list, so that its tensors are freed.
        return backward


def _backward(
    deferred: Deferred,
    first: Callable[[list[Any]], Sequence[Any]] | None,
    count: int,
    inputs: Sequence[int],
    given: list[Any],
) -> list[Any]:
    gradients: list[Any] = [None] * count
    rest = list(given)
    given.clear()
    if first is not None:
        made = list(first(rest))
        for number, gradient in zip(inputs, made):
            gradients[number] = gradient
        rest = made[len(inputs):]
        del made
    if left_in(_current_autograd_node(), deferred, partial(Leftover, rest)):
        return gradients
    for number, gradient in deferred.gradients(rest):
        gradients[number] = gradient
    return gradients
