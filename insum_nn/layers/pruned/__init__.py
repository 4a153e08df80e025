"""Layers of dense inputs that store some of their weights only: those of `torch.nn`, pruned."""
