"""Layers compiled by torch.compile, with a split backward."""
