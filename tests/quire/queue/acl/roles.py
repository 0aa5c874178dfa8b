"""The users of docs/reference/acl.md, and what Redis says to one who may not."""

import re
from pathlib import Path

import pytest
import redis

import quire
from quire.errors import BrokerUnavailable

DOCUMENT = Path(quire.__file__).parents[1] / "docs" / "reference" / "acl.md"

#: The users of the document and their rules, for the queue `default`.
ROLES = {
    name: rules.split()
    for name, rules in re.findall(
        r"^ACL SETUSER (\w+) (.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
    )
}


def refused(call):
    with pytest.raises(BrokerUnavailable, match=r"(?i)no ?perm|can't run this command") as caught:
        call()
    assert isinstance(caught.value.__cause__, redis.RedisError)
