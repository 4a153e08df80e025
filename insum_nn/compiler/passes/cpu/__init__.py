"""Rewrites of algorithms for a CPU, and where its loops go."""
