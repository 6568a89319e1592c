"""The private names of torch that the package uses; ``distributed`` and ``compiled`` have similar files.

If a later torch breaks the package, it does so here, with one sentence about what is missing and what it was for. All
names exist in torch 2.11 and older versions, unless a line says otherwise. Other files import them from here, so that
calls cost no more than before; attributes of objects can't be imported, so they are listed and looked up once.
"""
# mypy: implicit-reexport
# ruff: noqa: F401, I001
from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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


# Imported.

with needed("to profile worker threads"):
    from torch._C._autograd import _profiler_enabled  # True where torch.profiler records what this thread does.

with needed("to split a model's inputs into microbatches"):
    from torch.utils._pytree import TreeSpec  # The structure of a value of tuples, lists and dicts.
    from torch.utils._pytree import tree_flatten, tree_unflatten  # A value as leaves and structure, and back.
    from torch.utils._pytree import tree_leaves, tree_map_only  # Only its leaves; a function on leaves of a class.

with needed("to run layers under the function modes of the thread that called the model"):
    from torch._C import _len_torch_function_stack  # The number of modes that see this thread's functions.
    from torch._C import _get_function_stack_at  # One of them, the outermost at 0.
    from torch._C import _pop_torch_function_stack, _push_on_torch_function_stack  # Without entering any.
    from torch.overrides import _get_current_function_mode_stack  # The modes, outermost first.
    from torch.utils._device import DeviceContext  # The mode of a default device: it observes nothing.

with needed("to run layers under the dispatch modes of the thread that called the model"):
    from torch._C import _len_torch_dispatch_stack  # The number of modes that see this thread's operators.
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # The modes, outermost first.
    from torch.utils._python_dispatch import _pop_mode, _push_mode  # Without entering any.
    from torch.utils._python_dispatch import TorchDispatchMode  # Public, but for its file.

with needed("to hide functions from subclasses of Tensor and modes"):
    from torch._C import DisableTorchFunction  # Off for subclasses and modes.
    from torch._C import DisableTorchFunctionSubclass, _EnableTorchFunction  # Off, and on, for subclasses.
    from torch._C import _is_torch_function_enabled  # True if it is on for subclasses.

with needed("to run layers under the grad mode and the autocast of the thread that called the model"):
    from torch._C import _set_grad_enabled  # Like torch.set_grad_enabled, unseen by function modes.
    from torch._C import _DisableAutocast, _is_any_autocast_enabled  # For all types of device at once.

with needed("to run layers under the saved-tensor hooks of the thread that called the model"):
    from torch._C._autograd import _pop_saved_tensors_default_hooks, _push_saved_tensors_default_hooks
    from torch._C._autograd import _saved_tensors_hooks_disable, _saved_tensors_hooks_enable
    from torch._C._autograd import _saved_tensors_hooks_get_disabled_error_message  # None where they are enabled.
    from torch._C._autograd import _top_saved_tensors_default_hooks  # The innermost pair, the only one called.

with needed("to tell one backward call from another"):
    from torch._C import _current_graph_task_id  # The number of the call that this thread runs; -1 outside.
    from torch._C import _current_autograd_node  # The node whose backward this thread runs.
    from torch._C import _will_engine_execute_node  # True if that call runs through a node.
    from torch._C._autograd import _get_current_graph_task_keep_graph  # True if it has retain_graph.
    # What a backward call passes to the threads of devices, "context" by name: the context variables of its caller.
    from torch._C import _get_obj_in_tls, _is_key_in_tls, _stash_obj_in_tls

with needed("to end what belongs to a backward call together with it"):
    #: Makes the running backward call end with a function, if it succeeds. Public since torch 2.15.
    queue_callback: Callable[[Callable[[], None]], None] = (
        getattr(graph, "queue_callback", None) or Variable._execution_engine.queue_callback
    )

with needed("to walk through the autograd graph"):
    from torch._C import _functions
    from torch._C._autograd import _get_sequence_nr  # The number of this thread's next node.
    from torch.autograd.function import _SingleLevelFunction  # The base of Function, without torch.func.
    from torch.autograd.graph import _engine_run_backward  # autograd.grad, with a node's outputs among the ends.
    AccumulateGrad: Any = _functions.AccumulateGrad  # type: ignore[attr-defined,unused-ignore]  # The node of a leaf.

with needed("to run layers uncompiled if hooks of all modules must see them"):
    from torch.nn.modules.module import _has_any_global_hook

with needed("to notice when torch.utils.checkpoint recomputes"):
    from torch._C import _get_graph_exec_group, _set_graph_exec_group  # The group that it looks up before that.

