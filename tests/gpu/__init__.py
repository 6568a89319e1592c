"""One command for whoever has GPUs, ``python -m tests.gpu``: what of the package holds on this machine's devices."""
