"""Whole training steps: kernels compiled ahead, schedules measured on request."""
