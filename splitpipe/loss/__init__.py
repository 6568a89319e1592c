"""Traces what the batch's numbers consist of, while microbatches compute them."""
