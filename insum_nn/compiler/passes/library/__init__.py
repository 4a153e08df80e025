"""Passes that cut an algorithm into library calls: `library_graph` names them in order."""
