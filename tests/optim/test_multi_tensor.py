"""The tables that a launch over many tensors is given."""

import numpy as np
import torch

from cupyops._dispatch import multi_tensor
from cupyops._util.strides import laid_out_alike


def test_tables():
    sizes = (0, 1, 10, 11, 25) * 30
    columns = tuple(tuple(1000 * array + index for index in range(len(sizes))) for array in (1, 2, 3))
    found = multi_tensor.tables(columns, sizes, 10)
    assert [(one.start, one.tensors) for one in found] == [(0, 110), (110, 40)]
    for table, start, count, blocks in found:
        part = slice(start, start + count)
        assert table["arrays"][0, :, :count].tolist() == [list(column[part]) for column in columns]
        assert table["sizes"][0, :count].tolist() == list(sizes[part])
        ends = table["chunk_ends"][0, :count]
        chunks = [-(-size // 10) for size in sizes[part]]
        assert np.diff(ends, prepend=0).tolist() == chunks and blocks == sum(chunks)
        owners = np.searchsorted(ends, np.arange(blocks), side="right")
        assert np.bincount(owners, minlength=count).tolist() == chunks


def test_laid_out_alike():
    x = torch.randn(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    alike = laid_out_alike
    assert alike((x, x)) and alike((last, last))
    assert not alike((x, last))
    assert not alike((x[..., ::2], x[..., ::2])), "gaps between the elements"
    one = torch.ones(1, device="cpu").expand(2, 3)
    assert not alike((one, one)), "elements that overlap"
    single = torch.ones(4, 1, 3, 3)
    assert alike((single, single.to(memory_format=torch.channels_last)))
