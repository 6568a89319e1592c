"""The report on deferral: which parameters have their gradients deferred, and why others don't.

It is made on demand, from what walks of each stage's graph have seen, until all its parameters are known.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from splitpipe.backward.graph_walk import RULES, Walk, leaf_of
from splitpipe.schedule.draw.measures import aligned
from splitpipe.schedule.op import counted

#: What is said of each use of one parameter, and whether its gradient is deferred.
Uses = dict[str, bool]


def uses(roots: Iterable[GradientEdge], ends: Collection[Any], graph: Walk, hooked: bool) -> dict[int, Uses]:
    """The uses of leaves in a graph that was walked, by identity; ``hooked``: hooks were set while it was made."""
    seen: dict[int, Uses] = {}
    owned: dict[Any, set[int]] = {}
    for node, own in (*graph.weight_nodes.items(), *graph.stand_ins.items()):
        owned[node] = {id(x) for x in own.weights if x is not None}
        for key in owned[node]:
            seen.setdefault(key, {})[getattr(own.accumulate, "__self__", own.accumulate).__name__] = True
    refused = ": a hook was set in this forward" if hooked else ": its rule doesn't take this call"
    visited = {None, *ends}
    stack: list[Any] = [edge.node for edge in roots]
    while stack:
        if (node := stack.pop()) in visited:
            continue
        visited.add(node)
        kind = type(node)
        for after, _ in node.next_functions:
            leaf, _ = leaf_of(after)
            if leaf is None:
                stack.append(after)
            elif id(leaf) not in owned.get(node, ()):
                why = refused if kind in RULES else " has no rule"
                seen.setdefault(id(leaf), {})[kind.__name__ + why] = False
    return seen


@dataclass(frozen=True)
class Row:
    """One parameter: ``why`` names the functions that defer its gradient, or a part of it, or is the reason why not."""

    parameter: str
    stage: int
    elements: int
    deferred: bool
    why: str


@dataclass(frozen=True)
class DeferralReport:
    """A row for every parameter, in the model's order. ``print`` shows a table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        cells = [("parameter", "stage", "deferred", "why")]
        cells += [(row.parameter, str(row.stage), "yes" if row.deferred else "no", row.why) for row in self.rows]
        lines, deferred = aligned(cells, "<<<<"), [row for row in self.rows if row.deferred]
        part, total = sum(row.elements for row in deferred), sum(row.elements for row in self.rows)
        share = f", {part / total:.1%} of the elements" if total else ""
        return "\n".join([*lines, f"deferred: {len(deferred)} of {counted(len(self.rows), 'parameter')}{share}"])


def report(
    parameters: Iterable[tuple[str, int, Tensor]], stages: Mapping[int, Mapping[int, Uses] | None], split: bool
) -> DeferralReport:
    """The report on parameters, which are given with their names and stages.

    ``stages``: what was seen on each; ``split``: whether weight gradients are deferred at all.
    """
    rows: dict[int, Row] = {}
    for name, stage, x in parameters:
        use = (stages.get(stage) or {}).get(id(x), {}) if split and x.requires_grad else {}
        late, now = [", ".join(sorted([text for text in use if use[text] is late])) for late in (True, False)]
        if not x.requires_grad:
            why = "it is frozen"
        elif not split:
            why = "backward='autograd'"
        elif late and now:
            why = f"{late}; by autograd: {now}"
        else:
            why = late or now or "not known yet: no step has used it"
        rows.setdefault(id(x), Row(name, stage, x.numel(), bool(late), why))
    return DeferralReport(tuple(rows.values()))
