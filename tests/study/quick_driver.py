"""Runs recipes/compare.py with signs of life every second, so that a test need not wait for minutes."""

import runpy
import sys
from pathlib import Path

from gpt2_accel.study import children, engine

engine.HEARTBEAT, engine.STALE = 1, 10
children.SILENCE, children.GRACE = 3.0, 4.0
sys.argv[0] = str(Path(__file__).parents[2] / "recipes/compare.py")
runpy.run_path(sys.argv[0], run_name="__main__")
