"""The loop-nest IR: nodes, their printer, verifier and interpreter, and the builder from bound statements."""
