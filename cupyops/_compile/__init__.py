"""`torch.compile(model, backend="cupyops")`: whole models fused into CUDA C that NVRTC compiles, forward and backward.

README.md in this folder leads through it.
"""
