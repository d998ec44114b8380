"""Structures: taken apart and put together again, what is refused, and headers that lie."""

import json
import sys
from collections import defaultdict, namedtuple
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cases import differs
from torch import Tensor

from hpcdist.control import codec
from hpcdist.errors import HpcdistError
from hpcdist.tensors import message, storage, tree
from hpcdist.tensors.message import MessageContents, MessageHeader
from hpcdist.tensors.storage import copyable


class Point(NamedTuple):
    x: Any
    y: Any = 0


Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


@dataclass
class Sample:
    ids: list[Any]
    more: Any = None
    derived: int = field(init=False, default=7)
    seed: InitVar[int] = 3

    def __post_init__(self, seed):
        self.derived = seed


@dataclass
class Output(dict[str, Any]):
    """As transformers has them."""

    logits: Any = None


@dataclass(eq=False)
class Layer(torch.nn.Module):
    size: int = 1

    def __post_init__(self):
        super().__init__()


class Colour(IntEnum):
    RED = 1


class _Metres(np.float64):
    pass


class _Subclass(Tensor):
    pass


class Slots:
    __slots__ = "colour"


@dataclass(slots=True)
class InSlots(Slots):
    x: int


@dataclass
class Circle:
    radius: float

    @cached_property
    def area(self):
        return 3 * self.radius**2


class Named(Point):
    """A named tuple with room for more."""


def _round_trip(value, allow_pickle=False):
    """Through the bytes that would travel."""
    parts = tree.flatten(value, allow_pickle)
    contents = MessageContents.of(parts.tensors)
    header = MessageHeader(message.encode(parts.spec, contents), message.SMALL)
    packed = message.pack(parts.tensors, contents)
    assert packed.numel() == header.packed
    places = header.unpack(packed, torch.device("cpu"))
    for i in header.large:
        places[i] = header.recv_buffer(i, torch.device("cpu"))
        copyable(places[i]).copy_(copyable(parts.tensors[i]))
    assert sorted(places) == list(range(len(parts.tensors)))
    return codec.rebuild(header.spec, lambda kind, i: tree.decode(kind, places[i], allow_pickle))


def test_values_that_the_property_test_does_not_draw():
    """Integers that Python writes in no decimals, and fields that a class computes for itself."""
    for value in (10**5000, -(10**5000), Sample([1], {"k": (2,)}, seed=9)):
        assert _round_trip(value) == value


def test_arrays_of_every_kind():
    """Also those that torch cannot take as they lie: a field of a structured array, one that is not aligned, mapped
    memory, one without strides."""
    base, rows = np.arange(24, dtype=np.int32).reshape(2, 3, 4), np.zeros(3, [("a", "i4"), ("b", "f8")])
    rows["b"] = [1, 2, 3]
    read_only = base.copy()
    read_only.flags.writeable = False
    for array in (
        *(base, base[::-1, :, ::2], base.T, base[:0], read_only, base.astype(bool), base.astype("c8")),
        *(np.array(3.0), rows["b"], np.frombuffer(b"\0" + np.arange(3.0).tobytes(), np.float64, offset=1)),
        *(np.broadcast_to(np.array(7), (2, 3)), np.array(5), np.zeros((0, 3))),
    ):
        got = _round_trip({"x": array})["x"]
        assert differs(got, np.array(array, order="C")) is None and got.flags.writeable
    assert _round_trip(base.astype(">i4")).tolist() == base.tolist()


