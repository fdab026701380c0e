"""Prepared data on the Hub: push, pull, and training on it by `--data_dir hub:USER/NAME`.

A repository is a data set in the format of `data/shards.py`.
"""

import shutil
from pathlib import Path

from filelock import FileLock

from gpt2_accel.data.shards import HUB, folder_of, read_manifest
from gpt2_accel.data.source import verify_data
from gpt2_accel.hf.hub import check_push, push
from gpt2_accel.runtime.files import check_unused, first_line, write_file

# Other data sets may be large.
DATA_FILES = ["manifest.json", "tokenizer/*", "*.bin", "README.md"]

CARD = """---
license: other
tags: [gpt2_accel]
---

# {repo_id}

Token shards of gpt2_accel.

- Source: {manifest[source]}. The source's license applies: check it, and name it here.
- Tokenizer: {manifest[tokenizer][name]}, {manifest[tokenizer][vocab_size]:,} tokens
- Training split: {manifest[splits][train][tokens]:,} tokens

Train on it by `--data_dir hub:{repo_id}`, or download it by
`prepare_data.py pull {repo_id} --data_dir FOLDER`.
"""


def open_hub(data_dir: str | Path) -> None:
    """Downloads data on the Hub, `hub:USER/NAME[@REVISION]`, into `folder_of(data_dir)`.

    Does nothing for a folder. Existing data is not downloaded again, so that a run that resumes
    reads the same commit. One process of a machine downloads, the others wait. Raises `OSError` if
    the Hub cannot be reached, `ValueError` if it has no such prepared data or a file is damaged.
    """
    if not str(data_dir).startswith(HUB):
        return
    folder = folder_of(data_dir)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            pull_data(str(data_dir).removeprefix(HUB), folder)


def pull_data(name: str, data_dir: str | Path) -> dict:
    """Downloads prepared data, `USER/NAME` or `USER/NAME@REVISION`, into the new folder `data_dir`.

    A download that was interrupted continues. Returns the manifest. Raises `OSError` if the Hub has
    no such data or cannot be reached, `ValueError` if a file is damaged.
    """
    from huggingface_hub import snapshot_download

    data_dir = Path(data_dir)
    check_unused(data_dir)
    repo_id, _, revision = name.partition("@")
    work = data_dir.with_name(f".{data_dir.name}.partial")
    try:
        snapshot_download(
            repo_id,
            repo_type="dataset",
            revision=revision or None,
            allow_patterns=DATA_FILES,
            local_dir=work,
        )
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"{name} could not be downloaded ({first_line(error)}): check the name, the network "
            "and the login, and start the same command again, it continues"
        ) from error
    shutil.rmtree(work / ".cache", ignore_errors=True)
    verify_data(work)
    work.rename(data_dir)
    return read_manifest(data_dir)


def push_data(data_dir: str | Path, repo_id: str, *, private: bool) -> str:
    """Uploads a data folder, with a data set card in its `README.md` unless there is one.

    First checks the shards. Returns the repository's URL. Raises `ValueError` if the folder holds
    no prepared data, if a shard is damaged or if there is no login, `OSError` if the upload fails.
    """
    data_dir = Path(data_dir)
    manifest = read_manifest(data_dir)
    check_push(repo_id)
    if "mixture" in manifest:
        raise ValueError(f"{data_dir} is a mixture: push the folders that it mixes")
    verify_data(data_dir)
    if not (data_dir / "README.md").exists():
        write_file(data_dir / "README.md", CARD.format(repo_id=repo_id, manifest=manifest))
    return push(data_dir, repo_id, private=private, repo_type="dataset")
