"""Processes that end at every moment, and processes that fork: none hangs, and each says what it should.

One process imports torch and forks a child for each case, so that a case costs its own time alone.
"""
from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from splitpipe import SplitPipe

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, and this platform has none")

PRELUDE = """
import atexit, copy, gc, multiprocessing, os, signal, sys, threading, warnings, weakref
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from splitpipe import SplitPipe

warnings.simplefilter("ignore", DeprecationWarning)  # Of forks beside threads.
torch.set_num_threads(1)
x = torch.linspace(-1, 1, 12).reshape(4, 3)

class Do(nn.Module):
    def __init__(self, do):
        super().__init__()
        self.do = do

    def forward(self, x):
        self.do()
        return x * 1

class Once:
    # The action, the first time.
    def __init__(self, do):
        self.do = do

    def __call__(self, *_):
        do, self.do = self.do, None
        if do is not None:
            do()

def made(do=lambda: None):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Do(do), nn.Linear(3, 3))
    return SplitPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=2, **OPTIONS)

def forward(model):
    return model(x, target=x) if OPTIONS else F.mse_loss(model(x), x)

def step(model):
    forward(model).backward()

def fails(model):
    # Torch's own code would abort the process, in a thread that is stopped in the midst of it when Python ends.
    try:
        forward(model)
    except ZeroDivisionError:
        pass

def right(model):
    found = []
    for each in nn.Sequential(*copy.deepcopy(model)), model:
        each.zero_grad()
        (F.mse_loss(each(x), x) if each is not model else forward(each)).backward()
        found.append([p.grad for p in each.parameters()])
    model.zero_grad()
    return all(torch.allclose(*pair) for pair in zip(*found))

def said(*words):
    print(*words, flush=True)

def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def thread(run, daemon=True):
    thread = threading.Thread(target=run, daemon=daemon)
    thread.start()
    return thread
"""

WARM = """
import json, os, resource, select, signal, sys, time

def launched(code):
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(out_end), os.close(err_end)
        return pid, [out, err], [b"", b""], time.monotonic() + 60
    os.setsid()
    os.dup2(out_end, 1), os.dup2(err_end, 2)
    os.closerange(3, 64)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return None

def collected(pid, ends, texts, limit):
    # To the ends of both streams, which children of the child hold as well.
    open_ends = set(ends)
    while open_ends:
        ready = select.select(list(open_ends), [], [], max(0.0, limit - time.monotonic()))[0]
        if not ready:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs", *(text.decode() for text in texts)
        for end in ready:
            text = os.read(end, 65536)
            texts[ends.index(end)] += text
            if not text:
                open_ends.remove(end)
                os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *(text.decode() for text in texts)

gc.collect()
gc.freeze()  # The end of a child would walk all of torch.
given, running, results, mine = json.loads(sys.stdin.read()), [], {}, None
for name, options, code in given:
    child = launched(code)
    if child is None:
        mine = options, code
        break
    running.append((name, child))
    if len(running) == 2:
        name, child = running.pop(0)
        results[name] = collected(*child)
if mine is None:
    for name, child in running:
        results[name] = collected(*child)
    print(json.dumps(results))
else:
    OPTIONS = dict(schedule="zb-h1", loss_fn=F.mse_loss) if mine[0] else {}
    # A module of its own, which is not frozen, and so comes apart at the end.
    sys.modules["case"] = case = type(sys)("case")
    vars(case).update({name: value for name, value in globals().items() if not name.startswith("__")})
    del vars(case)["case"], case
    exec(mine[1], vars(sys.modules["case"]))
"""


@dataclass(frozen=True)
class Case:
    """What a process does, and what comes of it.

    Attributes:
        code: of the process.
        status: its exit status.
        out: what it prints.
        err: in what it says on stderr; empty if it says nothing.
    """

    code: str
    status: int = 0
    out: str = ""
    err: str = ""


