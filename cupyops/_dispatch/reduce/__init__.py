"""Reductions and sums over columns: the host's half of cuda_src/common/reduce."""
