"""Optional kernels in C for decode steps of few rows, beside the torch forms of the ops, which they never replace."""