EXITS = {
    "without a forward": Case("model = made()"),
    "with the graph alive": Case("model = made(); loss = forward(model)"),
    "by sys.exit after a step": Case("model = made(); step(model); sys.exit(3)", 3),
    "by an exception after a step": Case("model = made(); step(model); raise ValueError", 1, err="ValueError"),
    "by SIGINT after a step": Case(
        "model = made(); step(model); os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, err="KeyboardInterrupt"
    ),
    "by SIGTERM after a step": Case("model = made(); step(model); os.kill(os.getpid(), signal.SIGTERM)",
                                    -signal.SIGTERM),
    "by SIGTERM in a layer of a daemon's pass": Case(
        """
        signal.signal(signal.SIGTERM, lambda *_: (ended.set(), sys.exit(9)))
        inside, ended = threading.Event(), threading.Event()
        model = made(Once(lambda: (inside.set(), ended.wait(), 1 / 0)))
        thread(lambda: fails(model))
        inside.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        """, 9),
    "in a layer of a daemon's pass": Case(
        """
        inside = threading.Event()
        model = made(Once(lambda: (inside.set(), threading.main_thread().join(), said("ended"), 1 / 0)))
        thread(lambda: fails(model))
        inside.wait()
        """, out="ended\n"),
    "in a layer of a thread's step": Case(
        """
        inside = threading.Event()
        model = made(Once(lambda: (inside.set(), threading.main_thread().join())))
        thread(lambda: said(right(model)), daemon=False)
        inside.wait()
        """, out="True\n"),
    "by SystemExit in a layer": Case("step(made(lambda: sys.exit(4)))", 4),
    "by SIGINT in a layer": Case(
        "step(made(Once(lambda: os.kill(os.getpid(), signal.SIGINT))))", -signal.SIGINT, err="KeyboardInterrupt"
    ),
    "by SystemExit in a forward hook": Case(
        "model = made(); model[3].register_forward_hook(lambda *_: sys.exit(4)); step(model)", 4
    ),
    "by SystemExit in a parameter's hook": Case(
        "model = made(); model[3].weight.register_hook(lambda _: sys.exit(4)); step(model)", 4
    ),
    "with exit handlers before and after the first step": Case(
        """
        model = made()
        atexit.register(lambda: said("older", right(model)))
        step(model)
        atexit.register(lambda: said("newer", right(model)))
        weakref.finalize(type("Thing", (), {}), lambda: said("finalizer", right(model)))
        """, out="newer True\nolder True\nfinalizer True\n"),
    "with the model in a cycle": Case(
        "model = made(); step(model); model.__dict__['me'] = [model]; del model"
    ),
    "with a model in a thread's own storage": Case(
        """
        own, stepped = threading.local(), threading.Event()
        own.model = made()
        step(own.model)
        def run():
            own.model = made()
            step(own.model)
            stepped.set()
            threading.Event().wait()
        thread(run)
        stepped.wait()
        """),
    "with a generator that holds the model": Case(
        """
        def steps():
            model = made()
            while True:
                step(model)
                yield
        generator = steps()
        next(generator)
        """),
    "with a destructor that uses the model": Case(
        """
        class Owner:
            def __del__(self):
                try:
                    step(self.model)
                except RuntimeError as error:
                    os.write(1, str(error)[:26].encode())
        owner = Owner()
        owner.model = made()
        step(owner.model)
        """, out="the interpreter is exiting"),
}

CHILD = """
def child():
    said(right(model), right(model))
    {end}
"""

