"""A permutation that is computed, not stored: any element of it, without the others.

A Feistel network is a bijection of the numbers of some bits, whatever its round function is (Luby and Rackoff, SIAM J.
Comput. 17, 1988). A number that leaves the range is mapped again until it is back in it ("cycle walking": Black and
Rogaway, CT-RSA 2002). Mitchell et al. shuffle so on GPUs (ACM Trans. Parallel Comput. 9, 2022). The round function here
is the last step of SplitMix64 (Steele et al., OOPSLA 2014).
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from hpcdist.layout.box import Ints

Bits = np.ndarray[Any, np.dtype[np.uint64]]
_ROUNDS = 8
_FEW = 2**12  # elements that are sorted by a hash instead
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """A permutation of range(n): the same for the same n and key, on every machine.

    Args:
        n: number of elements, at most 2**62.
        key: integers that choose it, such as a seed and an epoch.

    Example::

        >>> sorted(Permutation(5, (0, 1))(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        self._n, bits = np.uint64(n), max(2, (n - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = tuple(np.uint64((1 << half) - 1) for half in (bits - bits // 2, bits // 2))
        digest = blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8")
        # Of few bits a network does not give all permutations alike.
        hashes = _mixed(_mixed(np.arange(min(n, _FEW + 1), dtype=np.uint64) + self._keys[0]) ^ self._keys[1])
        self._table = np.argsort(hashes, kind="stable") if n <= _FEW else None

    def __call__(self, positions: Ints) -> Ints:
        """Return the elements at these positions, an int64 array of the same shape."""
        if self._table is not None:
            return self._table[positions]
        found = self._once(positions.astype(np.uint64))
        while (outside := np.flatnonzero(found >= self._n)).size:
            found[outside] = self._once(found[outside])
        result: Ints = found.view(np.int64)
        return result

    def _once(self, x: Bits) -> Bits:
        halves = [x >> self._low, x & self._masks[1]]
        for i, key in enumerate(self._keys):
            halves[i % 2] ^= _mixed(halves[1 - i % 2] + key) & self._masks[i % 2]
        return (halves[0] << self._low) | halves[1]


def _mixed(x: Bits) -> Bits:
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))
