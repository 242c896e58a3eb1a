"""`meshloom doctor`: what is wrong with a machine, its data or a run."""
