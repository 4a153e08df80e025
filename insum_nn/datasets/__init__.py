"""Readers of the owners' own layouts, and generators of synthetic data that need no download."""

from insum_nn.datasets.s3dis import S3DIS
from insum_nn.datasets.synthetic_rooms import SyntheticRooms, generate_room

__all__ = ["S3DIS", "SyntheticRooms", "generate_room"]
