"""The registered cases; every module here is imported by `benchmarks.registry.load`."""
