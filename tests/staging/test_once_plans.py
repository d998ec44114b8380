"""The plan of what ranks read once, together: every rank gets every byte once, and each byte comes to a node once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from hpcdist import layout
from hpcdist.files.h5 import record_dtype
from hpcdist.files.raw import Raw
from hpcdist.layout import Box
from hpcdist.staging import once
from hpcdist.staging.catalog import Stored
from hpcdist.staging.once import Plan, plan_once
from hpcdist.staging.reader import DatasetReader


def reader_of(shape: tuple[int, ...], pieces: int | None, place: bool = True) -> DatasetReader:
    """A dataset of int64, with pieces of so many elements; with `place`, of which the bytes are one run."""
    table: Any = None
    if pieces is not None:
        boxes = list(layout.boxes(layout.whole(shape), pieces))
        table = np.zeros(len(boxes), record_dtype(len(shape)))
        for row, box in zip(table, boxes, strict=True):
            row["offset"][: len(shape)], row["shape"][: len(shape)] = box.offset, box.shape
    raw = Raw("x", 0, shape, torch.int64) if place else None
    return DatasetReader("x", -1, Stored("x", shape, torch.int64, raw, table, ""))


def check_covers(tensors: list[tuple[DatasetReader, Box]], plan: Plan) -> None:
    """Every element is read by one rank; a piece by one rank, from its first block to its last."""
    counts = [np.zeros(reader.stored.shape, int) for reader, _ in tensors]
    readers: dict[tuple[int, int], list[tuple[int, Box]]] = {}
    for round_ in plan.rounds:
        for rank, batch in round_.items():
            assert batch.blocks
            for block in batch.blocks:
                counts[block.tensor][block.box.slices()] += 1
                assert block.nbytes == 8 * block.box.size()
                if block.row is not None:
                    readers.setdefault((block.tensor, block.row), []).append((rank, block.box))
    for (_, want), count in zip(tensors, counts, strict=True):
        assert (count[want.slices()] == 1).all()
        assert count.sum() == want.size()
    for (i, row), parts in readers.items():
        shape, piece = tensors[i][0].stored.shape, tensors[i][0].stored.boxes[row]
        assert len({rank for rank, _ in parts}) == 1
        runs = [layout.runs(box, shape) for _, box in parts]
        starts = [next(starts) for _, _, starts in runs]
        assert starts == sorted(starts) and sum(box.size() for _, box in parts) == piece.size()


def check_arrives(plan: Plan) -> None:
    """Follow all messages: both sides list the same ones, in the same order, and all ranks get all batches once."""
    ranks = [rank for node in plan.nodes for rank in node]
    node_of = {rank: i for i, node in enumerate(plan.nodes) for rank in node}
    held = {(rank, k, rank) for k, round_ in enumerate(plan.rounds) for rank in round_}
    entered: Counter[tuple[int, int, int]] = Counter()
    for step in plan.steps:
        sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
        came: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank in ranks:
            for dest, k, reader in plan.sends(rank, step):
                assert (rank, k, reader) in held, "it sends what it does not have yet"
                sent.setdefault((rank, dest), []).append((k, reader))
                entered[node_of[dest], k, reader] += node_of[dest] != node_of[rank]
            for source, k, reader in plan.recvs(rank, step):
                came.setdefault((source, rank), []).append((k, reader))
        assert sent == came
        for (_, dest), what in came.items():
            for k, reader in what:
                assert (dest, k, reader) not in held, "it gets something twice"
                held.add((dest, k, reader))
    batches = {(k, reader) for k, round_ in enumerate(plan.rounds) for reader in round_}
    for node in plan.nodes:
        for k, reader in batches:
            holders = [rank for rank in node if (rank, k, reader) in held]
            assert len(holders) == (1 if plan.shared else len(node))
    assert all(count == (node_of[reader] != node) for (node, _, reader), count in entered.items())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (1, 1), (3, 3), (1, 4, 2)])
def test_random_plans(sizes: tuple[int, ...], shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(str(sizes))
    monkeypatch.setattr(once, "BATCH", 256)
    for _ in range(40):
        names = dice.sample(range(20), sum(sizes))
        nodes = [sorted(names.pop() for _ in range(n)) for n in sizes]
        tensors = []
        for _ in range(dice.randint(1, 6)):
            shape = tuple(dice.randint(1, 12) for _ in range(dice.randint(0, 3)))
            reader = reader_of(shape, dice.choice([None, 1, 7, 10**6]), dice.random() < 0.8)
            want = layout.whole(shape)
            if dice.random() < 0.3 and shape:
                want = want.narrow(0, 0, dice.randint(1, shape[0]))
            tensors.append((reader, want))
        readers = dice.choice([None, 1, 3])
        plan = plan_once(tensors, nodes, readers, dice.choice([1, 1000, 2**20]), dice.random() < 0.5, shared)
        check_covers(tensors, plan)
        check_arrives(plan)
        if readers is not None:
            assert len({rank for round_ in plan.rounds for rank in round_}) <= readers


def test_each_rank_reads_its_share() -> None:
    """Of many pieces of one size, the same bytes; large blocks are received in place, within the window otherwise."""
    tensors = [(reader_of((2**20,), 2**17), layout.whole((2**20,)))] * 8
    plan = plan_once(tensors, [[0, 1], [2, 3]], None, 2**20, False)
    read = Counter[int]()
    for round_ in plan.rounds:
        assert sum(batch.nbytes for batch in round_.values()) <= 2**20 // 3
        for rank, batch in round_.items():
            read[rank] += batch.nbytes
    assert set(read.values()) == {2**24}
    plan = plan_once(tensors, [[0, 1], [2, 3]], None, 2**28, True)
    assert all(batch.direct and batch.nbytes <= once.BATCH for round_ in plan.rounds for batch in round_.values())
    assert all(len(round_) == 4 for round_ in plan.rounds)


def test_only_some_pieces() -> None:
    tensors = [(reader_of((100,), 10), layout.whole((100,)))] * 2
    plan = plan_once(tensors, [[0, 1, 2]], None, 2**20, True).only({(1, 3), (0, 9)})
    boxes = [(b.tensor, b.box) for round_ in plan.rounds for batch in round_.values() for b in batch.blocks]
    assert sorted(boxes) == [(0, Box((90,), (10,))), (1, Box((30,), (10,)))]
    check_arrives(plan)
