"""What ranks tell each other: every kind comes back as it was, and nothing else is read."""

import json
import pickle
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcdist.control.codec import decode, encode
from hpcdist.formats.contents import Dataset
from hpcdist.layout import Box
from hpcdist.routes.route import Alltoall

VALUES = [
    *(None, True, 0, -(2**70), 1.5, 1j, float("inf"), "", "é\n\0", b"", b"\0\xff", [], (), {}),
    [1, (2, [3.0, None]), {"a": (b"x",), 3: [4], (5, "b"): None}],
    (torch.bfloat16, torch.device("cuda:1"), Path("/a/b c")),
    Box((0, 2), (3, 4)),
    Alltoall([1], [0], [2], [0], 2, 3),
    Dataset("x", (3,), torch.float32, [Box((0,), (3,))], attrs={"unit": "m"}),
]


ARRAYS = [
    np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
    np.zeros(0),
    np.array([(1, 2.5), (3, 4.5)], dtype=[("n", "<u8"), ("x", "<f4", (1,))]),
    np.float32(1.5),
]


@pytest.mark.parametrize("value", [*VALUES, *ARRAYS], ids=repr)
def test_comes_back_as_it_was(value):
    found = decode(encode(value))
    assert type(found) is type(value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_a_kind_of_string_arrives_as_a_string():
    assert decode(encode([torch.__version__, socket.AF_INET])) == [str(torch.__version__), int(socket.AF_INET)]
    assert type(decode(encode(torch.__version__))) is str


class Own:
    pass


@pytest.mark.parametrize("value", [Own(), [Own()], np.array([Own()]), {1, 2}, ValueError("x"), torch.ones(1)])
def test_other_kinds_are_refused(value):
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        encode(value)


@pytest.mark.parametrize(
    "said",
    [
        ["D", "os:system", ["command", "true"]],
        ["D", "subprocess:Popen", ["args", "true"]],
        ["N", "hpcdist.staging.host:torch"],
        ["D", "hpcdist.not.there:Box"],
        ["D", "hpcdist.layout.box:Box", ["offset", []]],
        ["N", "hpcdist.layout.box:Box", []],
        ["D", "hpcdist.process.abort:job", ["status", 3]],
        ["d", [["b", "eA=="], 1]],
        ["y", "load"],
        ["a", "O", [1], "AAAAAAAAAAA="],
        ["a", "<f4", [9], ""],
        ["x"],
        [],
    ],
    ids=json.dumps,
)
def test_nothing_else_is_read(said):
    for data in (json.dumps(said).encode(), pickle.dumps(said)):
        with pytest.raises(ValueError, match="not a value that a rank has encoded"):
            decode(data)
