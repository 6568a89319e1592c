"""Torch's CUDA build on a machine without a GPU: ``python -m tests.softcuda``.

The libraries that torch's CUDA build loads are replaced by a fake CUDA runtime (``runtime/``), and its kernels by the
CPU's. Torch's own streams, events, allocator, autograd and generators run as they are. CONTRIBUTING.md says what that
shows, and what it can't.
"""
