"""Where integers and constants come from: kernel maps, graph normalisation, Clebsch-Gordan tables, pruning masks."""
