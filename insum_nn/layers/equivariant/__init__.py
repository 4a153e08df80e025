"""Tensor products, under the names of e3nn and OpenEquivariance."""
