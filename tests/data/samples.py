"""Files of samples whose values are their numbers."""

import h5py
import numpy as np
import torch

COUNTS = [20, 3, 0, 41, 1]  # samples of each file
SAMPLES = sum(COUNTS)
FIELDS = ["x", "y", ("values", "offsets"), "variable"]


def length(sample):
    """Rows of a sample of the fields that differ in length."""
    return sample * 7 % 5


def write(folder, counts=COUNTS, **options):
    """Files of these numbers of samples; options of h5py for "x"."""
    n = 0
    for i, count in enumerate(counts):
        samples = np.arange(n, n + count)
        with h5py.File(folder / f"{i:02}.h5", "w") as file:
            x = samples[:, None, None] * 100 + np.arange(6).reshape(2, 3)
            file.create_dataset("x", data=x.astype(np.float32), **options)
            file["y"] = samples
            lengths = length(samples)
            file["offsets"] = np.concatenate([[0], np.cumsum(lengths)])
            file["values"] = np.repeat(samples, lengths).astype(np.int16)[:, None] * [1, 2]
            variable = file.create_dataset("variable", (count,), h5py.vlen_dtype(np.float64))
            for k in range(count):
                variable[k] = np.full(lengths[k], n + k, float)
        n += count


def right(sample):
    """Whether the fields of a sample are those of its number."""
    x, y, values, variable = sample
    n = int(y)
    return (
        torch.equal(x, (n * 100 + torch.arange(6.0)).view(2, 3))
        and torch.equal(values, torch.tensor([[n, 2 * n]], dtype=torch.int16).expand(length(n), 2))
        and torch.equal(variable, torch.full((length(n),), n, dtype=torch.float64))
    )
