"""The cases of the benchmark, one module each."""
