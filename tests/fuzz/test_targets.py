"""What reads bytes never fails in a way it does not promise: any bytes, and good bytes gone bad."""

from __future__ import annotations

import json
import random
import re

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.wide.compressed_tensors import compressed_tensors
from engine.model.wide.gguf_header import read_header
from engine.model.wide.gptq_and_awq import awq, gptq
from engine.model.wide.stored_tensors import stored_tensors
from quire.errors import ProtocolError
from quire.queue.publish.output_log import OutputRead
from quire.wire.output import Completion
from quire.wire.protocol import GenerationRequest
from tests.fuzz import __main__ as command
from tests.fuzz import files
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import _FIELDS, SEEDS, TARGETS

#: Values of every type msgpack has, nested.
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(),
        st.text(),
        st.binary(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)

every_target = pytest.mark.parametrize("name", TARGETS)


def test_every_target_has_good_bytes_to_begin_with():
    assert set(SEEDS) == set(TARGETS)
    assert GenerationRequest.decode(SEEDS["request"][0]).parse_body()
    assert Completion.decode(SEEDS["completion"][0], request_id="r")


def test_the_files_and_notes_to_begin_with_are_read():
    with files.file_of(SEEDS["gguf_header"][0]) as file:
        assert [tensor.name for tensor in read_header(file).tensors] == ["norm", "q"]
    with files.file_of(SEEDS["weights_header"][0]) as file:
        assert [tensor.name for tensor in stored_tensors(lambda _: file)] == ["norm", "q"]
    notes = [json.loads(note) for note in SEEDS["quantization_note"]]
    for note, read in zip(notes, (compressed_tensors, compressed_tensors, gptq, awq), strict=True):
        assert read(note).parts


@every_target
@given(data=st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(name, data):
    TARGETS[name](data)


@every_target
@given(seed=st.integers(0, 1 << 32), rounds=st.integers(1, 6))
@settings(deadline=None)
def test_good_bytes_gone_bad_are_read_or_refused(name, seed, rounds):
    draw = random.Random(seed)
    data = draw.choice(SEEDS[name])
    for _ in range(rounds):
        data = mutated(data, draw)
    TARGETS[name](data)


#: Fields that messages have, so that wrong values meet the checks behind the first one.
NAMES = st.sampled_from([
    "v", "id", "kind", "body", "tenant", "priority", "deadline_ms", "not_before_ms", "headers",
    "idempotency_key", "metadata", "created_ms", "state", "finish_reason", "usage", "error", "tail",
    "prompt", "messages", "max_tokens", "stop", "seed", "logit_bias", "temperature", "json_schema",
    "regex", "choice", "grammar", "response_format",
])  # fmt: skip


@pytest.mark.parametrize("name", ["request", "completion", "wire_message"])
@given(changes=st.dictionaries(NAMES, VALUES, max_size=3), inside=st.booleans())
@settings(deadline=None)
def test_a_message_with_any_values_is_read_or_refused(name, changes, inside):
    fields = msgpack.unpackb(SEEDS[name][0])
    place = fields["body"] if inside and "body" in fields else fields
    place.update(changes)
    TARGETS[name](msgpack.packb(fields, use_bin_type=True))


@pytest.mark.parametrize("name", ["log_entry", "claim_reply", "record", "dead_letter"])
@given(
    fields=st.sampled_from(_FIELDS),
    dropped=st.integers(0, 9),
    changed=st.integers(0, 9),
    value=st.binary(max_size=12) | st.integers(-3, 1 << 70).map(lambda n: b"%d" % n),
    entry_id=st.sampled_from([b"1-1", b"0-1", b"1", b"x-y", b"", b"-1-1", b"9" * 30 + b"-1"]),
)
@settings(deadline=None)
def test_an_entry_with_one_field_changed_is_read_or_refused(
    name, fields, dropped, changed, value, entry_id
):
    kept = {key: part for place, (key, part) in enumerate(fields.items()) if place != dropped}
    if changed < len(kept):
        kept[list(kept)[changed]] = value
    TARGETS[name](msgpack.packb([entry_id, kept]))


def test_a_foreign_entry_in_a_log_is_an_error_that_names_it():
    with pytest.raises(ProtocolError, match="b'3-1'"):
        list(OutputRead("r", [(b"3-1", {b"hello": b"world"})], seen=0))


def run_command(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["tests.fuzz", "--plain", *arguments])
    return command.main(), capsys.readouterr().out


def test_the_command_plays_every_target_and_counts(monkeypatch, capsys):
    code, told = run_command(monkeypatch, capsys, "--seconds", "1")
    assert code == 0
    counts = dict(re.findall(r"^(\w+) +(\d+) executions$", told, re.MULTILINE))
    assert counts.keys() == TARGETS.keys()
    assert all(int(count) > 10 for count in counts.values())
    assert f"executions        {sum(map(int, counts.values()))}\nfindings          0\n" in told


def test_a_reader_that_fails_as_none_may_is_a_finding_with_its_bytes(monkeypatch, capsys):
    def careless(name: str, fields: dict[bytes, bytes]) -> None:
        fields[b"state"].decode()

    monkeypatch.setattr("tests.fuzz.targets.status_of", careless)
    code, told = run_command(monkeypatch, capsys, "--seconds", "10", "--target", "record")
    assert code == 1
    assert "KeyError: b'state'" in told
    assert "findings          1" in told
