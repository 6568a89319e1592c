"""Processes that end at every moment, and processes that fork: none hangs, and each says what it should.

One process imports torch and forks a child for each case, so that a case costs its own time alone.
"""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, and this platform has none")

PRELUDE = """
import atexit, copy, gc, json, os, signal, sys, tempfile, threading, warnings, weakref
import torch
import torch.fx.experimental.symbolic_shapes  # Which a first step needs, and each child would import.
from torch import nn
from torch.nn import functional as F
from splitpipe import SplitPipe
from splitpipe.core import worker
from tests.helpers.deferring import Call

warnings.simplefilter("ignore", DeprecationWarning)  # Of forks beside threads.
torch.set_num_threads(1)
x = torch.linspace(-1, 1, 12).reshape(4, 3)

class Once:
    # The action, the first time.
    def __init__(self, do):
        self.do = do

    def __call__(self, given):
        do, self.do = self.do, None
        if do is not None:
            do()
        return given * 1

class Own(nn.Sequential):
    # No plain one: with cuts, its forward runs once a microbatch, in threads of their own.
    pass

def made(do=lambda: None):
    torch.manual_seed(0)
    layers = (Own if CUTS else nn.Sequential)(nn.Linear(3, 3), nn.Tanh(), Call(Once(do)), nn.Linear(3, 3))
    where = {"cuts": ["2"]} if CUTS else {"balance": [2, 2]}
    return SplitPipe(layers, **where, devices=["cpu"] * 2, chunks=2, **OPTIONS)

def forward(model, x=x):
    return model(x, target=x) if OPTIONS else F.mse_loss(model(x), x)

def step(model):
    forward(model).backward()

def fails(model):
    # Torch's own code would abort the process, in a thread that is stopped inside it when Python ends.
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
    # Before Python 3.14, one that the interpreter's end stops while it frees a tensor aborts the process, with a module
    # of torch's alone, too. What is left to the model is that its call comes to an end.
    atexit.register(thread.join)
    thread.start()
    return thread

gc.collect()
gc.freeze()  # The end of a child would walk all of torch.
mine, results = None, {}
for name, way, code in json.loads(sys.stdin.read()):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if not pid:
            os.setsid()
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.alarm(60)  # Ends a child that hangs.
            mine = way, code
            break
        results[name] = [status(pid)]
        try:
            os.killpg(pid, signal.SIGKILL)  # What it has left behind.
        except ProcessLookupError:
            pass
        for file in out, err:
            file.seek(0)
            results[name].append(file.read().decode())
if mine is None:
    print(json.dumps(results))
else:
    CUTS = mine[0] == "by cuts"
    OPTIONS = {} if mine[0] == "drop-in" else dict(schedule="zb-h1", loss_fn=F.mse_loss)
    # A module of its own, which is not frozen, and so comes apart at the end.
    sys.modules["case"] = case = type(sys)("case")
    vars(case).update({name: value for name, value in globals().items() if not name.startswith("__")})
    del vars(case)["case"], case
    exec(mine[1], vars(sys.modules["case"]))
"""


class Case(NamedTuple):
    """What a process does, its exit status, what it prints, and what is in its stderr; empty if that is empty."""

    code: str
    status: int = 0
    out: str = ""
    err: str = ""


CHILD = "def child():\n    said(right(model), right(model))\n    sys.exit(7)\n"
INTERRUPTED = "KeyboardInterrupt"
CASES = {
    "ends with the graph alive and the model in a cycle": Case("""
        model = made()
        model.__dict__["me"] = [model, forward(model)]
        """),
    "ends in a layer of a daemon's step": Case("""
        inside = threading.Event()
        model = made(lambda: (inside.set(), threading.main_thread().join(), said("ended"), 1 / 0))
        thread(lambda: fails(model))
        inside.wait()
        """, out="ended\n"),
    "ends by SIGINT in a layer": Case(
        "step(made(lambda: os.kill(os.getpid(), signal.SIGINT)))", -signal.SIGINT, err=INTERRUPTED),
    "ends with a destructor that uses the model": Case("""
        class Owner:
            def __del__(self):
                try:
                    step(self.model)
                except (RuntimeError, ReferenceError) as error:
                    said = str(error)
                    os.write(1, b"refused" if "is exiting" in said or "is gone" in said else said.encode())
        owner = Owner()
        owner.model = made()
        step(owner.model)
        """, out="refused"),
    "forks after a step": Case(CHILD + textwrap.dedent("""
        model = made()
        step(model), step(model)  # The first one has no threads.
        pid = os.fork()
        if not pid: child()
        said(status(pid), right(model))
        """), out="True True\n7 True\n"),
}
WAYS = "scheduled", "drop-in", "by cuts"


@pytest.mark.thorough
def test_processes_end_as_they_should() -> None:
    cases = [(way, name) for way in WAYS for name in CASES]
    given = [(f"{way}: {name}", way, textwrap.dedent(CASES[name].code)) for way, name in cases]
    done = subprocess.run([sys.executable, "-c", PRELUDE], input=json.dumps(given), capture_output=True, text=True,
                          timeout=280)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(cases)
    for name, (status, out, err) in found.items():
        case = CASES[name.partition(": ")[2]]
        assert (status, out) == (case.status, case.out), (name, err)
        assert case.err in err if case.err else not err, (name, err)
