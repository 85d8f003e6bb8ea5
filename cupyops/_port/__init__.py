"""Translation of the host code of C++ extensions to Python: what `python -m cupyops port` writes."""
