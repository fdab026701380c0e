"""Metrics for the `evaluate` library, one per file: `evaluate.load(FILE)` takes a file's first
class.

They import `evaluate`, which takes seconds, so this module imports them only to compute.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distribution
from tempfile import TemporaryDirectory


def combine(
    prefix: str, file: str, parts: Mapping[str, Mapping[str, Sequence]], **options: float
) -> dict[str, float]:
    """Returns the results, "PREFIX/NAME", of the metric in a file of this folder.

    parts: result name (the metric's `config_name`) -> columns. `options` are further arguments of
    the metric.
    """
    results: dict[str, float] = {}
    # The script's folder comes first in sys.path, and recipes/ has an evaluate.py.
    installed = str(distribution("evaluate").locate_file(""))
    sys.path.insert(0, installed)
    import evaluate.loading

    sys.path.remove(installed)
    metric_class = evaluate.loading.import_main_class(f"{__name__}.{file}")
    with TemporaryDirectory() as folder:
        for name, columns in parts.items():
            metric = metric_class(keep_in_memory=True, cache_dir=folder)
            metric.config_name = name  # the constructor would put it into a path
            results |= metric.compute(**columns, **options)
    return {f"{prefix}/{name}": value for name, value in results.items()}
