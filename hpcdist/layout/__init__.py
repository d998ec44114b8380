"""Which part of a tensor each rank holds. Integers only: no torch, no MPI.

Layouts give the box of each rank; the rest is the arithmetic that layouts and transfers are built on.
"""

from hpcdist.layout.box import Box, boxes, run_boxes, runs, whole
from hpcdist.layout.layouts import Block, Boxes, Layout, Replicate, Split
from hpcdist.layout.overlaps import Overlaps, overlaps
from hpcdist.layout.partition import (
    PARTITIONS,
    balance,
    block,
    block_range,
    block_ranges,
    chunk,
    counts_of,
    displs,
    pieces,
)

__all__ = [
    "PARTITIONS",
    "Block",
    "Box",
    "Boxes",
    "Layout",
    "Overlaps",
    "Replicate",
    "Split",
    "balance",
    "block",
    "block_range",
    "block_ranges",
    "boxes",
    "chunk",
    "counts_of",
    "displs",
    "overlaps",
    "pieces",
    "run_boxes",
    "runs",
    "whole",
]
