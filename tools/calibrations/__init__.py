"""What `tools/calibration.py` runs in the simulator and on a GPU: kernels of one instruction each."""
