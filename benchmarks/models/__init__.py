"""Models that the benchmarks train, each a plain nn.Sequential."""