def test_parameters_and_graphs_stay_here():
    leaf = torch.ones(2, requires_grad=True)
    got = _round_trip({"p": torch.nn.Parameter(leaf * 2), "y": leaf * 3})
    assert not got["p"].requires_grad and type(got["p"]) is Tensor and got["y"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (object(), "x is a builtins.object, which is not sent; expected tensors"),
        ({"a": [1, print]}, r"x\['a'\]\[1\] is a builtins.builtin_function_or_method"),
        ({1, 2}, "x is a builtins.set"),
        (Colour.RED, r"x is a .*Colour"),
        (np.array(["a"]), "x is a numpy array of dtype <U1, which no tensor can hold"),
        (np.ma.masked_array([1], [True]), "x is a numpy.ma"),
        ([np.ma.masked], r"x\[0\] is a numpy.ma"),
        (np.float64.__new__(_Metres, 3), "x is a .*_Metres, which is not sent"),
        ({"t": np.array(["2020-01-01"], "M8[D]")}, r"x\['t'\] is a numpy array of dtype datetime64"),
        (torch.ones(2).as_subclass(_Subclass), "x is a .*_Subclass, of which only the memory would be sent"),
        (torch._efficientzerotensor((3,)), "x has no memory of its own"),
        ([torch.zeros(2).to_sparse()], r"x\[0\] must be a dense tensor"),
        (Point(torch.zeros(2, device="meta")), r"x.x is on device meta"),
        ({b"a": 1}, "x has the key b'a'; expected strings"),
        ({(b"a",): 1}, "x has the key"),
        ([{Colour.RED: 1}], r"x\[0\] has the key <Colour.RED: 1>"),
    ],
    ids=str,
)
def test_what_is_refused(value, told):
    with pytest.raises(TypeError, match=told):
        tree.flatten(value)


@pytest.mark.parametrize(("x", "nbytes"), [(torch.zeros(16), 64), (torch.zeros(8, 8)[1::2, ::7], 256)])
def test_a_storage_that_was_made_smaller(x, nbytes):
    """Reading such a tensor would go beyond the memory."""
    assert storage.is_plain(x) is x.is_contiguous()
    x.untyped_storage().resize_(24)
    assert not storage.is_plain(x)
    with pytest.raises(TypeError, match=f"x needs {nbytes} bytes of its storage, which has been resized to 24"):
        tree.flatten(x)


@pytest.mark.filterwarnings("ignore")
def test_what_is_more_than_its_memory():
    """Of which torch and numpy warn when it is made."""
    refused = {
        "MaskedTensor, of which only the memory would": torch.masked.masked_tensor(
            torch.ones(2), torch.tensor([True, False])
        ),
        "NestedTensor, of which only": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        r"a dense tensor, got .*\(nested\)": torch.nested.nested_tensor([torch.ones(1)]),
        "numpy.*matrix, which is not sent": np.matrix([[1]]),
    }
    for told, value in refused.items():
        with pytest.raises(TypeError, match=r"x\['m'\] .*" + told):
            tree.flatten({"m": value})


def test_named_dims_are_refused(monkeypatch):
    """In a torch that has them, before 2.13."""
    monkeypatch.setattr(storage, "NAMED", True)
    monkeypatch.setattr(Tensor, "has_names", lambda x: True, raising=False)
    with pytest.raises(TypeError, match="x has named dims, whose names would be lost"):
        tree.flatten(torch.ones(2))


def test_classes_that_others_cannot_find():
    @dataclass
    class Inner:
        x: int

    with pytest.raises(TypeError, match=r"x\[0\] is of class .*<locals>.Inner, which no other rank can find"):
        tree.flatten([Inner(1)])


def test_what_contains_itself():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match=r"x: nested more than 100 levels deep, or it contains itself"):
        tree.flatten(endless)


def test_pickle_only_if_both_sides_ask():
    value = {"s": {1, 2}, "c": Colour.RED, "day": np.datetime64("2020-01-01"), "d": defaultdict(list, a=[1])}
    assert _round_trip(value, allow_pickle=True) == value
    masked = _round_trip(np.ma.masked_array([1, 2], [True, False]), allow_pickle=True)
    assert masked.mask.tolist() == [True, False]
    parts = tree.flatten({1, 2}, allow_pickle=True)
    with pytest.raises(TypeError, match=r"received a pickle, which this rank loads only with allow_pickle=True"):
        codec.rebuild(parts.spec, lambda kind, i: tree.decode(kind, parts.tensors[i], False))


