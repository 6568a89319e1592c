"""Modules with cuts on several devices: where parameters live, what is refused, what a call leaves behind."""
from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import splitpipe
from splitpipe import SplitPipe
from tests.devices.log import softcuda
from tests.devices.modules import WIDTH, Carried, Module, Recomputing, Tied, cuts
from tests.devices.subjects import mean
from tests.helpers.twin import Note
from tests.segments import test_parts as parts

pytestmark = [pytest.mark.cuda, pytest.mark.devices(4), pytest.mark.thorough]

DEVICES = ["cuda:0", "cuda:1", "cuda:2"]
SCHEDULED: tuple[dict[str, Any], ...] = ({}, {"schedule": "1f1b", "loss_fn": mean})


def wrapped(module: Module, **options: Any) -> SplitPipe:
    return SplitPipe(module, **{"cuts": cuts(3), "devices": DEVICES, "chunks": 2, **options})


def batch() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).to(DEVICES[0])


def trained(model: SplitPipe, *more: Tensor) -> None:
    """A step, drop-in or scheduled."""
    if model.schedule.name == "gpipe":
        mean(model(batch(), *more), 1.0).backward()
    else:
        model(batch(), *more, target=torch.ones(4, device=DEVICES[-1])).backward()


def homes(model: nn.Module) -> dict[str, str]:
    return {name: str(x.device) for name, x in (*model.named_parameters(), *model.named_buffers())}


class Counted(Module):
    """Draws, counts, notes."""

    def __init__(self) -> None:
        super().__init__(3)
        self.norm, self.calls = nn.BatchNorm1d(WIDTH), 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last = self.calls + 1, x.dtype
        self.seen.add_(1)
        self.made = nn.Buffer(torch.rand(1))
        x = self.norm(x)
        for block in self.blocks:
            x = F.dropout(block(x), 0.5)
        return x


class Writing(Module):
    """Every stage writes to the first one's buffer."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.count += 1
        return x


class Aliased(Module):
    """Writes on a later stage to a value of which that stage has a view."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x.sin()
        part = whole[:, :4]
        x = self.blocks[1](self.blocks[0](x))
        seen = part * 2
        whole.add_(1)
        return self.blocks[2](x) + seen.sum() + whole.sum()


class Weighed(Module):
    """Has a second argument, used by the last stage alone."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * weight


class Noted(Module):
    """Writes down which microbatch goes backward where."""

    def __init__(self) -> None:
        super().__init__(3)
        self.log: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0].detach().cpu())
        for stage, block in enumerate(self.blocks):
            x = block(x)
            for _ in range(3):
                x = Note.apply(x * 2, self.log, (stage, number))
        return x


class Shared(Module):
    """All blocks have one buffer, which each writes to."""

    def __init__(self) -> None:
        super().__init__(3)
        for block in self.blocks:
            block.register_buffer("table", torch.ones(WIDTH) if block is self.blocks[0] else self.blocks[0].table)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, block.table)
        return x


class Sometimes(Module):
    """Calls its last block for some microbatches alone."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        through, x = x.cpu()[0, 0] > 0, self.blocks[1](self.blocks[0](x))
        if through:
            x = self.blocks[2](x)
        return {"y": x, "loss": x.square().mean()}


def test_a_stage_that_some_microbatches_do_not_come_to_is_joined_all_the_same() -> None:
    given = batch()
    plain = Sometimes(3)
    for way in ({}, {"schedule": "1f1b"}):
        model = wrapped(copy.deepcopy(plain), **way)
        found, parts = model(given), [plain(x.cpu()) for x in given.chunk(2)]
        torch.testing.assert_close(found["y"].cpu(), torch.cat([part["y"] for part in parts]))
        loss = torch.stack([part["loss"] for part in parts]).mean()
        torch.testing.assert_close(found["loss"].cpu(), loss)
        plain.zero_grad()
        for each in (loss, found["loss"]):
            each.backward()
        for one, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad.cpu(), other.grad)


def test_a_graph_on_a_later_stages_device_is_refused() -> None:
    later = torch.ones(4, WIDTH, device=DEVICES[-1], requires_grad=True)

    class Early(Weighed):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return super().forward(x * held[0], weight)

    held = [later[:2] * 2]
    model = wrapped(Early(3), schedule="1f1b", loss_fn=mean)
    with pytest.raises(RuntimeError, match="which comes later, and has a graph"):
        model(batch(), torch.ones(4, 1, device=DEVICES[-1]), target=torch.ones(4, device=DEVICES[-1]))