with needed("to write to buffers in a recomputation without autograd noticing"):
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

with needed("to compute on many tensors in one call"):
    from torch import _foreach_add, _foreach_add_, _foreach_copy_

with needed("to raise an error inside a transform of torch.func"):
    from torch._C._functorch import peek_interpreter_stack  # None outside one.

with needed("to keep torch.compile out of the pipeline itself"):
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    from torch._compile import _disable_dynamo  # Like torch.compiler.disable, without importing the compiler.

with needed("to find batch norms, and hooks that observe a module"):
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase  # The bases for every number of dimensions.
    from torch.nn.modules.module import _has_any_global_hook  # Hooks of all modules.

with needed("to look into tensors that contain others"):
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

with needed("to prevent a pipeline from being moved to a device"):
    from torch._C._nn import _parse_to  # The arguments of nn.Module.to.

with needed("to restore the caller's current device"):
    from torch._C import _accelerator_maybeExchangeDevice  # The end of torch.accelerator.device_index.

with needed("to notice hooks on what layers have computed"):
    from torch.utils.hooks import RemovableHandle  # Each hook gets one, with the next number.

    _ = RemovableHandle.next_id

#: Clones many tensors in one call. None: torch 2.11 doesn't have it.
_foreach_clone: Any = getattr(torch, "_foreach_clone", None)
#: Calls a function's body with modes that see what it calls. None: since torch 2.13. Attention is then one call.
_skip_one_hop_torch_function: Any = getattr(torch._C, "_skip_one_hop_torch_function", None)


# From C++: what autograd passes to its own threads, and no Python function does.

class SharedPointer(ctypes.Structure):
    """A std::shared_ptr, with more words than registers, so that every ABI returns it in memory."""

    _fields_ = [("words", ctypes.c_void_p * 4)]


class ProfilerState(NamedTuple):
    """Gets and sets a thread's part in a profile: where records are stored, and the callbacks that make them."""

    get_info: Any  # () -> SharedPointer, which counts as a reference until it is passed to set_info.
    set_info: Any  # (its address); it is empty afterwards.
    get_callbacks: Any  # () -> the address of the thread's callbacks.
    set_callbacks: Any  # (an address), from which they are copied.
    clear_callbacks: Any


def _profiler_state() -> ProfilerState | None:
    folder = Path(torch.__file__).parent / "lib"
    try:
        c10, cpu = ctypes.PyDLL(str(folder / "libc10.so")), ctypes.PyDLL(str(folder / "libtorch_cpu.so"))
        found = ProfilerState(
            c10["_ZN3c1020ThreadLocalDebugInfo7currentEv"],
            c10["_ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E"],
            cpu["_ZN2at24get_record_function_tls_Ev"],
            cpu["_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE"],
            cpu["_ZN2at25clearThreadLocalCallbacksEv"],
        )
    except (OSError, AttributeError):
        return None
    for function in found:
        function.restype, function.argtypes = None, []
    found.get_info.restype, found.get_callbacks.restype = SharedPointer, ctypes.c_void_p
    found.set_info.argtypes = found.set_callbacks.argtypes = [ctypes.c_void_p]
    return found


#: None: not on Linux, or torch has other names for it.
profiler_state = _profiler_state()


# Read from objects.

class Attribute(NamedTuple):
    """A private attribute, read from an object."""

    owner: object  # The class that has it, or an instance.
    name: str
    purpose: str


def names_in(function: Any) -> SimpleNamespace:
    """Represents an instance that can't be made here: it has the names that a function of its class uses or sets."""
    return SimpleNamespace(**dict.fromkeys(inspect.unwrap(function).__code__.co_names))


_MODULE = nn.Module()  # The class doesn't have the attributes that __init__ sets.
_STATE = "to see what a module contains, and whether that has changed, without its __getattr__"
_HOOKS = "to see whether hooks observe a module"

