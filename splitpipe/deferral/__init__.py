"""The split backward: a stage's input gradient is computed first, its weight gradients when there is time."""
