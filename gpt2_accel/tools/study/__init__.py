"""Studies: grids of runs, comparisons with intervals, tuning, scaling laws."""
