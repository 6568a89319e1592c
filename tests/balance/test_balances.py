"""Balances that fit the model, and arguments that do not fit."""
from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitpipe.balance.balances import balance_by_size, balance_by_time
from tests.balance.test_layers import Work
from tests.balance.test_layers import clock as clock
from tests.helpers.copied import Clock, Log
from tests.promise.layers import Apply

pytestmark = pytest.mark.usefixtures("clock", "no_accelerator")
CHOICES = [balance_by_time, balance_by_size]


class Save(nn.Module):
    """Saves that many tensors of the input's size, and shows what it is given."""

    def __init__(self, times: int, seen: tuple[list[Any], ...] = ()) -> None:
        super().__init__()
        self.times, self.seen = times, seen

    def __deepcopy__(self, memo: object) -> Save:
        return Save(self.times, self.seen)

    def forward(self, x: Tensor) -> Tensor:
        for seen in self.seen:
            seen.append(x)
        for _ in range(self.times):
            x = x.sigmoid()
        return x


@pytest.mark.parametrize(
    ("each", "balance"),
    [([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4]), ([9, 1, 1, 1, 1, 1], [1, 5])],
)
def test_times_or_saved_tensors_of_stages_are_as_even_as_can_be(
    clock: Clock, each: list[int], balance: list[int]
) -> None:
    slow, large = nn.Sequential(*(Work(clock, seconds) for seconds in each)), nn.Sequential(*map(Save, each))
    assert balance_by_time(2, slow, torch.ones(1)) == balance
    assert balance_by_size(2, large, torch.ones(3, 100, requires_grad=True)) == balance


def test_the_scale_weighs_parameters_against_activations() -> None:
    class Both(nn.Sequential):
        def __init__(self, parameters: int, tensors: int) -> None:
            super().__init__(Save(tensors))
            self.weight = nn.Parameter(torch.ones(parameters))

    module = nn.Sequential(*(Both(layer, 7 - layer) for layer in [1, 2, 3, 4, 5, 6]))
    input = torch.ones(1, 1, requires_grad=True)
    assert balance_by_size(2, module, input, param_scale=0) == [2, 4]
    assert balance_by_size(2, module, input, param_scale=100) == [4, 2]


@pytest.mark.parametrize(("rows", "chunks", "expected"), [(8, 1, 8), (8, 4, 2), (7, 4, 2), (2, 5, 1)])
def test_the_first_microbatch_is_what_runs_with_all_that_has_no_rows(rows: int, chunks: int, expected: int) -> None:
    seen = Log()
    x = torch.arange(rows * 3.0).view(rows, 3)
    module = nn.Sequential(Apply(lambda value: (seen.append(value), value)[1]))
    balance_by_size(1, module, (x, {"scale": torch.tensor(3.0), "mode": "text"}), chunks=chunks)
    [(first, second)] = seen
    assert torch.equal(first, x[:expected]) and second == {"scale": torch.tensor(3.0), "mode": "text"}


def test_a_sample_is_timed_whole(clock: Clock) -> None:
    seen: list[Any] = []
    balance_by_time(1, nn.Sequential(Save(1, (seen,))), torch.ones(8, 3))
    assert seen[0].shape == (8, 3)


@pytest.mark.parametrize("choose", CHOICES)
def test_as_many_stages_as_layers_and_a_single_one_are_fine(choose: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert choose(3, module, torch.ones(1, 2)) == [1, 1, 1]
    assert choose(1, module, torch.ones(1, 2)) == [3]


@pytest.mark.parametrize("choose", CHOICES)
def test_what_is_optional_goes_by_name(choose: Any) -> None:
    parameters = inspect.signature(choose).parameters.values()
    places = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if choose is balance_by_time:
        assert (places, names) == (["partitions", "module", "sample"], ["timeout", "device"])
    else:
        assert (places, names) == (["partitions", "module", "input"], ["chunks", "param_scale", "device"])
        assert inspect.signature(choose).parameters["param_scale"].default == 2.0  # A parameter and its gradient.


def test_all_faults_are_told_together() -> None:
    with pytest.raises(ValueError) as caught:
        balance_by_size(2, nn.Sequential(nn.Identity()), torch.ones(1), chunks=0, param_scale=-1.0)
    assert str(caught.value).splitlines() == [
        "partitions is 2: expected 1 to 1, as each stage needs at least a layer.",
        "chunks is 0: expected 1 or more. Give the same number as to SplitPipe.",
        "param_scale is -1.0: expected 0 or more. Leave it out for 2.",
    ]
    with pytest.raises(ValueError) as caught:
        balance_by_time(2, nn.Sequential(nn.Identity()), torch.ones(1), timeout=0)
    assert len(str(caught.value).splitlines()) == 2


def test_a_scale_that_makes_sizes_infinite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"param_scale is 1e\+308: expected .* bytes of layer 1 "):
        balance_by_size(2, nn.Sequential(nn.Identity(), nn.Linear(2, 2)), torch.ones(1, 2), param_scale=1e308)


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0", None])
def test_the_cpu_is_a_device_and_the_default_where_there_is_no_other(choose: Any, device: Any) -> None:
    seen: list[Any] = []
    choose(1, nn.Sequential(Save(1, (seen,))), torch.ones(1), device=device)
    assert seen[0].device == torch.device("cpu")


@pytest.mark.parametrize("choose", CHOICES)
def test_a_stream_is_no_device_to_measure_on(choose: Any) -> None:
    with pytest.raises(TypeError, match=r"^device is .*expected a torch.device, an index, or a string.*'\S+'\.$"):
        choose(1, nn.Sequential(nn.Identity()), torch.ones(1), device=torch.Stream(device="cpu"))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("choose", CHOICES)
def test_torchscript_is_refused(choose: Any) -> None:
    module = nn.Sequential(nn.Identity(), torch.jit.script(nn.Identity()))
    with pytest.raises(TypeError, match="'1' is a torch.jit.ScriptModule: expected modules whose forward is Python"):
        choose(2, module, torch.ones(1))


@pytest.mark.parametrize("choose", CHOICES)
def test_a_refused_call_runs_no_layer(choose: Any) -> None:
    seen: list[Any] = []
    with pytest.raises(ValueError):
        choose(1, nn.Sequential(Save(1, (seen,))), torch.ones(1), device="meta")
    assert seen == []


@pytest.mark.cuda
@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("device", ["cuda", 0, "cuda:0"])
def test_layers_run_on_the_device_named(choose: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Shows the accelerator again.
    seen: list[Any] = []
    choose(1, nn.Sequential(Save(1, (seen,))), torch.ones(1), device=device)
    assert seen[0].device == torch.device("cuda", 0)
