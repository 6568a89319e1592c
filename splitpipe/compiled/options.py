"""The values of ``compile=``."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INNER = ("inductor", "aot_eager")
_GRAPHED = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class CompileOptions:
    """Options of torch.compile."""

    backend: str = "inductor"  # The compiler of the graphs, or aot_eager, which runs them op by op.
    dynamic: bool | None = None  # As for torch.compile: None compiles again for a second batch size, then for all.
    mode: str | None = None  # Of inductor, such as "max-autotune-no-cudagraphs".
    options: Mapping[str, Any] = field(default_factory=dict)  # Of inductor.

    def of_inductor(self) -> dict[str, Any]:
        """The settings for inductor."""
        found: dict[str, Any] = {}
        if self.mode not in (None, "default"):
            from splitpipe.compiled.torch_private import mode_options

            found.update(mode_options(str(self.mode), self.dynamic))
        return {**found, **self.options}


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