ATTRIBUTES = [
    Attribute(Tensor, "_version", "to notice that a tensor was written to in place"),
    Attribute(Tensor, "_base", "to find the parameter that a tensor is a view of"),
    Attribute(Tensor, "_is_view", "to find outputs that are views, which autograd treats differently"),
    Attribute(Tensor, "_backward_hooks", "to call a leaf's hooks with its gradient when the schedule computes it"),
    Attribute(Tensor, "_post_accumulate_grad_hooks", "to keep the hooks of a parameter that is swapped when it moves"),
    Attribute(Tensor, "_indices", "to look into sparse tensors"),
    Attribute(Tensor, "_values", "to look into sparse tensors"),
    Attribute(torch.UntypedStorage, "_cdata", "to tell whether two tensors share their memory"),
    Attribute(AccumulateGrad, "_sequence_nr", "to find the nodes that a forward has made"),
    Attribute(torch._C._FunctionBase, "_sequence_nr", "to find the nodes that a forward has made"),
    Attribute(torch._C._FunctionBase, "_set_sequence_nr", "to choose which of the ready nodes runs first"),
    Attribute(Function, "_backward_cls", "to find the nodes of split functions in a graph"),
    Attribute(Function._backward_cls, "_forward_cls", "to find the package's own nodes in a graph"),
    Attribute(forward_ad, "_current_level", "to raise an error inside forward-mode AD"),
    Attribute(nn.Module, "_apply", "to change the dtype of all tensors, and not their devices"),
    Attribute(nn.Module, "_save_to_state_dict", "to save a wrapped module as its class does"),
    Attribute(nn.Module, "_load_from_state_dict", "to load a wrapped module as its class does"),
    Attribute(nn.Module, "_compiled_call_impl", "to find modules compiled in place, and to intercept calls"),
    Attribute(nn.Module, "_call_impl", "to call a block whose calls are intercepted"),
    Attribute(_MODULE, "_modules", _STATE),
    Attribute(_MODULE, "_parameters", _STATE),
    Attribute(_MODULE, "_buffers", _STATE),
    Attribute(_MODULE, "_forward_pre_hooks", _HOOKS),
    Attribute(_MODULE, "_forward_hooks", _HOOKS),
    Attribute(_MODULE, "_backward_pre_hooks", _HOOKS),
    Attribute(_MODULE, "_backward_hooks", _HOOKS),
    Attribute(_NormBase, "_check_input_dim", "to raise torch's errors for inputs that a batch norm can't take"),
]

#: Read with getattr and a default, or on classes that torch imports late. A missing one counts as not set.
LATE = {
    "_raw_saved_tensors": "of a node of Python's: what it has saved, packed",
    "_raw_saved_input": "of a node: what it has saved, with its hooks",
    "_raw_saved_indices": "of a node: what it has saved, with its hooks",
    "_saved_input": "of a node: what it has saved",
    "_saved_weight": "of a node: what it has saved",
    "_saved_indices": "of a node: what it has saved",
    "_saved_weight_sym_argsize_0": "of an embedding's node: the rows of the table",
    "_saved_padding_idx": "of an embedding's node: the row without a gradient",
    "_saved_sparse": "of an embedding's node",
    "_saved_scale_grad_by_freq": "of an embedding's node",
    "_raw_saved_mat1": "of an addmm's node: the left matrix, with its hooks",
    "_raw_saved_self": "of an mm's node: the left matrix, with its hooks",
    "_saved_mat1": "of an addmm's node: the left matrix",
    "_saved_self": "of an mm's node: the left matrix",
    "_saved_stride": "of a convolution's node",
    "_saved_padding": "of a convolution's node",
    "_saved_dilation": "of a convolution's node",
    "_saved_transposed": "of a convolution's node",
    "_saved_output_padding": "of a convolution's node",
    "_saved_groups": "of a convolution's node",
    "_saved_alpha": "of an addmm's node: the factor of the product",
    "_saved_beta": "of an addmm's node: the factor of the bias",
    "_input_metadata": "of a node: shapes and dtypes of its output's gradients",
    "_mode_key": "of a dispatch mode: the key of those that torch itself has, as FakeTensorMode",
    "_checkpoint_internal": "of a pack hook: it is one of torch.utils.checkpoint's, since torch 2.14",
    "_user_hooks": "of such a pack hook, while it is entered: the user's hooks around it",
    "_active_ddp_module": "of DistributedDataParallel: the wrapper whose forward runs",
    "_local_tensor": "of a DTensor: this process's part, which may be pending",
    "_boxed_call": "of a compiled graph: it empties the list of its arguments",
    "_torchdynamo_orig_backend": "of what torch calls to compile: by which it knows the backend",
    "_orig_mod": "of what torch.compile made of a module: the module",
    "_torchdynamo_orig_callable": "of what torch.compile made of a function: the function",
}


def verify(attributes: list[Attribute], expected: str = EXPECTED) -> None:
    """Looks up each of the attributes; raises an ImportError about a missing one."""
    for owner, name, purpose in attributes:
        with needed(purpose, expected):
            getattr(owner, name)


verify(ATTRIBUTES)
