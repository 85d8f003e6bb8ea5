"""PyTorch's own database of operator samples, in a process of its own: `python -m pytest tests/opdb`.

Importing it (and `torch.testing._internal` beneath it) freezes PyTorch's backend flags for the whole process, so these tests
run beside no others.
"""

from pathlib import Path

import pytest
import torch

torch.backends.cudnn.allow_tf32 = False  # before the flags are frozen: fp32 is compared with fp32
torch.backends.cuda.matmul.allow_tf32 = False
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    if any(here not in item.path.parents for item in items):
        raise pytest.UsageError("tests/opdb needs a process of its own: python -m pytest tests/opdb")
