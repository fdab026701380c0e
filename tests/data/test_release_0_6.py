"""Data folders of release 0.6 give the same batches, by digests that release 0.6 made.

If they change, a resumed run reads other text. `fixtures/README.md` says how they were made.
"""

import hashlib

import numpy as np
import pytest
from conftest import load_fixture
from tables import table

from gpt2_accel.data.loader import EvalLoader, TrainLoader
from gpt2_accel.data.source import Data, open_data
from gpt2_accel.tokenizer import byte_tokenizer

RECORDED = table("data/orders_0.6")
FIRSTS = [0, 24, 48, 232, 240, 8180, 8192, 10**6]  # positions of updates of 24 windows


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return load_fixture("release-0.6", tmp_path_factory.mktemp("release"))


class Uneven:
    def __len__(self):
        return 50

    def __getitem__(self, i):
        ids = np.random.default_rng(i).integers(97, 123, 33)
        targets = ids[1:].copy()
        targets[: i % 7] = -100
        return ids[:-1], targets

    def counts(self, i):
        return 32 - i % 7


OWN = {
    "uneven": Uneven(),
    "listed": [list(np.random.default_rng(i).integers(97, 123, 17)) for i in range(37)],
    "rows": [{key: list(range(i, i + 16)) for key in ("input_ids", "labels")} for i in range(30)],
}


def data_of(name, release):
    if name not in OWN:
        return open_data(release / name)
    return Data(byte_tokenizer(), OWN[name], OWN[name], name=name)


def digest_of(batches, documents) -> str:
    sha256 = hashlib.sha256()
    for batch in batches:
        for part in (batch.input_ids, batch.targets, batch.documents if documents else None):
            if part is not None:
                sha256.update(part.numpy().tobytes())
        sha256.update(repr(float(batch.divisor)).encode())
    return sha256.hexdigest()[:16]


def is_recorded(case, batches):
    assert len(batches) == case["batches"]
    assert digest_of(batches, documents=case["data"] != "pairs") == case["digest"]


@pytest.mark.parametrize("case", RECORDED["train"], ids=lambda case: case["digest"])
def test_the_batches_of_updates_are_those_of_release_0_6(case, release):
    data = data_of(case["data"], release)
    loader = TrainLoader(
        data.split("train"),
        sequence_length=case["length"],
        micro_batch_size=case["micro"],
        seed=1337,
        rank=case["rank"],
        world_size=case["ranks"],
        bos=case["bos"],
    )
    loader.phases = [(int(share * 400), weights) for share, weights in data.phases]
    is_recorded(case, [batch for first in FIRSTS for batch in loader.update(first, 24)])


@pytest.mark.parametrize("case", RECORDED["val"], ids=lambda case: case["digest"])
def test_the_batches_of_a_validation_are_those_of_release_0_6(case, release):
    loader = EvalLoader(
        data_of(case["data"], release).split("val"),
        sequence_length=case["length"],
        batch_size=3,
        max_tokens=1024,
        rank=case["rank"],
        world_size=case["ranks"],
    )
    assert (loader.windows, loader.bytes_per_token) == (case["windows"], case["bytes_per_token"])
    is_recorded(case, list(loader))


@pytest.mark.parametrize("name", RECORDED["fingerprints"])
def test_folders_keep_their_fingerprints(name, release):
    assert data_of(name, release).fingerprint == RECORDED["fingerprints"][name]
