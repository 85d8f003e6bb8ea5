"""gelu, both forms."""

from functools import partial

from common import counts
from torch.nn import functional as F

import cupyops


def cases():
    for form, want in (("tanh", (4150, 4150)), ("none", None)):
        ours, eager = (partial(f, approximate=form) for f in (cupyops.gelu, F.gelu))
        yield from counts(f"gelu {form}", ours, eager, want=want)
