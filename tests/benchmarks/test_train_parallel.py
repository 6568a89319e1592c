"""The script that combines pipeline, tensor and data parallelism: four processes give the gradients of one."""
from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """The script in four processes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    rendezvous = ["--nnodes", "1", "--nproc-per-node", "4", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "benchmarks/train_parallel.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with started:
        try:
            printed, faults = started.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            started.terminate()  # It ends its processes then; killed, it would leave them.
            raise
    return subprocess.CompletedProcess(command, started.returncode, printed, faults)


@pytest.mark.parametrize(
    "options", [(), ("--schedule", "zb-v", "--checkpoint", "always")], ids=["gpipe", "zb-v, checkpointed"]
)
def test_gradients_equal_those_of_one_process(options: tuple[str, ...]) -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo, and this build of torch has none")
    ended = run("--steps", "5", "--check", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"largest difference between gradients: (\S+)", ended.stdout)
    assert found is not None and float(found[1]) <= 1e-6, ended.stdout
    assert len(re.findall(r"^step \d loss", ended.stdout, re.MULTILINE)) == 5
