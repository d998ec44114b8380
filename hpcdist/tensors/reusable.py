"""Memory of torch that can be used again: asked, it shows whether anything still refers to it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ["Block", "problem"]


class Block:
    """Memory of the pool.

    Attributes:
        storage: the memory; the pool holds no other reference to it.
        address, nbytes: where it was, and its size, when it was made.
        used: number of the allocation that it last served.
        idle: time at which it was first seen idle since then.
        lazy: whether the kernel may have taken its pages since then.
    """

    __slots__ = ("_alone", "_handle", "address", "idle", "lazy", "nbytes", "storage", "used")

    def __init__(self, nbytes: int) -> None:
        self.storage = torch.UntypedStorage(nbytes, device="cpu")  # type: ignore[no-untyped-call]
        self._handle = self.storage._cdata
        self.address, self.nbytes = self.storage.data_ptr(), nbytes
        self.used = 0
        self.idle: float | None = None
        self.lazy = False
        self._alone = self._references()

    def _references(self) -> tuple[int, int]:
        """Return the numbers of C++ and of Python references to the storage.

        Tensors count among the former, and storages that the program has asked tensors for among the latter.
        """
        return torch._C._storage_Use_Count(self._handle), sys.getrefcount(self.storage)

    def is_idle(self) -> bool:
        """Return whether only the pool refers to it; it stays so until the pool itself makes a tensor on it."""
        return self._references() == self._alone

    def is_intact(self) -> bool:
        """Return whether it is still the memory that was allocated: not resized, nor shared, nor copied on write."""
        storage = self.storage
        same: bool = storage.nbytes() == self.nbytes and storage.data_ptr() == self.address
        return same and not storage.is_shared()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor on it that is a view of no other, with a version of its own."""
        x = torch.empty(0, dtype=dtype, device="cpu")
        x.set_(self.storage, 0, shape)  # type: ignore[call-overload]  # the strides of row-major memory by default
        return x


@cache
def problem() -> str:
    """Return why this version of torch does not show whether a block is idle; "" if it does, tried on one block."""
    name = f"torch {torch.__version__}"
    try:
        block = Block(64)
        x = block.tensor((4,), torch.float32)
        seen = [not block.is_idle(), x._base is None, x.data_ptr() == block.address]
        storage = x.untyped_storage()
        del x
        seen += [storage is block.storage, not block.is_idle()]
        del storage
        seen += [block.is_idle(), block.is_intact()]
        array = block.tensor((64,), torch.uint8).numpy()
        seen.append(not block.is_idle())
        del array
        seen.append(block.is_idle())
    except (AttributeError, TypeError, RuntimeError) as error:
        return f"{name} does not count references: {error}"
    return "" if all(seen) else f"{name} counts references in another way"
