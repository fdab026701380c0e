"""Studies: grids of runs that resume, comparisons with intervals, tuning."""
