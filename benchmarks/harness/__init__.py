"""Code that all benchmarks share: timings, contenders, what they train, and how a script is run."""
