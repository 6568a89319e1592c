"""One microbatch on one stage: the cut of a model, its forward, recomputation, and what surrounds one call."""
