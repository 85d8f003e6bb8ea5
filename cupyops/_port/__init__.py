"""From the host code of a C++ extension to Python: what `python -m cupyops port` writes."""
