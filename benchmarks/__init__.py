"""The benchmarks, and the two scripts that train."""
