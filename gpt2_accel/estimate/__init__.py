"""Estimates of FLOPs, time and memory before a run."""