def test_hooks_of_parameters_go_along_when_these_move() -> None:
    model, log = wrapped(Carried(3)), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: log.append(name))
        parameter.register_post_accumulate_grad_hook(lambda x, name=name: log.append(f"{name}, after"))
    for _ in range(2):
        log.clear()
        trained(model)
        used = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert used and sorted(log) == sorted([*used, *(f"{name}, after" for name in used)])
        model.zero_grad()


def test_a_sample_leaves_no_trace() -> None:
    for sample in batch(), batch().cpu(), {"x": batch()}, (batch(),):
        module = Counted()
        torch.manual_seed(0)
        before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, DEVICES)]
        state = copy.deepcopy(module.state_dict())
        model = wrapped(module, sample=sample)
        after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, DEVICES)]
        assert all(map(torch.equal, before, after))
        assert module.calls == 0 and not hasattr(module, "last") and not hasattr(module, "made")
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(x.cpu(), state[name]) for name, x in model.state_dict().items())
        assert homes(model) == {
            name: DEVICES[int(name.split(".")[1]) if name.startswith("blocks") else 0] for name in homes(model)
        }


def test_the_first_call_runs_nothing_twice() -> None:
    module = Counted()
    model = wrapped(module, checkpoint="never")
    calls: list[int] = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    trained(model)
    assert (module.calls, float(model.seen), int(model.norm.num_batches_tracked), len(calls)) == (2, 2, 2, 2)


def test_an_optimizer_made_before_the_first_call_keeps_its_parameters() -> None:
    for options in SCHEDULED:
        model = wrapped(Tied(3), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [*model.parameters()]
        trained(model)
        weight = model.last.weight.clone()
        optimizer.step()
        assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
        assert model.last.weight is model.blocks[0].layer.weight and not torch.equal(model.last.weight, weight)


def test_a_gradient_goes_along() -> None:
    module = Tied(3)
    module(batch().cpu()).sum().backward()
    before = {name: p.grad.clone() for name, p in module.named_parameters()}
    model = wrapped(module, sample=batch())
    for name, p in model.named_parameters():
        assert p.grad.device == p.device and torch.equal(p.grad.cpu(), before[name])


@pytest.mark.fake
def test_a_placement_without_memory_is_gone_on_with() -> None:
    def made() -> SplitPipe:
        return wrapped(Carried(2), cuts=cuts(2), devices=DEVICES[:2])

    expected, number = made(), 0
    trained(expected)
    while True:
        number += 2  # Every second allocation.
        model = made()
        model.load_state_dict(expected.state_dict())
        softcuda.fail_at(number)
        start = softcuda.asked()
        try:
            trained(model)
        except torch.OutOfMemoryError:
            pass
        finally:
            softcuda.fail_at(0)
        if softcuda.asked() - start < number:
            break
        model.zero_grad()
        trained(model)
        assert homes(model) == homes(expected)
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_what_was_moved_goes_home_again() -> None:
    model = splitpipe.attach(Tied(3), cuts(3), devices=DEVICES)
    first, before = model(batch()), homes(model)
    model.to(DEVICES[2])
    assert {*homes(model).values()} == {DEVICES[2]}
    assert torch.equal(model(batch()), first) and homes(model) == before
    model = splitpipe.attach(Tied(3), cuts(3), devices=[DEVICES[0]] * 3)
    first = model(batch())
    assert torch.equal(model.cpu()(batch()), first) and {*homes(model).values()} == {DEVICES[0]}


def test_a_parameter_that_another_has_replaced_is_let_go_of() -> None:
    model = splitpipe.attach(Tied(3), cuts(3), devices=DEVICES)
    layer = model.blocks[1].layer
    for _ in range(3):
        model(batch())
        old, layer.bias = weakref.ref(layer.bias), nn.Parameter(layer.bias.detach() + 1)
        model(batch())
        model(batch())
        assert old() is None and layer.bias.device == torch.device(DEVICES[1])


def test_all_is_on_a_single_device() -> None:
    model = wrapped(Carried(3), devices=["cuda:2"] * 3)
    model(batch().to("cuda:2")).sum().backward()
    assert {*homes(model).values()} == {"cuda:2"}
    assert model.to("cuda:2") is model
    with pytest.raises(TypeError, match=r"to\(cuda:1\) on a SplitPipe"):
        model.to("cuda:1")


def test_a_dtype_may_change_before_and_after() -> None:
    for options in SCHEDULED:
        model = wrapped(Tied(3), **options).to(torch.bfloat16)
        for dtype in torch.bfloat16, torch.float64:
            model.to(dtype)
            model(batch().to(dtype)) if not options else model(batch().to(dtype), target=torch.ones(4, device="cuda:2"))
            assert {x.dtype for x in model.parameters()} == {dtype} and len({*homes(model).values()}) == 3
    with pytest.raises(TypeError, match=r"to\(cuda:1\) on a SplitPipe"):
        model.to("cuda:1")


def test_copies_pickles_and_states_are_whole() -> None:
    for early in True, False:
        model = wrapped(Tied(3))
        if not early:
            trained(model)
            model.zero_grad()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        others = [copy.deepcopy(model), torch.load(file, weights_only=False), wrapped(Tied(3))]
        others[-1].load_state_dict(model.state_dict())
        for other in others:
            assert torch.equal(other(batch()), model(batch())) and homes(other) == homes(model)
            assert other.last.weight is other.blocks[0].layer.weight
            trained(other)
        assert all(p.grad is None for p in model.parameters())


def test_a_tied_weight_is_copied_once_a_call_and_device() -> None:
    for options in ({**way, "backward": backward, "checkpoint": checkpoint} for way in SCHEDULED
                    for backward in ("split", "autograd") for checkpoint in ("never", "always")):
        model, copied = wrapped(Tied(3), **options), []
        trained(model)
        from splitpipe.segments.stages import CodeRun

        copied_by = CodeRun.copied

        def counting(self: CodeRun, x: Tensor, stage: int, copy: Any, copied_by: Any = copied_by,
                     copied: list[Tensor] = copied) -> Tensor:
            return copied_by(self, x, stage, lambda x: (copied.append(x), copy(x))[1])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CodeRun, "copied", counting)
            trained(model)
        layer = model.blocks[0].layer
        assert sorted(map(id, copied)) == sorted([id(layer.weight), id(layer.bias)]), options


