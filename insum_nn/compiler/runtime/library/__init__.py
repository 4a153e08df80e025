"""Programs of library calls, run eagerly or compiled by Inductor."""
