"""Splits a batch into microbatches: which values, along which dimension or row by row; and joins outputs."""
