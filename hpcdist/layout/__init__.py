"""Which part of a tensor each rank holds. Integers only: no torch, no MPI.

Layouts give the box of each rank; the rest is the arithmetic that layouts and transfers are built on, for this package.
"""

from hpcdist.layout.box import Box
from hpcdist.layout.box import Overlaps as Overlaps
from hpcdist.layout.box import boxes as boxes
from hpcdist.layout.box import overlaps as overlaps
from hpcdist.layout.box import run_boxes as run_boxes
from hpcdist.layout.box import run_starts as run_starts
from hpcdist.layout.box import runs as runs
from hpcdist.layout.box import whole as whole
from hpcdist.layout.layouts import Block, Boxes, Layout, Replicate, Split
from hpcdist.layout.layouts import balance as balance
from hpcdist.layout.layouts import block as block
from hpcdist.layout.layouts import block_range as block_range
from hpcdist.layout.layouts import block_ranges as block_ranges
from hpcdist.layout.layouts import chunk as chunk
from hpcdist.layout.layouts import counts_of as counts_of
from hpcdist.layout.layouts import displs as displs
from hpcdist.layout.layouts import pieces as pieces

__all__ = ["Block", "Box", "Boxes", "Layout", "Replicate", "Split"]
