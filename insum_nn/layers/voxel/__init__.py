"""Layers of sparse voxels, whose names `insum_nn.layers.spconv` gives as spconv does."""
