"""`explain()`: what becomes of a statement."""
from __future__ import annotations
class Explanation: ...
def explain_program(*a, **k): raise NotImplementedError
