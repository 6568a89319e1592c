"""Calls of a pipelined module, drop-in or scheduled, from the arguments to the output or the loss."""
