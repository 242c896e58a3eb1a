"""Diagnoses a machine, its data and its runs, for `meshloom doctor`."""
