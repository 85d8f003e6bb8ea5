"""Host code that several operators share: the counterpart of cuda_src/common, with the same names where both exist."""
