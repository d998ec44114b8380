"""What Hypothesis finds is saved and loaded, or refused while the old file stays: what a reader refuses, the writer
refuses."""

import os

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

import hpcdist as hd
from hpcdist.errors import RankError
from hpcdist.formats.known import describe

LETTERS = st.one_of(st.sampled_from(["a", "b", "/", ".", "\0", os.fsdecode(b"\xff"), "ß"]), st.characters())
ODD = ["", "_hpcdist", "_hpcdist/plan", "__metadata__", "torch_dtype", "DCP_SHARDING_INFO", "format", "a" * 70_000]
DEEP = "a/" * 1500 + "x"
NAMES = st.one_of(st.text(LETTERS, max_size=5), st.sampled_from([*ODD, "a/" * 1000 + "x", DEEP]))
VALUES = st.one_of(
    st.text(LETTERS, max_size=5),
    st.integers(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.binary(max_size=4),
    st.lists(st.text(LETTERS, max_size=3), max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
)
X = torch.arange(3)


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([".h5", ".safetensors", ".safetensors.index.json"]),
    st.lists(NAMES, min_size=1, max_size=3, unique=True),
    st.dictionaries(NAMES, VALUES, max_size=2),
)
@example(".safetensors", [os.fsdecode(b"a\xff")], {})
@example(".safetensors", ["x"], {"title": os.fsdecode(b"\xff")})
@example(".safetensors", ["x"], {"DCP_SHARDING_INFO": "{}"})
@example(".safetensors.index.json", ["x"], {})
@example(".h5", [DEEP], {})
def test_it_is_read_again_or_refused(tmp_path, suffix, names, attrs):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"the old file")
    refused = None
    with hd.init(device="cpu"):
        try:
            hd.staging.save(path, {name: X + i for i, name in enumerate(names)}, attrs={"": attrs})
        except RankError as error:
            refused = error
        assert os.listdir(tmp_path) == [path.name]
        content = path.read_bytes()
        if refused is None:
            assert describe(str(path)).tensors.keys() == set(names)
            for i, name in enumerate(names):
                assert torch.equal(hd.staging.load(path, name, dim=None), X + i)
            with hd.staging.open(path) as file:
                found = {name: np.asarray(value).tolist() for name, value in file.attrs().items()}
            own = {"format": "pt"} if suffix != ".h5" else {}
            assert found == own | {name: np.asarray(value).tolist() for name, value in attrs.items()}
        path.unlink()
    if refused is not None:
        assert content == b"the old file" and set(refused.codes) & {"HD410", "HD418", "HD419", "HD511"}, refused
