"""Compilation of CUDA text to a cubin: read the text and its includes, run NVRTC, cache the result, explain errors."""
