"""The pages that the playground shows, one for each choice, written while mkdocs builds the site."""
from __future__ import annotations

from itertools import product

from splitpipe.schedule import Costs, Schedule, build, names, simulate
from splitpipe.schedule.draw import html

# The values of the choices on docs/playground.md, which a test compares with these.
DEVICES = 2, 4, 8
CHUNKS = 4, 8, 16
COSTS = "equal", "copies", "attention", "uneven"


def costs_of(choice: str, schedule: Schedule) -> Costs:
    """The costs of a choice."""
    if choice == "copies":
        return Costs(copy=0.25)
    if choice == "attention":
        return Costs(forward=3, backward_input=4, backward_weight=2)
    if choice == "uneven":
        share = schedule.devices / schedule.stages
        each = [2 * share] + [share] * (schedule.stages - 1)
        return Costs(forward=each, backward_input=each, backward_weight=each)
    return Costs()


def page(name: str, devices: int, chunks: int, costs: str) -> str:
    """The page of one choice: that schedule, with GPipe to compare it with."""
    made = [build(each, devices, chunks) for each in dict.fromkeys([name, "gpipe"])]
    return html.draw([simulate(schedule, costs_of(costs, schedule)) for schedule in made])


if __name__ == "<run_path>":  # That is what mkdocs-gen-files calls it.
    import mkdocs_gen_files

    for choice in product(names(), DEVICES, CHUNKS, COSTS):
        with mkdocs_gen_files.open(f"docs/playground/{'-'.join(map(str, choice))}.html", "w") as file:
            file.write(page(*choice))
