"""The private names of torch that compiling needs. Imported when a layer is first compiled, since it takes seconds."""
# mypy: implicit-reexport
# ruff: noqa: F401
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from splitpipe.core import torch_private
from splitpipe.core.torch_private import names_in, needed, require

EXPECTED = f"{torch_private.EXPECTED}, or a SplitPipe without compile="

with needed("to compile layers with a custom backend, and to split their backward in two", EXPECTED):
    from torch._dynamo import config
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as graph_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_partition
    from torch._guards import TracingContext

require(config, "recompile_limit", "to compile as many graphs as equal layers need", EXPECTED)
require(config, "skip_nnmodule_hook_guards", "to see hooks that are added later", EXPECTED)
require(config, "allow_unspec_int_on_nn_module", "to avoid a graph for each value of a layer's number", EXPECTED)
require(graph_config, "force_non_lazy_backward_lowering enable_autograd_cache",
        "to compile the backward with the forward", EXPECTED)
require(names_in(TracingContext.__init__), "fw_metadata",
        "to make the backward write to none of its arguments", EXPECTED)
require(TracingContext, "report_output_strides", "to know the layout of outputs", EXPECTED)


def inductor() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Inductor's functions for compiling traced code, and for compiling one graph."""
    with needed("to compile graphs with inductor", EXPECTED):
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    return compile_fx, compile_fx_inner


def mode_options(mode: str, dynamic: bool | None) -> Any:
    """Inductor's options for a mode."""
    with needed("to know the modes of torch.compile", EXPECTED):
        from torch._inductor import list_mode_options
    return list_mode_options(mode, dynamic)
