"""The names of ``horovod.torch``, over MPI: ``import hpcdist.horovod as hvd``."""

from typing import Any

from hpcdist.errors import RankError, refusal
from hpcdist.horovod.differentiable import *  # noqa: F403
from hpcdist.horovod.negotiation import *  # noqa: F403
from hpcdist.horovod.optimizer import *  # noqa: F403
from hpcdist.horovod.process_sets import *  # noqa: F403

HorovodInternalError = RankError
_REFUSED = {
    "elastic": "elastic jobs are not supported: an MPI job has the same ranks until it ends. Save checkpoints",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    "start_timeline": "use torch.profiler",
    "stop_timeline": "use torch.profiler",
}


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise refusal(NotImplementedError, "HD701", f"hpcdist.horovod has no {name}: {_REFUSED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
