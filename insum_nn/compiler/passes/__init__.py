"""Rewrites of the loop-nest IR, one a file."""
