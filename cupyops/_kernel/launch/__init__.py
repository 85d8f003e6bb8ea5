"""Launch of a compiled kernel from Python values: its arguments, their checks, and the devices it is loaded on."""
