"""Readers of the owners' own layouts, and generators of synthetic data that need no download."""

from insum_nn.datasets.alloys import copper_gold
from insum_nn.datasets.extended_xyz import AtomBatch, AtomStatistics, Configuration, read_extended_xyz
from insum_nn.datasets.extended_xyz import collate as collate_atoms
from insum_nn.datasets.extended_xyz import statistics as atom_statistics
from insum_nn.datasets.graphs import karate_club, planetoid
from insum_nn.datasets.rooms import CLASSES, Room, write_ply
from insum_nn.datasets.s3dis import S3DIS, VoxelBatch, VoxelSample, read_room, voxel_sample
from insum_nn.datasets.s3dis import collate as collate_voxels
from insum_nn.datasets.segmentation import class_colors, draw_rooms, random_pose
from insum_nn.datasets.synthetic_rooms import SyntheticRooms, generate_room

__all__ = [
    "CLASSES",
    "S3DIS",
    "AtomBatch",
    "AtomStatistics",
    "Configuration",
    "Room",
    "SyntheticRooms",
    "VoxelBatch",
    "VoxelSample",
    "atom_statistics",
    "class_colors",
    "collate_atoms",
    "collate_voxels",
    "copper_gold",
    "draw_rooms",
    "generate_room",
    "karate_club",
    "planetoid",
    "random_pose",
    "read_extended_xyz",
    "read_room",
    "voxel_sample",
    "write_ply",
]
