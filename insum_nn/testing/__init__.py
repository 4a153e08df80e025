"""Public helpers for tests: random programs, tolerances."""
