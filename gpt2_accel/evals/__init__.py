"""Evaluations. Each splits its samples among the ranks by index and counts every sample once."""
