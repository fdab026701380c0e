"""Evaluations. Each shares its work out over the ranks, by index, and counts no sample twice."""
