"""What an error of the system or of a library says in one line."""

import pytest

from hpcdist.errors import reason

HDF5 = {  # what h5py makes of HDF5's errors
    "Unable to synchronously open file (unable to lock file, errno = 11, error message = 'Resource temporarily "
    "unavailable')": "unable to lock file: Resource temporarily unavailable",
    "Can't write unprocessed chunk data (file write failed: time = Sun Nov 22 09:07:33 2026\n, filename = 'x.h5', file "
    "descriptor = 9, errno = 28, error message = 'No space left on device', buf = 0x1, total write size = 8)": (
        "file write failed: No space left on device"
    ),
    "Unable to synchronously open file (file signature not found)": (
        "Unable to synchronously open file (file signature not found)"
    ),
}


@pytest.mark.parametrize("text", HDF5)
def test_what_hdf5_says(text):
    assert reason(OSError(text)) == HDF5[text]


def test_the_systems_own_words_and_an_error_without_any():
    assert reason(FileNotFoundError(2, "No such file or directory", "x.h5")) == "No such file or directory"
    assert reason(ValueError()) == "ValueError"
    assert reason(ValueError("a" * 1000)) == "a" * 300 + "..."
