"""Printers from the loop-nest IR to the languages that run it."""
