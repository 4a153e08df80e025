"""Explain a program as text, HTML and pictures."""
