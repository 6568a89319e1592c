"""What is said of how a call is divided: values with two readings, or of a wrong size; and what went where."""
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from splitpipe.microbatch.tree import Node, described


def misfit(where: str, flag: Any, value: Any) -> ValueError:
    """The error for flags that don't match a value."""
    return ValueError(
        f"{where} is {described(value)}, but batched says {flag!r} there: expected a nesting that matches the outer "
        "levels of the input; 'rows' for a list; for a tensor, the dimension of the batch, or 'groups'."
    )


def wrong_size(node: Node, size: int, rows: int, batch: str) -> ValueError:
    """The error for a value that has to have the rows of the batch, and doesn't; ``batch`` has shown these."""
    expected = "k for each row" if node.flag == "groups" else "as many"
    return ValueError(
        f"{node.where} has {size} entries, but the batch has {rows} rows, as {batch} has them: expected {expected}. "
        "Reshape it, or change batched=."
    )


def two_readings(node: Node, one: str, other: str, first: Any, latter: Any) -> ValueError:
    """The error for a value that could be one thing or another; ``first``, ``latter``: how ``batched`` says which."""
    shapes = ", ".join([str([*x.shape]) for x in node.tensors[:3]]) + ", ..." * (len(node.tensors) > 3)
    what = f"has the shape {shapes}"
    if node.children is not None:
        what = f"is {described(node.value)}" + (f", with tensors of shapes {shapes}" if shapes else "")
    return ValueError(
        f"{node.where} {what}: it could be {one}, or {other}. Which one is expected? In SplitPipe(..., batched=), "
        f"write {_written(node, first)} for the former, {_written(node, latter)} for the latter."
    )


def _written(node: Node, flag: Any) -> str:
    """``batched=`` for an argument; for a value inside one, and for an input, the flag alone."""
    name = node.where.removeprefix("argument ")
    return f"{{{name}: {flag!r}}}" if name.endswith("'") else repr(flag)


def warn_of_whole(root: Node, rows: int, batch: str, warned: set[str]) -> None:
    """Warns, once, of each tensor that goes whole and has a first dimension that no tensor that is split has."""
    leaves = [x for x in root.leaves if not x.single and isinstance(x.value, Tensor) and x.value.dim()]
    # A mask, or positions, have a size in common with what they are used with.
    known = {0, 1, *[size for leaf in leaves if leaf.times for size in leaf.value.shape]}
    for node in leaves:
        if node.flag is None and node.value.size(0) not in known and node.where not in warned:
            warned.add(node.where)
            warnings.warn(
                f"{node.where} has the shape {[*node.value.shape]}, but {batch} has {rows} rows: every microbatch "
                "gets all of it. That is wrong for something of each row, such as images, edges or offsets of packed "
                f"sequences: write split=. Otherwise, write batched={_written(node, False)}.",
                stacklevel=2,
            )


def treated(root: Node, rows: Sequence[int], batch: str) -> list[str]:
    """How each value of a call was treated, in lines."""
    groups = dict[str, list[str]]()
    for node in root.leaves:
        x, how = node.value, "split between rows" if node.single else "whole"
        if node.dim is not None:
            how = f"split along dimension {node.dim}" + f", {node.times} entries per row" * (node.times > 1)
        what = str(tuple(x.shape)) if isinstance(x, Tensor) else f"({type(x).__name__})"
        groups.setdefault(how, []).extend([f"{node.where} {what}"] * (x is not None))
    found = f"microbatches of {rows[0]} rows of {sum(rows)}, as {batch} has them"
    return [f"{found} (batched= or split= changes how they are split)"] + [
        f"{how}: {', '.join(each[:4])}{', ...' if len(each) > 4 else ''}" for how, each in groups.items() if each
    ]
