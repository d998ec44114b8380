"""What plans by arithmetic bring to ranks: many tensors in any order of names, tables of pieces in any order."""

import h5py
import numpy as np
import pytest
import torch
from cases import seal

import hpcdist as hd
from hpcdist import staging
from hpcdist.formats.hdf5 import record_dtype


def test_a_table_of_pieces_in_any_order(findings, world, rank, folder):
    """Nothing promises that the pieces of a file come in the order of the tensor."""
    whole, path = torch.arange(40 * 6).view(40, 6), folder / "x.h5"
    staging.save(path, whole[:0] if rank else whole, window=100)
    if rank == 0:
        with h5py.File(path, "r+") as file:
            rows = file["_hpcdist/pieces"][()].view(record_dtype(2))
            file["_hpcdist/pieces"][...] = np.random.default_rng(1).permutation(rows).view("u1")
            file["data"][20, 0] = -1  # not as its checksum says
        seal(path)
    world.comm.Barrier()
    with staging.open(path) as file:
        for verify in (None, True, False):
            findings.same(file.read("data", (3, 1), (15, 4), verify=verify), whole[3:18, 1:5], "a box")
            findings.same(file.read("data", (22, 0), (18, 6), verify=verify), whole[22:], "rows")
        with pytest.raises(hd.FileError, match="is damaged"):
            file.read("data", (20, 1), (1, 1), verify=True)
    got = staging.load(path, dim=1, verify=False)
    findings.same(got[:20], whole[:20].tensor_split(world.world_size, 1)[rank], "columns")
