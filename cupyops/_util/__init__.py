"""Helpers that know nothing of kernels or operators: argument checks, strides, array libraries, progress, traces."""
