"""Elementwise launches: the host's half of cuda_src/common/elementwise."""
