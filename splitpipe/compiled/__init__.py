"""Layers compiled by torch.compile, with a backward in two halves."""
