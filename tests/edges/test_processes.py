"""Modules that hold operators, kernels and public functions in other processes: spawned, or a DataLoader's."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import samples
import torch
from edge_modules import Everything
from torch.utils.data import DataLoader, Dataset

import cupyops


def test_spawn():
    """One process for all of them."""
    module, x = Everything(), torch.randn(2, 3)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # which tells of a process that has died
        found = pool.submit(module, x).result(timeout=120)
    torch.testing.assert_close(found, module(x))
    assert len(found) == 4 + len(samples.PUBLIC)


class Rows(Dataset):
    """Rows that an operator makes."""

    def __init__(self):
        self.relu, self.linear = cupyops.relu, cupyops.nn.Linear(3, 2)
        self.linear.requires_grad_(False)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.linear(self.relu(torch.arange(3.0) - index))


def test_workers():
    rows = Rows()
    expected = torch.stack([rows[index] for index in range(4)])
    for method in ("fork", "spawn"):
        loader = DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context=method)
        torch.testing.assert_close(torch.cat(list(loader)), expected)
