"""From a compiled kernel and Python values to a launch: what the kernel takes, what it is given, where it is loaded."""
