"""From CUDA text to a cubin: read the text and what it includes, run NVRTC, keep what comes of it, explain what fails."""
