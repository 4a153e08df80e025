"""Kernel maps: which input voxel meets which output voxel under which kernel offset."""

from insum_nn.structure.kernel_map.build import build_kernel_map
from insum_nn.structure.kernel_map.geometry import ConvAlgo, Geometry, MapKind, output_shape
from insum_nn.structure.kernel_map.kernel_map import FACTS, KernelMap
from insum_nn.structure.kernel_map.tables import Pairs

__all__ = ["FACTS", "ConvAlgo", "Geometry", "KernelMap", "MapKind", "Pairs", "build_kernel_map", "output_shape"]
