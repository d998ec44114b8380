"""Pickles that a stranger has forged: they change nothing of the program that reads them, and end at its deadline."""

import os
import signal
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex

from hpcdist.errors import FileError
from hpcdist.formats.known import describe

METADATA = b"ctorch.distributed.checkpoint.metadata\n"
CODE = """
import sys
import hpcdist as hd
from hpcdist.formats.known import describe
hd.init(device="cpu")
describe(sys.argv[1])
"""


def doubled(times):
    """A dict whose key is a tuple of two, each of which is a tuple of two, and so on: one object on each level."""
    key = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(times))
    return b"\x80\2)q\0" + key + b"}h%cK\1s." % times


def test_no_class_is_changed(tmp_path):
    """By BUILD, which sets attributes of whatever it is given."""
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    metadata, before = tmp_path / ".metadata", dict(vars(MetadataIndex))
    good = metadata.read_bytes()
    metadata.write_bytes(b"\x80\4" + METADATA + b"MetadataIndex\nN}X\3\0\0\0fqnX\3\0\0\0bads\x86b0" + good[2:])
    with pytest.raises(FileError, match=r".metadata: cannot be read: .*\[HD402\]"):
        describe(str(tmp_path))
    metadata.write_bytes(b"\x80\4" + METADATA + b"_MEM_FORMAT_ENCODING\nK\0\x85R}X\7\0\0\0_value_K\x63sb0" + good[2:])
    assert list(describe(str(tmp_path)).tensors) == ["x"]
    assert (dict(vars(MetadataIndex)), _MEM_FORMAT_ENCODING(0).value) == (before, 0)


@pytest.mark.parametrize("kind", ["folder", "x.pt"])
def test_a_hash_that_takes_for_ever_ends_at_the_deadline(tmp_path, kind):
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
        (path / ".metadata").write_bytes(doubled(60))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", doubled(60))
            archive.writestr("x/version", "3\n")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "HPCDIST_TIMEOUT": "3"},
    )  # fmt: skip
    assert done.returncode == -signal.SIGALRM, done
    assert "in describe" in done.stderr
