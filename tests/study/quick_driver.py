"""Runs recipes/compare.py with signs of life every second, and short waits, so that a test need not wait for minutes."""

import runpy
import sys
from pathlib import Path

from gpt2_accel.study import children, engine

engine.HEARTBEAT, engine.STALE, engine.LOOK, children.GRACE = 1, 10, 0.2, 4.0
sys.argv[0] = str(Path(__file__).parents[2] / "recipes/compare.py")
runpy.run_path(sys.argv[0], run_name="__main__")
