"""Any module as a pipeline: its own forward, once a microbatch, in segments from one border to the next."""
