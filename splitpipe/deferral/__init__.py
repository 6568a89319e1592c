"""The split backward engine: a stage's input gradient at once, its weight gradients when there is time."""