def test_a_gradient_hook_of_a_tied_weight_is_called_once() -> None:
    for options in SCHEDULED:
        model, seen = wrapped(Tied(3), sample=batch(), **options), list[Tensor]()
        model.last.weight.register_hook(seen.append)
        trained(model)
        assert [x.device for x in seen] == [model.last.weight.device]


def test_a_buffer_written_to_elsewhere_is_refused() -> None:
    for options in SCHEDULED:
        with pytest.raises(RuntimeError, match="'count', which lives on cuda:0, was written to by a stage on cuda:1"):
            trained(wrapped(Writing(), **options))


class Summing(Module):
    """Code of every stage gives the buffer another value, on its own device."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.register_buffer("sums", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            self.sums = self.sums + x.detach().sum(0)
            x = block(x)
        return x


def test_a_buffer_that_several_devices_give_a_value_loses_none() -> None:
    plain, x = Summing(3), batch().cpu()
    for options in SCHEDULED:
        own = copy.deepcopy(plain)
        model = wrapped(copy.deepcopy(plain), **options)
        for _ in range(4):
            own(x)
            trained(model)
        assert model._runtime._homes.in_turn  # Side by side a value is lost by chance alone.
        torch.testing.assert_close(model.sums.cpu(), own.sums)


def test_a_view_of_what_is_written_to_is_refused() -> None:
    for options in SCHEDULED:
        with pytest.raises(RuntimeError, match="another value from there has the same memory"):
            trained(wrapped(Aliased(3), **options))


def test_a_shared_buffer_stays_one() -> None:
    model = wrapped(Shared())
    trained(model)
    assert all(block.table is model.blocks[0].table for block in model.blocks)


def test_an_argument_may_be_on_a_later_stages_device() -> None:
    expected = Weighed(3)
    x, weight = batch().cpu(), torch.rand(4, WIDTH)
    mean(expected(x, weight), 1.0).backward()
    for options in SCHEDULED:
        for device in DEVICES:
            model = wrapped(copy.deepcopy(expected), **options)
            model.zero_grad()
            trained(model, weight.to(device))
            for one, other in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(one.grad.cpu(), other.grad)


def test_a_batch_on_no_stages_device_goes_to_the_first() -> None:
    plain = Weighed(3)
    x, weight = (torch.rand(4, WIDTH, requires_grad=True) for _ in range(2))
    mean(plain(x, weight), 1.0).backward()
    for options in SCHEDULED:
        for device in "cpu", "cuda:3":
            model = wrapped(copy.deepcopy(plain), **options)
            given = [leaf.detach().to(device).requires_grad_() for leaf in (x, weight)]
            for _ in range(2):  # In the first call parameters go to their devices.
                for leaf in (*given, *model.parameters()):
                    leaf.grad = None
                if options:
                    model(*given, target=torch.ones(4, device=device)).backward()
                else:
                    output = model(*given)
                    assert str(output.device) == DEVICES[-1]
                    mean(output, 1.0).backward()
            for one, other in zip((*given, *model.parameters()), (x, weight, *plain.parameters()), strict=True):
                torch.testing.assert_close(one.grad.cpu(), other.grad)
            assert all(leaf.grad.device == torch.device(device) for leaf in given)


def test_beside_others_a_tensor_on_the_cpu_stays() -> None:
    seen = []

    class Lengths(Module):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            seen.append(lengths.device.type)
            for block in self.blocks:
                x = block(x)
            return x

    model = wrapped(Lengths(3))
    for device, where in ("cuda:0", "cpu"), ("cuda:3", "cpu"), ("cpu", "cuda"):
        seen.clear()
        model(batch().to(device), torch.ones(4))
        assert {*seen} == {where}, device


def test_without_gradients_it_is_the_same() -> None:
    model = wrapped(Carried(3))
    for mode in torch.no_grad, torch.enable_grad:
        with mode():
            out = model(batch())
        with torch.no_grad():
            assert torch.equal(out.detach(), model(batch()))
    model.eval()
    assert torch.equal(out, model(batch()))


def test_meta_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'blocks.0.layer.weight', .* are on meta and have no data"):
        wrapped(Tied(3).to("meta"))


def test_a_call_leaves_no_memory_behind() -> None:
    gc.collect()  # Calls that have failed before left their tracebacks.
    for options in SCHEDULED:
        model = wrapped(Tied(3), **options)
        found = []
        for _ in range(4):
            trained(model)
            model.zero_grad()
            passed()
            found.append([torch.cuda.memory_allocated(device) for device in range(3)])
        assert found[1:] == found[:-1], f"{options}: {found}"


def passed() -> None:
    """Autograd's thread of each device may hold something of the last pass until its next."""
    for device in range(3):
        torch.ones(1, device=f"cuda:{device}", requires_grad=True).sum().backward()


