"""The private names of torch that compiling needs. Imported when a layer is first compiled, since it takes seconds."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from splitpipe.core import torch_private
from splitpipe.core.torch_private import Attribute, names_in, needed, verify

EXPECTED = f"{torch_private.EXPECTED}, or a SplitPipe without compile="

with needed("to compile functions with a custom backend", EXPECTED):
    from torch._dynamo import config as config
    from torch._dynamo import optimize as optimize
    from torch._dynamo.types import ConvertFrameReturn as ConvertFrameReturn

with needed("to make a backward graph, and to split it in two", EXPECTED):
    from torch._dynamo.backends.common import aot_autograd as aot_autograd
    from torch._functorch import config as graph_config
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch._functorch._aot_autograd.utils import make_boxed_func as make_boxed_func
    from torch._functorch.partitioners import default_partition as default_partition
    from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_partition
    from torch._guards import TracingContext as TracingContext

__all__ = [
    "ConvertFrameReturn", "aot_autograd", "config", "default_partition", "graph_config", "inductor",
    "keep_what_backward_is_given",
    "make_boxed_func", "min_cut_partition", "mode_options", "optimize", "strides_of_outputs",
]

_DONATED = "to make the backward write to none of its arguments"

ATTRIBUTES = [
    Attribute(config, "recompile_limit", "to compile as many graphs as equal layers need"),
    Attribute(config, "fail_on_recompile_limit_hit", "to notice layers that need more graphs than that"),
    Attribute(config, "skip_nnmodule_hook_guards", "to see hooks that are added later"),
    Attribute(config, "allow_unspec_int_on_nn_module", "to avoid a graph for each value of a layer's number"),
    Attribute(graph_config, "force_non_lazy_backward_lowering", "to compile the backward with the forward"),
    Attribute(graph_config, "enable_autograd_cache", "to compile the backward with the forward"),
    Attribute(TracingContext, "try_get", _DONATED),
    Attribute(names_in(TracingContext.__init__), "fw_metadata", _DONATED),
    Attribute(ViewAndMutationMeta, "bw_donated_idxs", _DONATED),
    Attribute(TracingContext, "report_output_strides", "to know the layout of outputs"),
]
verify(ATTRIBUTES, EXPECTED)


def keep_what_backward_is_given() -> None:
    """Makes the backward that is being compiled write to none of its arguments: W or another backward may need them."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


@contextmanager
def strides_of_outputs() -> Iterator[list[Any]]:
    """The strides, if known, of each output of a graph that is compiled in the block."""
    with TracingContext.report_output_strides() as found:
        yield [] if found is None else found


def inductor() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Inductor's functions for compiling traced code, and for compiling one graph."""
    with needed("to compile graphs with inductor", EXPECTED):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    return compile_fx, compile_fx_inner


def mode_options(mode: str, dynamic: bool | None) -> Mapping[str, Any]:
    """Inductor's options for a mode."""
    with needed("to know the modes of torch.compile", EXPECTED):
        from torch._inductor import list_mode_options
    found: Mapping[str, Any] = list_mode_options(mode, dynamic)
    return found
