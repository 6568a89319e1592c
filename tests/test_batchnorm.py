"""Deferred running statistics are those of the whole batch; conversion keeps all else, or refuses before it begins."""

import copy
import pickle
from contextvars import copy_context

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import splitpipe
from splitpipe import SplitPipe
from splitpipe.batchnorm import DeferredBatchNorm, collecting, update
from splitpipe.core.phase import phase
from splitpipe.core.thread_state import bound
from tests.helpers.modules import module_of
from tests.helpers.scheduled import loss_of

KINDS = {nn.BatchNorm1d: (3, 7), nn.BatchNorm2d: (3, 4, 5), nn.BatchNorm3d: (3, 2, 3, 4)}
convert = DeferredBatchNorm.convert_deferred_batch_norm


def batch(size, *shape, seed=0, dtype=torch.float32):
    """Channels of different mean and variance, and rows of different mean."""
    x = torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed))
    channels = torch.arange(1.0, shape[0] + 1).reshape(-1, *[1] * (len(shape) - 1))
    rows = torch.arange(float(size)).reshape(-1, *[1] * len(shape))
    return (x * channels + channels * 10 + rows).to(dtype)


def twins(kind=nn.BatchNorm2d, features=3, dtype=torch.float32, **options):
    plain = kind(features, **options).to(dtype)
    return plain, convert(copy.deepcopy(plain))


def run(layer, microbatches):
    """One pass."""
    collected = []
    with bound(collecting, (collected, None)):
        outputs = [layer(x) for x in microbatches]
    update(collected)
    return outputs


def assert_same(plain, deferred):
    torch.testing.assert_close(dict(deferred.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_passes_of_any_size_leave_the_statistics_of_whole_batches(dtype, kind, momentum):
    plain, deferred = twins(kind, dtype=dtype, momentum=momentum, affine=kind is not nn.BatchNorm3d)
    for step, (size, chunks) in enumerate([(8, 4), (7, 3), (4, 1), (9, 4), (3, 2), (16, 4)]):
        x = batch(size, *KINDS[kind], seed=step, dtype=dtype)
        plain(x)
        assert {y.dtype for y in run(deferred, x.chunk(chunks))} == {dtype}
        assert_same(plain, deferred)


def test_large_mean_does_not_swallow_the_variance():
    _, deferred = twins(nn.BatchNorm1d, momentum=None)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + 1000
    run(deferred, x.chunk(8))
    exact = x.double().var(0)
    torch.testing.assert_close(deferred.running_var.double(), exact, rtol=1e-4, atol=0)


def test_nothing_changes_before_the_end_of_a_call_and_nothing_after_it():
    _, deferred = twins()
    before, contexts = copy.deepcopy(deferred.state_dict()), []

    def look(*_):
        contexts.append(copy_context())
        assert all(deferred.state_dict()[key].equal(value) for key, value in before.items())

    deferred.register_forward_hook(look)
    SplitPipe(nn.Sequential(deferred), [1], devices=["cpu"], chunks=2)(batch(4, 3, 4, 5))
    after = copy.deepcopy(deferred.state_dict())
    assert after["num_batches_tracked"] == 1
    deferred._forward_hooks.clear()
    for context in contexts:
        context.run(deferred, batch(4, 3, 4, 5))
    assert all(deferred.state_dict()[key].equal(value) for key, value in after.items())


def test_update_that_fails_changes_no_layer():
    model = convert(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)))
    before = copy.deepcopy(model.state_dict())
    model[1].momentum = "none"
    with pytest.raises(TypeError):
        run(model, [batch(4, 3, 4, 5)])
    assert all(model.state_dict()[key].equal(value) for key, value in before.items())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_layer_used_twice_a_microbatch_is_updated_twice(momentum):
    plain, deferred = twins(nn.BatchNorm1d, momentum=momentum)
    x = batch(10, 3)
    collected = []
    # The second use in one microbatch comes before the first in the next.
    for i, part in enumerate(x.split(5)):
        with bound(collecting, (collected, i)):
            deferred(part)
            deferred(part * 2)
    update(collected)
    plain(x)
    plain(x * 2)
    assert_same(plain, deferred)


