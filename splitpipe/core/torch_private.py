"""The private names of torch that the package uses; ``distributed`` and ``compiled`` have similar files.

If a later torch breaks the package, it does so here, with one sentence about what is missing and what it was for. Other
files import the names from here; attributes of objects can't be imported, so they are listed and looked up once. Not
listed is what is read with a default, or from nodes and classes that don't exist yet: a missing one counts as not set.
"""
# mypy: implicit-reexport
# ruff: noqa: F401, I001
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable, forward_ad, graph

#: The versions with which the tests have run, as in setup.cfg.
EXPECTED = "torch>=2.11,<2.16"


@contextmanager
def needed(purpose: str, expected: str = EXPECTED) -> Iterator[None]:
    """Around imports of private names: raises an ImportError about which one is missing, and its purpose."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"found torch {torch.__version__} without a private name that splitpipe needs {purpose} ({error}); "
            f"expected {expected}: install one of these, or a newer splitpipe"
        ) from error


with needed("to run layers in the state of the thread that called the model"):
    from torch._C import DisableTorchFunction  # Off for subclasses and modes.
    from torch._C import _len_torch_dispatch_stack  # The number of modes that see this thread's operators.
    from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack  # Without entering any.
    from torch._C._autograd import _profiler_enabled  # True where torch.profiler records what this thread does.
    from torch._C._autograd import _top_saved_tensors_default_hooks  # The innermost pair, the only one called.
    from torch.overrides import _get_current_function_mode_stack  # The modes, outermost first.
    from torch.utils._device import DeviceContext  # The mode of a default device: it observes nothing.

with needed("to split a model's inputs into microbatches"):
    from torch.utils._pytree import tree_flatten, tree_unflatten  # A value as leaves and structure, and back.

with needed("to run and to tell apart backward calls"):
    from torch._C import _current_graph_task_id  # The number of the call that this thread runs; -1 outside.
    from torch._C import _current_autograd_node  # The node whose backward this thread runs.
    from torch._C import _will_engine_execute_node  # True if that call runs through a node.
    from torch._C._autograd import _get_current_graph_task_keep_graph  # True if it has retain_graph.
    from torch._C._autograd import _get_sequence_nr  # The number of this thread's next node.
    from torch._C._functorch import peek_interpreter_stack  # None outside a transform of torch.func.
    from torch.utils.hooks import RemovableHandle  # Each hook gets one, with the next number.

    #: Makes the running backward call end with a function, if it succeeds. Public since torch 2.15.
    queue_callback: Callable[[Callable[[], None]], None] = (
        getattr(graph, "queue_callback", None) or Variable._execution_engine.queue_callback
    )
    #: autograd.grad, with a node's outputs among the ends, without a look whether it is logged.
    run_backward: Any = Variable._execution_engine.run_backward

with needed("to keep torch.compile out of the pipeline itself"):
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    from torch._compile import _disable_dynamo  # Like torch.compiler.disable, without importing the compiler.

with needed("to look into tensors and modules, and to compute on many in one call"):
    from torch import _foreach_add, _foreach_add_, _foreach_copy_
    from torch._C import _accelerator_maybeExchangeDevice  # The end of torch.accelerator.device_index.
    from torch.nn.modules.batchnorm import _BatchNorm  # The base for every number of dimensions.
    from torch.nn.modules.module import _has_any_global_hook  # Hooks of all modules.


def require(owner: object, names: str, purpose: str, expected: str = EXPECTED) -> None:
    """Raises an ImportError if a class or an instance lacks one of these attributes."""
    for name in names.split():
        with needed(purpose, expected):
            getattr(owner, name)


def names_in(function: Any) -> SimpleNamespace:
    """Represents an instance that can't be made here: it has the names that a function of its class uses or sets."""
    return SimpleNamespace(**dict.fromkeys(inspect.unwrap(function).__code__.co_names))


require(Tensor, "_version _base _backward_hooks _post_accumulate_grad_hooks",
        "to see that a tensor was written to or has a base, and to call its hooks once")
require(Function, "_sequence_nr _set_sequence_nr _backward_cls", "to find nodes, and choose which runs first")
require(RemovableHandle, "next_id", "to notice hooks that a forward adds")
require(forward_ad, "_current_level", "to raise an error inside forward-mode AD")
# The class of modules doesn't have the attributes that __init__ sets.
require(nn.Module(), "_apply _load_from_state_dict _compiled_call_impl _call_impl _modules _parameters _buffers "
        "_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks",
        "to convert and load modules, to intercept their calls, and to see what they contain")
require(_BatchNorm, "_check_input_dim", "to raise torch's errors for inputs that a batch norm can't take")
