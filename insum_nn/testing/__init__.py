"""Public helpers for tests: tolerances, random programs, and the comparison of a model's layers with their peers'.

`compare_layers` is imported when it is first asked for.
"""
