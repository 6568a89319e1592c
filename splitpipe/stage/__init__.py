"""One microbatch on one stage: its segment and its recomputation; and the data of one call."""
