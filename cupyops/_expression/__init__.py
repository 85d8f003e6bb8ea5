"""Operators from a line of C: signatures, the translation of C to PyTorch, and the text of kernels."""
