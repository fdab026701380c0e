"""Prepared data on the Hub: push, pull, and training from it without a download, by `--data_dir hub:USER/NAME`.

A repository is a data set that holds what `data/shards.py` describes, X.
"""

import shutil
from functools import partial
from pathlib import Path

from filelock import FileLock

from gpt2_accel.data.remote import RemoteShards, digests
from gpt2_accel.data.shards import (
    HUB,
    MANIFEST,
    UnreadableData,
    folder_of,
    listed_shards,
    read_manifest,
    verify_data,
)
from gpt2_accel.data.sources import data_set_info
from gpt2_accel.hf.hub import check_push, push
from gpt2_accel.runtime.files import (
    atomic_directory,
    check_unused,
    first_line,
    readable_size,
    write_file,
    write_json,
)

COMMIT = "commit.txt"  # in the cached folder of a repository: the commit whose files it describes
TIMEOUT = 10.0  # seconds of a request without an answer
CARD = """---
license: other
tags: [gpt2_accel]
---

# {repo_id}

Token shards of gpt2_accel.

- Source: {manifest[source]}. The license is that of the source: check it, and name it here.
- Tokenizer: {manifest[tokenizer][name]}, {manifest[tokenizer][vocab_size]:,} tokens
- Training split: {manifest[splits][train][tokens]:,} tokens

Download it by `prepare_data.py pull {repo_id} --data_dir FOLDER`. If it has a `manifest.json`, `--data_dir hub:{repo_id}`
trains on it without a download.
"""


def open_hub(data_dir: str, rank: int = 0, ranks: int = 1) -> RemoteShards | None:
    """Opens data on the Hub, `hub:USER/NAME` or `hub:USER/NAME@REVISION`; returns the reader of its shards, None for a folder.

    The first time this writes a manifest, the tokenizer and the revision's commit into `folder_of(data_dir)`. Later it asks
    the Hub for shards only, so that a run that resumes reads the same commit. `rank` of the `ranks` processes of this
    machine fetches its share of what is ahead.

    Raises `OSError` if the Hub has no such data or cannot be reached, `ValueError` if it is no prepared data.
    """
    if not data_dir.startswith(HUB):
        return None
    folder = folder_of(data_dir)
    repo_id, _, revision = data_dir.removeprefix(HUB).partition("@")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / COMMIT).exists():
            commit = data_set_info(repo_id, revision or None).sha
            with atomic_directory(folder, replace=True) as scratch:
                download(repo_id, commit, scratch, allow_patterns=[MANIFEST, "tokenizer/*"])
                if not (scratch / MANIFEST).exists():
                    raise ValueError(
                        f"{repo_id} holds no prepared data, since {MANIFEST} is missing: prepare its text by "
                        "prepare_data.py hf, or download token files such as train_000001.bin by prepare_data.py pull"
                    )
                (scratch / COMMIT).write_text(commit)
                read_manifest(scratch)
    fetch = partial(fetch_bytes, repo_id, (folder / COMMIT).read_text())
    return RemoteShards(folder, fetch, read_manifest(folder).get("sums", {}), rank, ranks)


def fetch_bytes(repo_id: str, commit: str, file: str, start: int, end: int, size: int) -> bytes:
    """Returns the bytes [start, end) of a file of `size` bytes of a data set on the Hub.

    Raises `UnreadableData` if it cannot be fetched, or the answer is neither these bytes nor the
    whole file.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    url = hf_hub_url(repo_id, file, repo_type="dataset", revision=commit)
    headers = build_hf_headers()
    # A compressed answer would be a range of the compressed file.
    headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    try:
        response = http_backoff(
            "GET",
            url,
            headers=headers,
            timeout=TIMEOUT,
            max_retries=12,  # four minutes of waits, which begin with a second
            max_wait_time=30.0,
        )
        hf_raise_for_status(response)
        data = response.content
        if response.status_code == 200 and len(data) == size:
            return data[start:end]
        expected = 206, f"bytes {start}-{end - 1}/{size}", end - start
        found = response.status_code, response.headers.get("Content-Range"), len(data)
        if found != expected:
            raise OSError(f"status, range and length of the answer are {found}, not {expected}")
        return data
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise UnreadableData(
            f"{file} cannot be fetched ({first_line(error)}): start the same command again later"
        ) from error


def download(repo_id: str, commit: str, folder: Path, **files: list[str]) -> None:
    """Downloads a data set on the Hub into a folder; `files` are the patterns of `snapshot_download`. Raises `OSError`."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(repo_id, repo_type="dataset", revision=commit, local_dir=folder, **files)
    except Exception as error:  # the HTTP client's errors differ between its versions
        raise OSError(
            f"{repo_id} could not be downloaded ({first_line(error)}): start the same command again, it continues"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def pull_data(name: str, data_dir: str | Path) -> dict:
    """Downloads prepared data, `USER/NAME` or `USER/NAME@REVISION`, into the new folder `data_dir`; returns its manifest.

    Prints the size first. A download that was interrupted continues. Raises the errors of `open_hub` and `verify_data`.
    """
    data_dir = Path(data_dir)
    check_unused(data_dir)
    repo_id, _, revision = name.partition("@")
    found = data_set_info(repo_id, revision or None, files_metadata=True)
    size = sum(file.size or 0 for file in found.siblings)
    print(f"{repo_id}: {len(found.siblings):,} files, {readable_size(size)}", flush=True)
    work = data_dir.with_name(f".{data_dir.name}.{found.sha[:12]}.partial")
    download(repo_id, found.sha, work)
    verify_data(work)
    work.rename(data_dir)
    return read_manifest(data_dir)


def push_data(data_dir: str | Path, repo_id: str, *, private: bool = True) -> str:
    """Uploads a data folder, with a data set card in its `README.md` unless there is one; returns the repository's URL.

    First checks the shards, and writes the digests of their pieces into the manifest
    (`data/remote.py`). Other trainers' token files have no manifest and get none.

    Raises `ValueError` if the folder holds no prepared data, if a shard is damaged or if there is
    no login, `OSError` if the upload fails.
    """
    data_dir, manifest = Path(data_dir), read_manifest(data_dir)
    check_push(repo_id)
    if "mixture" in manifest:
        raise ValueError(f"{data_dir} is a mixture: push the folders that it mixes")
    verify_data(data_dir)
    if "format" in manifest:
        files = [shard["file"] for shard in listed_shards(manifest)]
        manifest = {**manifest, "sums": {file: digests(data_dir / file) for file in files}}
        write_json(data_dir / MANIFEST, manifest)
    if not (data_dir / "README.md").exists():
        write_file(data_dir / "README.md", CARD.format(repo_id=repo_id, manifest=manifest))
    return push(data_dir, repo_id, private=private, repo_type="dataset")
