"""Running a translated kernel: threads, memory, barriers, and the checks on all of them."""
