"""The promise, for layers that the pipeline compiles: with a backward in two halves, by inductor's front end."""
from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from splitpipe.compiled.layers import Code
from tests.helpers import scheduled
from tests.helpers.compiling import EAGER
from tests.helpers.compiling import codes as codes
from tests.helpers.compiling import nothing_compiled as nothing_compiled
from tests.helpers.covering import graded, pairs
from tests.helpers.deferring import double as double
from tests.helpers.twin import assert_transparent
from tests.promise.layers import LAYERS, batched_of

pytestmark = pytest.mark.usefixtures("nothing_compiled")
AXES: dict[str, list[Any]] = {
    "name": [*LAYERS],
    "by": ["balance", "cuts"],
    "way": ["drop-in", ("1f1b", 2), ("zb-h1", 2), ("zb-v", 1)],
    "sizes": [(4, 2), (5, 2), (3, 8)],
    "checkpoint": ["always", "never"],
}
#: What torch does not compile as one graph, and so runs as it is.
WHOLE = {"lstm", "gru", "time first", "gradient inside forward"}


def possible(name: str, way: Any, **_: Any) -> bool:
    """With a schedule, reentrant checkpoints are refused."""
    return way == "drop-in" or not name.endswith("reentrant")


@graded(
    AXES, essence=[["way"]], thorough=[["name"], *pairs(["by", "way", "sizes", "checkpoint"])],
    allowed=possible,
)
def test_a_compiled_pipeline_is_its_module(
    name: str, by: str, way: Any, sizes: tuple[int, int], checkpoint: str, codes: list[Code]
) -> None:
    make, value = LAYERS[name]
    size, chunks = sizes
    module = nn.Sequential(*make())
    options = {"by": by, "chunks": chunks, "checkpoint": checkpoint,
               "compile": EAGER, "batched": batched_of(name, by)}
    if way == "drop-in":
        assert_transparent(module, value(size), **options)
    else:
        scheduled.assert_transparent(module, value(size), *way, **options)
    assert [code.why for code in codes if code.why] == [] or name in WHOLE
