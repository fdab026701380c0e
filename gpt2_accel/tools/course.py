"""The checks of the course, `course/checks.py`, in a clone and in an installed wheel."""

import sys

from gpt2_accel.runtime.recipe_command import folder

sys.path.append(str(folder("course")))

from checks import check, keep  # noqa: F401
