"""Layers of graphs, under the names of PyTorch Geometric."""
