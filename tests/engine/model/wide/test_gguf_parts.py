"""A model in several GGUF files is that of one file, or is refused with a reason."""

import re
import shutil

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelRefused
from engine.model.wide.loader import load_model
from tests.engine.model.gguf_files import load_dequantized, tiny_model, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with scaled frequencies in parts of five tensors; tests copy it."""
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(tiny_model("llama scaled"), folder / "m.gguf", kind=Type.Q8_0, tensors_in_a_part=5)
    return folder


@pytest.fixture
def parts(folder, tmp_path):
    """The paths of all parts, which the test may change."""
    shutil.copytree(folder, tmp_path / "copy")
    return sorted((tmp_path / "copy").iterdir())


def test_the_model_is_that_of_the_whole_file(parts, tmp_path):
    whole = write_gguf(tiny_model("llama scaled"), tmp_path / "m.gguf", kind=Type.Q8_0)
    expected, loaded = load_dequantized(whole), load_dequantized(parts[0])
    assert len(parts) == 5
    assert loaded.model.config.rope_parameters == expected.model.config.rope_parameters
    state = loaded.model.state_dict()
    for name, values in expected.model.state_dict().items():
        assert torch.equal(state[name], values), name
    assert loaded.stored.keys() == expected.stored.keys()


def test_a_byte_of_any_part_changes_the_fingerprint(parts):
    prints = {load_model(parts[0]).fingerprint}
    for part in parts:
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
        prints.add(load_model(parts[0]).fingerprint)
    assert len(prints) == 1 + len(parts)


def test_another_part_names_the_first_one(parts):
    with pytest.raises(ModelRefused, match=r"ends with -00001-of-00005\.gguf"):
        load_model(parts[1])
    with pytest.raises(ModelRefused, match="one of the 5 parts"):
        load_model(parts[0].rename(parts[0].with_name("renamed.gguf")))


def test_a_missing_truncated_or_wrong_part_is_refused_by_its_name(parts):
    kept = parts[2].read_bytes()
    parts[2].write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ModelRefused, match=re.escape(parts[2].name)):
        load_model(parts[0])
    shutil.copy(parts[3], parts[2])
    with pytest.raises(ModelRefused, match="is not part 3 of 5"):
        load_model(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelRefused, match=rf"{parts[2].name} is not beside it"):
        load_model(parts[0])
