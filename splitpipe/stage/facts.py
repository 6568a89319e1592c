"""Facts about a stage that its runs have shown, and that are kept from call to call."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Generator

from splitpipe.core.rng import RngMode
from splitpipe.deferral.report import Sightings
from splitpipe.stage.snapshot import Clones


@dataclass
class StageFacts:
    """The facts that runs of a stage have shown, for one setting of its layers' train and eval modes."""

    rng: RngMode = RngMode.UNKNOWN
    generators: Collection[Generator] | None = None
    #: Whether the stage writes to its input in place. None: no run yet.
    in_place: bool | None = None
    compared: bool = False
    #: Whether its layers read no statistics of a BatchNorm that is in training, as the run that was compared has shown.
    apart: bool = False
    #: Whether a run has noted which parameters are used by functions without a rule.
    noted: bool = False


@dataclass
class StageCache:
    """The things of a stage that are kept from call to call. Copies of a model start without."""

    known: dict[tuple[bool, ...], StageFacts] = field(default_factory=dict)
    clones: Clones = field(default_factory=Clones)
    sightings: Sightings = field(default_factory=Sightings)
