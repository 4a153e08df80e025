"""From the text of a statement to code that runs: see `api.py` for the whole pipeline."""
