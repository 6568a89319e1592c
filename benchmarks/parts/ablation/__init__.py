"""The gain of each mechanism of the pipeline."""
