"""Makes it an error, or not, that the host waits for CUDA."""
from __future__ import annotations

import warnings

import torch


def syncs(mode: str) -> None:
    """Sets what becomes of a wait, "error" or "default"; once a process torch warns that this is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
