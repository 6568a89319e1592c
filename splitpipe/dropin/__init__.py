"""The drop-in pipeline: a forward in clock cycles, which lays down a graph that autograd goes back through."""