@pytest.mark.parametrize("name", ["os:system", "builtins:list", "no.such.module:X", "subprocess:Popen", "tests:", ":"])
def test_a_header_names_no_other_class(name):
    """Nothing is imported and nothing called because a message says so."""
    for spec in (["D", name, ["x", 1]], ["N", name, 1]):
        with pytest.raises(TypeError, match="not a dataclass or named tuple"):
            codec.rebuild(spec, lambda kind, i: None)


def test_looking_for_a_class_runs_nothing(monkeypatch):
    """Modules that import what is asked of them, and properties, are not asked."""
    module = ModuleType("lazy")
    ran = []
    module.__getattr__ = ran.append

    class Holder:
        @property
        def inner(self):
            ran.append("inner")
            return None

    module.holder = Holder()
    monkeypatch.setitem(sys.modules, "lazy", module)
    for name in ("lazy:anything", "lazy:holder.inner"):
        with pytest.raises(TypeError, match="not a dataclass or named tuple"):
            codec.find_class(name)
    assert ran == []


def test_what_is_more_than_its_fields():
    """A dataclass that is a container too, or a module: its fields are not all there is."""
    for value in (Output({"logits": 1}), Layer()):
        with pytest.raises(TypeError, match="is not sent"):
            tree.flatten(value)
    circle = Circle(1.0)
    assert circle.area == 3
    assert _round_trip(circle) == circle, "what can be computed again may stay behind"
    named = Named(1)
    assert _round_trip(named) == named
    for value in (circle, named, InSlots(1)):
        value.colour = "red"
        with pytest.raises(TypeError, match=r"x\[0\] has the attribute 'colour', which is not one of its fields"):
            tree.flatten([value])
    for values in ([1], [1, 2, 3]):
        with pytest.raises(TypeError, match="has the fields"):
            codec.rebuild(["N", f"{Point.__module__}:Point", *values], lambda kind, i: None)


def test_a_dataclass_with_other_fields():
    name = f"{Frozen.__module__}:Frozen"
    with pytest.raises(TypeError, match="has the fields"):
        codec.rebuild(["D", name, ["other", 1]], lambda kind, i: None)


def _header(rows, **more):
    """Of tensors [code, on a GPU, *shape], or of whatever else is given."""
    tensors = rows
    if isinstance(rows, list):
        columns = [row[0] for row in rows], [row[1] for row in rows], [row[2:] for row in rows]
        tensors = [columns[0], [bool(cuda) if cuda in (0, 1) else cuda for cuda in columns[1]], columns[2]]
    return json.dumps({"spec": None, "tensors": tensors} | more).encode()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"[1]", b"\xff", b"[" * 100_000, _header(None)),
        *(_header([], tensors=lies) for lies in ([[1], [False], []], [[1], [0], [[2]]], [[1], [False], [2]])),
        *(_header([row]) for row in ([99, 0, 2], [1, 0, -1], [1, 0, 1.5], [1, 0, "3"], [1, 0, True], [1, 2, 3])),
        *(_header([row]) for row in ([1, 0, *[1] * 65], [1, 0, 2**62], [1, 0, 2**40, 2**40, 2**40])),
        _header([[1, 0, 2**46]] * 3),
    ],
    ids=lambda text: repr(text[:60]),
)
def test_headers_that_lie(text):
    """Found before memory is taken."""
    with pytest.raises(HpcdistError, match=r"is damaged|more than the memory of this host"):
        MessageHeader.read(text)


@pytest.mark.parametrize(
    "spec", [["?"], ["x"], ["x", 5], ["x", -1], ["d", 3], ["z"], ["i", "zz"], ["N"], [[]], [None]], ids=str
)
def test_descriptions_that_lie(spec):
    held = {0: torch.zeros(1)}
    with pytest.raises((ValueError, TypeError, KeyError, IndexError)):
        codec.rebuild(spec, lambda kind, i: held[i])
