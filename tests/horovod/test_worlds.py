"""hpcdist.horovod in several worlds, ended in either way."""

from launch import mpirun

PROGRAM = """
    import torch
    import hpcdist
    import hpcdist.horovod as hvd

    for end in (hpcdist.finalize, hvd.shutdown, hpcdist.finalize):
        hvd.init(process_sets=[hvd.ProcessSet([0])])
        added = hvd.add_process_set([1])
        assert hvd.is_initialized() and added.process_set_id == 2 and added.included() == (hvd.rank() == 1)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2, 2]
        end()
        assert not hvd.is_initialized()
        try:
            hvd.rank()
        except ValueError as error:
            print(error)
"""


def test_the_end_of_a_world_is_that_of_its_process_sets():
    job = mpirun(2, code=PROGRAM)
    assert (job.status, job.err, job.out.count("[HD112]")) == (0, "", 6), job
