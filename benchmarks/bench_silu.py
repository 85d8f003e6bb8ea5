"""silu."""

from common import counts
from torch.nn import functional as F

import cupyops


def cases():
    return counts("silu", cupyops.silu, F.silu)
