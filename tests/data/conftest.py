"""Files of samples, and what a loader gives of them."""

import pytest
from collective import assert_on_all_ranks
from samples import right, write

import hpcdist as hd
from hpcdist.data import dataset


@pytest.fixture
def files(world, folder, rank):
    """The files of :func:`write`, in which a block of keep="file" has 200 bytes."""
    if rank == 0:
        write(folder)
    world.comm.Barrier()
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(dataset, "BLOCK", 200)


@pytest.fixture
def batches(comm):
    """Returns what gives the sample numbers of each batch of all ranks, in order, of a loader's epoch."""
    made = []

    def start(data, *args, **options):
        made.append(hd.data.Loader(data, *args, **options))
        return made[-1]

    def numbers(of, epoch=0, most=None):
        found = []
        for batch in of.epoch(epoch):
            samples = list(zip(batch[0], batch[1], *batch[2:], strict=True))
            assert_on_all_ranks(all(map(right, samples)), f"{of.dataset.keep}: {batch}")
            found.append(hd.concat(batch[1], group=comm).tolist())
            if len(found) == most:
                break
        return found

    start.numbers = numbers
    yield start
    for of in made:
        of.close()