def test_a_model_that_is_let_go_of_leaves_no_memory_behind() -> None:
    gc.collect()
    gc.disable()
    try:
        for options in SCHEDULED:
            before = [torch.cuda.memory_allocated(device) for device in range(3)]
            model = wrapped(Carried(3), **options)
            trained(model)
            assert [torch.cuda.memory_allocated(device) for device in range(3)] != before
            del model
            passed()
            assert [torch.cuda.memory_allocated(device) for device in range(3)] == before, options
    finally:
        gc.enable()


def test_a_checkpoint_of_the_modules_own_that_draws_behind_a_border_is_refused() -> None:
    for options in SCHEDULED:
        model = wrapped(Recomputing(3, 0.5), checkpoint="never", **options)
        with pytest.raises(RuntimeError, match=r"stage 1 \(cuda:1\) begins inside of torch.utils.checkpoint"):
            trained(model)


def test_a_device_goes_backward_through_one_microbatch_after_another() -> None:
    x = torch.arange(4.0).reshape(4, 1).expand(4, WIDTH)
    for devices in DEVICES, ["cuda:0"] * 3, ["cpu"] * 3:
        for checkpoint in "never", "always":
            for backward in "split", "autograd":
                module = Noted()
                options: dict[str, Any] = {"devices": devices, "checkpoint": checkpoint, "backward": backward}
                model = wrapped(module, chunks=4, **options)
                for _ in range(2):
                    module.log.clear()
                    mean(model(x.to(devices[0])), 1.0).backward()
                    for stage in range(3):
                        found = [number for at, number in module.log if at == stage]
                        assert found == [number for number in (3, 2, 1, 0) for _ in range(3)], options


class Spread(Tied):
    """Has a parameter and a buffer of its own, a norm that is defined last and called first, and a spare layer."""

    def __init__(self) -> None:
        super().__init__(3)
        self.scale, self.spare = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) * self.scale + self.shift)


