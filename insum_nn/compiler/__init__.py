"""From the text of a statement to code that runs; `CONTRIBUTING.md` walks through it, `api.py` is where it begins."""
