"""The page on dtypes says what the code does."""

import re
from pathlib import Path

import torch

from hpcdist.formats.known import FORMATS
from hpcdist.tensors.storage import DTYPES

ROOT = Path(__file__).parents[2]


def test_the_table_of_dtypes_says_what_the_code_does():
    """Each dtype once, whether this torch has it or not; and what each file format can hold."""
    page = (ROOT / "docs" / "do" / "data.md").read_text()
    rows = re.findall(r"^\| (`[a-z]+\d.*?) \| (yes|no) \| (yes|no) \| (yes|no) \|$", page, re.MULTILINE)
    told = {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert sum(len(re.findall(r"`\w+`", row[0])) for row in rows) == len(told), "a dtype is named twice"
    every = {
        str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
    }
    assert set(every) <= set(told)
    assert set(told) - set(every) <= {"bcomplex32"}, "which came with torch 2.15"
    for name, dtype in every.items():
        holders = [DTYPES.keys(), *(FORMATS[suffix].dtypes for suffix in (".npy", ".safetensors"))]
        assert told[name] == tuple("yes" if dtype in holder else "no" for holder in holders), name
    assert FORMATS[".h5"].dtypes == set(DTYPES)
