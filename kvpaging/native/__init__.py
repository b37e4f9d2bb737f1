"""The CPU's own kernels, in C: compiled once for this machine, and how Python calls them."""
