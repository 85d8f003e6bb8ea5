"""A C++ extension's .cu file as kernels take it: without its host code, and with what it expects of PyTorch's headers."""
