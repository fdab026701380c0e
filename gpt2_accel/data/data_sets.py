"""Data sets on the Hub or in a folder, whose files `datasets` finds."""

import os
from pathlib import Path

from gpt2_accel.files import first_line

SECONDS_TO_ANSWER = 8


def hub_files(
    name: str,
    *,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    data_files: str | None = None,
) -> tuple[list[str], str | None]:
    """Returns the files of a data set on the Hub or in a folder, and its revision (a commit).

    Raises `ValueError` if the data set, its configuration or split does not exist, or its files are neither Parquet nor
    JSON, `OSError` if the Hub has no such data set or cannot be reached.
    """
    from datasets import load_dataset_builder

    revision = pinned_revision(name, revision)
    try:
        builder = load_dataset_builder(name, config, data_files=data_files, revision=revision)
    except Exception as error:  # for an empty name, an IndexError
        raise ValueError(
            f"the data set {name} cannot be opened ({first_line(error)}): check its name, --config and --data_files, and "
            "the network; if it has a script, try --revision refs/convert/parquet"
        ) from error
    splits = builder.config.data_files or {}
    if split not in splits:
        known = ", ".join(map(str, splits)) or "none"
        raise ValueError(f"the data set {name} has no split {split!r}, only {known}: set --split")
    for file in splits[split]:
        if not {".parquet", ".json", ".jsonl"} & set(Path(file).suffixes):
            raise ValueError(
                f"{file} is neither Parquet nor JSON: give --revision refs/convert/parquet, where the Hub has data sets as "
                "Parquet, or convert it"
            )
    return list(splits[split]), revision


def pinned_revision(name: str, revision: str | None) -> str | None:
    """Resolves the `revision` of a data set to a commit; returns `revision` for a local folder or in offline mode.

    One request, so that a wrong name or a missing network is reported within seconds, where `datasets` retries. Raises
    `OSError` if the Hub has no such data set or revision that may be read, or cannot be reached.
    """
    from huggingface_hub import HfApi, constants

    if os.path.exists(name) or constants.HF_HUB_OFFLINE:
        return revision
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=SECONDS_TO_ANSWER).sha
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"the data set {name} cannot be found on the Hub ({first_line(error)}): check its name and the network, log in "
            "if it is not public, or set HF_HUB_OFFLINE=1 to use what was downloaded before"
        ) from error
