"""What has to hold on CUDA devices, of real ones and of the fake runtime's (``python -m tests.softcuda tests``).

Beside the unwrapped module all of it runs on any four devices. What is looked for beside that, accesses to memory
without an order, the log of what streams were given, allocations that fail, the fake runtime alone has.
"""
