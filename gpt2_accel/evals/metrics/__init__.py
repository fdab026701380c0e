"""Metrics of the `evaluate` library, one a file: `evaluate.load(FILE)` takes the first class of a
file.

They import `evaluate`, which takes seconds: this module does so where it computes.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from tempfile import TemporaryDirectory

from accelerate import PartialState
from accelerate.utils import broadcast_object_list


def combine(
    prefix: str, file: str, parts: Mapping[str, Mapping[str, Sequence]], **options: float
) -> dict[str, float]:
    """Returns the results, "PREFIX/NAME", of the metric in a file here, computed on the main
    process. All ranks call it.

    parts: the columns of each result, by its name, the metric's `config_name`. `options` are
    further arguments of all.
    """
    results: dict[str, float] = {}
    if PartialState().is_main_process:
        # The folder of a script comes first, and that of the recipes has an evaluate.py.
        installed = str(distribution("evaluate").locate_file(""))
        sys.path.insert(0, installed)
        import evaluate.loading

        sys.path.remove(installed)
        metric_class = evaluate.loading.import_main_class(f"{__name__}.{file}")
        with TemporaryDirectory() as folder:
            for name, columns in parts.items():
                metric = metric_class(keep_in_memory=True, cache_dir=folder)
                metric.config_name = name  # set here, it is not part of a path
                results |= metric.compute(**columns, **options)
    [results] = broadcast_object_list([results])
    return {f"{prefix}/{name}": value for name, value in results.items()}
