"""Which part of a tensor each rank holds. Integers only: no torch, no MPI.

Layouts give the box of each rank; the rest is the arithmetic that layouts and transfers are built on, for this package.
"""

from hpcdist.layout.box import (
    Box,
    boxes as boxes,
    overlaps as overlaps,
    run_boxes as run_boxes,
    run_start as run_start,
    run_starts as run_starts,
    runs as runs,
    whole as whole,
)
from hpcdist.layout.layouts import (
    Block,
    Boxes,
    Layout,
    Replicate,
    Split,
    balance as balance,
    block as block,
    block_range as block_range,
    counts_of as counts_of,
    displs as displs,
    pieces as pieces,
)

__all__ = ["Block", "Box", "Boxes", "Layout", "Replicate", "Split"]
