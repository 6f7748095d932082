"""Tensor maps: specs, validation rules, the 128-byte encoding, and the class TensorMap."""

from cudatma.descriptor.access import REDUCE_TYPES, check_load, check_reduce, check_store, check_target
from cudatma.descriptor.cluster import check_cluster, multicast_mask
from cudatma.descriptor.encode import TensorMap
from cudatma.descriptor.helpers import (
    box_coordinates,
    create_activation_tma_desc,
    create_scale_tma_desc,
    create_weight_tile_tma_desc,
    create_weight_tma_desc,
    tile_counts,
)
from cudatma.descriptor.rules import Im2colWideMode, L2Promotion, OobFill
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec
from cudatma.layout import Interleave, Swizzle

__all__ = [
    "REDUCE_TYPES",
    "AnySpec",
    "Im2colSpec",
    "Im2colWideMode",
    "Im2colWideSpec",
    "Interleave",
    "L2Promotion",
    "OobFill",
    "Swizzle",
    "TensorMap",
    "TiledSpec",
    "box_coordinates",
    "check_cluster",
    "check_load",
    "check_reduce",
    "check_store",
    "check_target",
    "create_activation_tma_desc",
    "create_scale_tma_desc",
    "create_weight_tile_tma_desc",
    "create_weight_tma_desc",
    "multicast_mask",
    "tile_counts",
]
