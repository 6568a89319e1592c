"""The ops of a call, F, R, B and W, and how a microbatch gets through the stages: layers, or a module's own forward."""
