"""The drop-in pipeline: a forward in clock cycles, which makes the graph that autograd's backward walks."""
