"""The thread of asynchronous calls."""

import threading

from hpcdist.comm.worker import Worker

DEADLINE = 60


def test_a_thread_that_is_abandoned_takes_no_later_call():
    worker, over = Worker("test"), threading.Event()
    first = worker.submit(lambda: over.wait(DEADLINE) and threading.current_thread())
    worker.abandon()
    later = [worker.submit(lambda: (threading.current_thread(), worker.inside)) for _ in range(2)]
    over.set()
    abandoned, threads = first.result(DEADLINE), [future.result(DEADLINE) for future in later]
    assert threads[0] == threads[1] == (threads[0][0], True) and threads[0][0] is not abandoned
    abandoned.join(DEADLINE)
    worker.stop()
    assert not abandoned.is_alive() and not threads[0][0].is_alive() and worker.idle
