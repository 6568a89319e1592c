"""The benchmarks: each is run as python -m benchmarks.parts.NAME."""