def test_pass_inside_a_pass_belongs_to_the_outer_one():
    plain, deferred = twins(nn.BatchNorm1d)
    x = batch(12, 3)
    inner = SplitPipe(nn.Sequential(deferred), [1], devices=["cpu"], chunks=2)
    inner.register_forward_hook(lambda *_: tracked.append(int(deferred.num_batches_tracked)))
    tracked = []
    SplitPipe(nn.Sequential(inner), [1], devices=["cpu"], chunks=2)(x)
    assert tracked == [0, 0]
    plain(x)
    assert_same(plain, deferred)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_counts_nothing(dtype):
    _, deferred = twins(dtype=dtype)
    before = copy.deepcopy(deferred.state_dict())
    x = batch(4, 3, 4, 5, dtype=dtype)
    with bound(phase, "recomputing"):
        deferred(x)
        run(deferred, [x])
    assert all(deferred.state_dict()[key].equal(value) for key, value in before.items())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "switched off later"])
def test_statistics_are_used_or_ignored_as_batch_norm_does_and_stay_as_they_are(training):
    plain, deferred = twins()
    run(deferred, batch(8, 3, 4, 5).chunk(2))
    plain.load_state_dict(deferred.state_dict())
    for layer in (plain, deferred):
        layer.train(training).track_running_stats = not training
    x = batch(3, 3, 4, 5, seed=2)
    (output,) = run(deferred, [x])
    assert output.equal(plain(x))
    assert_same(plain, deferred)


def test_empty_batch_counts_as_batch_norm_counts_it():
    for dtype in (torch.float32, torch.bfloat16):
        plain, deferred = twins(nn.BatchNorm1d, dtype=dtype)
        plain(torch.zeros(0, 3, dtype=dtype))
        run(deferred, [torch.zeros(0, 3, dtype=dtype)])
        assert_same(plain, deferred)


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b", "loss_fn": nn.MSELoss()}])
def test_what_runs_again_in_backward_adds_nothing(options):
    def forward(self, x):
        return checkpoint(lambda y: self.norm(y).tanh(), x, use_reentrant=False)

    layer, x = module_of(forward, norm=nn.BatchNorm1d(4)), torch.rand(8, 4)
    model = SplitPipe(nn.Sequential(nn.Linear(4, 4), layer), [1, 1], devices=["cpu"] * 2, chunks=2,
                      deferred_batch_norm=True, **options)
    loss_of(model, x, x).backward()
    assert layer.norm.num_batches_tracked == 1


def test_it_is_made_by_conversion():
    with pytest.raises(TypeError, match="expected DeferredBatchNorm.convert_deferred_batch_norm"):
        DeferredBatchNorm()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_outside_a_pipeline_every_forward_is_a_batch_and_a_copy_goes_on_as_the_original(copied):
    plain, deferred = twins()
    first, second = batch(8, 3, 4, 5).chunk(2)
    assert plain(first).equal(deferred(first))
    assert_same(plain, deferred)
    other, expected = copied(deferred), plain(second)
    for layer in (deferred, other):
        assert layer(second).equal(expected)
        assert_same(plain, layer)
    with pytest.raises(ValueError, match="expected 4D input"):
        other(torch.zeros(2, 3))


