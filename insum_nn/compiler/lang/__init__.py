"""The language: text to a checked statement, its sizes, its derivatives, and the interpreter that defines it."""
