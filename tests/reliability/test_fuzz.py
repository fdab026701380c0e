"""Fuzzing: reading a file with any content gives a result or one clear error."""

import json
import shutil

import pytest
from conftest import LONG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2_accel.checkpoint.manifest import find_corruption
from gpt2_accel.data.shards import verify_data
from gpt2_accel.data.stream import TokenStream

CLEAR = (ValueError, FileNotFoundError)
FUZZ = settings(
    deadline=None,
    max_examples=150 if LONG else 30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


def places(value, path=()):
    """Yields the paths of all values in nested JSON."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value if type(value) is list else [])
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, new):
    """Returns a copy of `value` with `new` at `path`."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@given(st.data())
@FUZZ
def test_any_data_manifest(data_dir, tmp_path, data):
    folder = tmp_path / "data"
    if not folder.exists():
        shutil.copytree(data_dir, folder)
    manifest = json.loads((data_dir / "manifest.json").read_text())
    where = data.draw(st.sampled_from(list(places(manifest))))
    (folder / "manifest.json").write_text(json.dumps(changed(manifest, where, data.draw(JSON))))
    try:
        stream = TokenStream(folder, "train")
        assert stream.read(0, 8).shape == (8,)
        verify_data(folder)
    except CLEAR as error:
        assert str(error)


@given(JSON | st.dictionaries(st.just("files"), JSON))
@FUZZ
def test_any_checkpoint_manifest(tmp_path, content):
    (tmp_path / "training_state").mkdir(exist_ok=True)
    (tmp_path / "training_state/manifest.json").write_text(json.dumps(content))
    assert isinstance(find_corruption(tmp_path), str)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x"])
def test_a_manifest_cannot_name_files_outside_its_folder(data_dir, tmp_path, name):
    folder = shutil.copytree(data_dir, tmp_path / "data")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"]["shards"][0]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        TokenStream(folder, "train")
