"""Torch's CUDA build on a fake CUDA runtime, without a GPU: CONTRIBUTING.md says what that shows, and what it can't."""
