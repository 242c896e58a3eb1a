"""Sizes in the programs beside this file: rows of a device or of all, widths, layers."""

B, D, F, N = 4096, 1024, 8192, 3
