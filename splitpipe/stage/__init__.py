"""One microbatch on one stage: its layers, forward and recomputation, and the data of one call."""
