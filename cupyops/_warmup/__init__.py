"""Kernels before they are needed: warm-up, autotuning, which instances exist and which can be reached."""
