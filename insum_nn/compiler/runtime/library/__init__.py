"""Programs of library calls."""
