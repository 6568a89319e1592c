"""Cost and gain of the split backward, by itself."""
