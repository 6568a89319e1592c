"""The report on deferral of a pipelined module."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from splitpipe.deferral.report import DeferralReport, Row, row
from splitpipe.stage.layers import StageCache


def report(
    module: nn.Module, stage_of: Mapping[nn.Module, int], caches: Sequence[StageCache], split: bool
) -> DeferralReport:
    """The report on deferral, from the uses of parameters seen in the stages' forwards."""
    rows: list[Row] = []
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        stage = stage_of.get(part, 0)
        cache = caches[stage]
        unseen = "no function was seen to use it in a forward with grad mode (compiled code isn't seen)"
        if not split:
            unseen = "backward='autograd'"
        elif any(facts.whole for facts in cache.facts.values()):
            unseen = "the graph of its stage can't be cut out of the surrounding graph"
        elif not any(facts.noted for facts in cache.facts.values()):
            unseen = "not known yet: run a step first"
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                own = f"{prefix}.{name}" if prefix else name
                rows.append(row(own, stage, parameter, cache.sightings.find(parameter), unseen))
    return DeferralReport(tuple(rows))