class OwnForward(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 1


def kinds(model):
    return [type(layer) for layer in model.modules()]


def test_everything_of_the_layer_stays():
    layer = nn.BatchNorm2d(3, eps=0.1, momentum=None).double().eval()
    layer.mine = "kept"
    attributes = dict(vars(layer))
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    converted = convert(layer)
    assert converted is layer
    assert type(converted) is DeferredBatchNorm
    assert all(vars(converted)[name] is value for name, value in attributes.items())
    now = {**dict(converted.named_parameters()), **dict(converted.named_buffers())}
    assert now.keys() == tensors.keys()
    assert all(now[name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_dimensions_are_checked_as_before(kind):
    layer = kind(3)
    converted = convert(copy.deepcopy(layer))
    for dims in range(1, 6):
        x, found = torch.randn(2, 3, 2, 2, 2)[(..., *[0] * (5 - dims))], []
        for each in (layer, converted):
            try:
                each(x)
            except ValueError as error:
                found.append(str(error))
        assert len(found) in (0, 2) and len({*found}) < 2


def test_every_depth_is_converted_and_shared_layers_stay_shared():
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(shared, nn.ModuleDict({"a": nn.Sequential(nn.BatchNorm2d(3)), "b": shared}))
    assert convert(model) is model
    assert type(model[1]["a"][0]) is DeferredBatchNorm
    assert type(model[0]) is DeferredBatchNorm
    assert model[0] is model[1]["b"] is shared


def test_others_are_left_alone():
    patched = nn.BatchNorm1d(3)
    patched.forward = lambda input: input
    deferred = convert(nn.BatchNorm1d(3))
    untracked = nn.BatchNorm1d(3)
    untracked.track_running_stats = False
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.LayerNorm(3),
                          OwnForward(3), patched, nn.BatchNorm1d(3, track_running_stats=False),
                          nn.LazyBatchNorm1d(track_running_stats=False), deferred, untracked)
    before = kinds(model)
    convert(model)
    assert kinds(model) == before and deferred._original is nn.BatchNorm1d


def test_all_that_is_refused_is_told_and_nothing_is_changed():
    parametrized = nn.BatchNorm1d(3)
    parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.LazyBatchNorm1d()), parametrized)
    before = kinds(model)
    with pytest.raises(ValueError, match=r"\('1\.0', '2'\) are parametrized or not initialized yet: expected"):
        convert(model)
    assert kinds(model) == before
    model(torch.rand(2, 3))
    assert isinstance(convert(model[:2])[1][0], DeferredBatchNorm)  # As the error says: after a batch.
    parametrize.register_parametrization(model[0], "weight", nn.Identity())  # And so may layers be that it has made.
    model[:2](torch.rand(2, 3)).sum().backward()


# Where a graph breaks, the compiler itself reads .grad, and hides the warning where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.compiles
@pytest.mark.thorough
def test_layer_compiled_before_is_deferred_too():
    plain = nn.BatchNorm1d(3)
    deferred = copy.deepcopy(plain)
    compiled = torch.compile(deferred, backend="eager")
    x = torch.randn(8, 3)
    compiled(x)
    convert(deferred)
    compiled(x)
    for _ in range(2):
        plain(x)
    torch.testing.assert_close(dict(deferred.state_dict()), dict(plain.state_dict()))


def test_layers_that_normalise_each_microbatch_are_logged_unless_deferred(said):
    def layers(count=1):
        return nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(count)], nn.Linear(3, 3), nn.Linear(3, 3))

    where = {"devices": ["cpu", "cpu"], "chunks": 2}
    splitpipe.attach(layers(), ["1"], **where)
    splitpipe.SplitPipe(layers(), [1, 2], **where)
    splitpipe.SplitPipe(layers(5), [1, 6], **where)
    assert [message.partition(" normalise each microbatch separately")[0] for message in said] == [
        "BatchNorm layers ('0')", "BatchNorm layers ('0')", "BatchNorm layers ('0', '1', '2' and 2 more)"
    ]
    said.clear()
    splitpipe.attach(layers(), ["1"], **where, deferred_batch_norm=True)
    splitpipe.SplitPipe(layers(), [1, 2], **where, deferred_batch_norm=True)
    splitpipe.SplitPipe(layers().eval(), [1, 2], **where)
    splitpipe.SplitPipe(layers(), [1, 2], devices=["cpu", "cpu"], chunks=1)
    assert not said