def test_hf_device_map_has_the_device_of_every_parameter() -> None:
    def told(found: dict[str, torch.device], model: nn.Module) -> dict[str, str]:
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        names = {name: [key for key in found if f"{name}.".startswith(f"{key}.")] for name, _ in tensors}
        return {name: str(found[max(keys, key=len)]) for name, keys in names.items()}

    def actual(model: nn.Module) -> dict[str, str]:
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        return {name: str(x.device) for name, x in tensors}

    for module in Tied(3), Spread():
        model = splitpipe.attach(copy.deepcopy(module), cuts(3), devices=DEVICES)
        assert type(model.hf_device_map) is dict and next(iter(model.hf_device_map.values())).index == 0
        before = told(model.hf_device_map, model)
        model(batch())
        assert type(module) is Spread or before == actual(model)
        assert told(model.hf_device_map, model) == actual(model)
        assert {f"blocks.{j}": torch.device(DEVICES[j]) for j in range(3)}.items() <= model.hf_device_map.items()
        again = copy.deepcopy(model)
        again.hf_device_map.clear()
        again(batch())
        assert again.hf_device_map == model.hf_device_map
        for options in {}, {"sample": batch()}:
            piped = wrapped(copy.deepcopy(module), **options)
            assert "sample" in options or piped(batch()) is not None
            assert piped.hf_device_map == model.hf_device_map
    sequential = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    piped = SplitPipe(sequential, [2, 1, 2], devices=DEVICES)
    assert told(piped.hf_device_map, piped) == actual(piped) and len(piped.hf_device_map) == 5


def test_a_layer_put_in_goes_to_its_stages_device() -> None:
    sequential = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    model = SplitPipe(sequential, [2, 1, 2], devices=DEVICES)
    before = homes(model)
    sequential[2], sequential[4] = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model(batch()).sum().backward()
    assert homes(model) == before and all(x.grad is not None for x in model.parameters())


def test_what_is_detached_goes_to_one_device() -> None:
    for device in "cpu", "cuda:1":
        sequential = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for model in (
            SplitPipe(sequential, [1, 1, 1], devices=DEVICES), wrapped(Tied(3)),
            splitpipe.attach(Tied(3), cuts(3), devices=DEVICES),
        ):
            with torch.no_grad():  # Torch swaps tensors of such devices, and none that a graph has.
                expected = model(batch())
            before = [*model.parameters()]
            plain = splitpipe.detach(model, device=device)
            assert {*homes(plain).values()} == {device}
            assert all(one is other for one, other in zip(plain.parameters(), before, strict=True))
            torch.testing.assert_close(plain(batch().to(device)).cpu(), expected.cpu())
    model = wrapped(Tied(3))
    model(batch())
    before = homes(model)
    assert homes(splitpipe.detach(model)) == before


def used_by_all(net: parts.Net, x: Tensor) -> Tensor:
    """Copies of a weight, and the weight itself."""
    for block in net.blocks:
        x = block(x).tanh() + net.held.scale
    return x


@pytest.mark.parametrize("forward", [
    parts.through, parts.skips, parts.several, parts.given_again, parts.between, parts.in_place, parts.hooked,
    parts.without, parts.views, parts.one_weight, parts.forces, parts.remade, parts.scaled, used_by_all,
])
def test_the_parts_of_a_graph_have_the_modules_gradients(forward: parts.Forward) -> None:
    ways: list[dict[str, Any]] = [{}, {"chunks": 1}, {"checkpoint": "except_last"}, {"backward": "autograd"}]
    for options in (*ways, {"devices": ["cuda:0", "cuda:1", "cuda:0"]}, {"devices": ["cuda:0", "cuda:1", "cuda:1"]}):
        if forward is parts.forces and "checkpoint" in options:  # It differentiates through its blocks.
            continue
        plain, model = parts.pair(forward, **{"devices": DEVICES, **options})
        plain.to(DEVICES[0])
        for device in DEVICES[:2]:
            assert_same_steps(plain, model, device)


def assert_same_steps(plain: nn.Module, model: nn.Module, device: str) -> None:
    """``device``: of the input."""
    for _ in range(2):
        x, found = parts.rows().to(device), []
        for each in (plain, model):
            each.zero_grad()
            own = x.clone().requires_grad_()
            made = each(own.to(DEVICES[0]) if each is plain else own)
            made = [made] if isinstance(made, Tensor) else made
            loss = torch.stack([y.square().sum().to(DEVICES[0]) for y in made]).sum()
            loss.backward()
            found.append([loss.detach(), own.grad, *[parameter.grad.to(DEVICES[0]) for parameter in each.parameters()
                                                     if parameter.grad is not None]])
        torch.testing.assert_close(*found)
