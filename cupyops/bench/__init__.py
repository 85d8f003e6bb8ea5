"""The benchmark: `python -m cupyops bench`. A file `bench_<op>.py` declares what to measure, by `Case`."""

from .case import Case as Case