FORKS = {
    **{
        f"after a step, ended by {end}": Case(
            CHILD.format(end=end) + "model = made()\nstep(model)\npid = os.fork()\nif not pid: child()\n"
            "said(status(pid), right(model))", out="True True\n7 True\n")
        for end in ("os._exit(7)", "sys.exit(7)")
    },
    "in the midst of another thread's pass": Case(
        CHILD.format(end="sys.exit(7)") + textwrap.dedent(
            """
            inside, ended = threading.Event(), threading.Event()
            model = made(Once(lambda: (inside.set(), ended.wait())))
            own = set(model.parameters())
            other = thread(lambda: step(model))
            inside.wait()
            pid = os.fork()
            if not pid:
                said(own == set(model.parameters()))
                child()
            said(status(pid))
            ended.set()
            other.join()
            said(right(model))
            """), out="True\nTrue True\n7\nTrue\n"),
    "in a layer that ends the child": Case(
        """
        def fork():
            pids.append(os.fork())
            if not pids[0]:
                os._exit(7)
        pids, model = [], made(Once(fork))
        step(model)
        said(status(pids[0]), right(model))
        """, out="7 True\n"),
    "in a layer that the child comes back from": Case(
        """
        pids = []
        model = made(Once(lambda: pids.append(os.fork())))
        step(model)
        said(status(pids[0]), right(model))
        """, out="1 True\n", err="the child came back from the layer"),
    "in a layer of the first stage that the child comes back from": Case(
        """
        pids = []
        model = made()
        model[1].register_forward_hook(Once(lambda: pids.append(os.fork())))
        step(model)
        said(status(pids[0]), right(model))
        """, out="1 True\n", err="the child came back from the layer"),
    "in a layer where the child raises": Case(
        """
        def fork():
            pids.append(os.fork())
            if not pids[0]:
                raise ValueError
        pids, model = [], made(Once(fork))
        step(model)
        said(status(pids[0]), right(model))
        """, out="1 True\n", err="or raised in it"),
    "by multiprocessing in a layer": Case(
        """
        def start():
            processes.append(multiprocessing.get_context("fork").Process(target=lambda: said("child")))
            processes[0].start()
        processes, model = [], made(Once(start))
        step(model)
        processes[0].join()
        said(processes[0].exitcode, right(model))
        """, out="child\n0 True\n"),
    "by multiprocessing with the model": Case(
        """
        model = made()
        step(model)
        process = multiprocessing.get_context("fork").Process(target=lambda model: said(right(model)), args=(model,))
        process.start()
        process.join()
        said(process.exitcode, right(model))
        """, out="True\n0 True\n"),
    "by a DataLoader whose workers use the model": Case(
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            @torch.no_grad()
            def __getitem__(self, number):
                return x[number] + 0 * model(x)[0]

        model = made()
        step(model)
        for epoch in range(2):
            for batch in DataLoader(Data(), batch_size=4, num_workers=2):
                said(torch.equal(batch, x), right(model))
        """, out="True True\n" * 2),
}

CASES = {**{f"ends {name}": case for name, case in EXITS.items()}, **{f"forks {name}": c for name, c in FORKS.items()}}
KINDS = ("drop-in", "scheduled")

Ends = dict[str, tuple[object, str, str]]


@pytest.fixture(scope="module")
def ends() -> Ends:
    given = [
        (f"{kind} {name}", kind == "scheduled", textwrap.dedent(case.code)) for kind in KINDS
        for name, case in CASES.items()
    ]
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + WARM], input=json.dumps(given), capture_output=True, text=True, timeout=550
    )
    assert not done.returncode, done.stderr
    found: Ends = {name: tuple(end) for name, end in json.loads(done.stdout).items()}
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_process_ends_as_it_should(kind: str, name: str, ends: Ends) -> None:
    case = CASES[name]
    status, out, err = ends[f"{kind} {name}"]
    assert (status, out) == (case.status, case.out), (err, asdict(case))
    assert case.err in err if case.err else not err


def gradients(model: nn.Module) -> list[Any]:
    """Those of a step, as numbers."""
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    scheduled = isinstance(model, SplitPipe) and model._loss_fn is not None
    model.zero_grad()
    (model(x, target=x) if scheduled else F.mse_loss(model(x), x)).backward()
    return [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None]


def train(models: list[nn.Module], sender: Connection) -> None:
    """What the spawned process does."""
    torch.set_num_threads(1)
    sender.send([gradients(model) for model in models])


def test_a_spawned_process_trains_the_models_it_is_given() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    expected = gradients(plain)
    models = [
        SplitPipe(copy.deepcopy(plain), [1, 2], devices=["cpu"] * 2, chunks=2, **options)
        for options in ({}, {"schedule": "zb-h1", "loss_fn": F.mse_loss})
    ]
    for model in models:
        gradients(model)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(models, sender), daemon=True)
    process.start()
    sender.close()
    assert receiver.poll(300), "the child hangs"
    found = receiver.recv()
    process.join(60)
    assert process.exitcode == 0
    for each in found:
        torch.testing.assert_close(each, expected)
