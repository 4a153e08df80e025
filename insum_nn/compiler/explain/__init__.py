"""Explain a program as text."""
