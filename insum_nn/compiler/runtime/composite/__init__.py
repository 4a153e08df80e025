"""Programs of several statements: one that is cut in two or into paths, or several that are computed together."""
