"""Benchmarks: one registry of cases, a gate of correctness, timings as JSON, tables and plots from that JSON alone."""
