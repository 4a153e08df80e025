"""The loop-nest IR: nodes, printer and verifier, the builder from bound statements, what passes hand to C."""
