"""`quire usage`: what each tenant has used, from the ends that are kept."""

import json
from datetime import UTC, datetime

from tests.quire.builders import claim_next, make_item, make_request


def use(broker, name, tenant, *, tokens):
    broker.submit(make_request(id=name, tenant=tenant))
    broker.commit([make_item(claim_next(broker).claim, 0, tokens, final=True)])


def test_the_tokens_of_each_tenant_are_added_up(quire, real_broker):
    use(real_broker, "a", "acme", tokens=2)
    use(real_broker, "b", "acme", tokens=3)
    use(real_broker, "c", "other", tokens=1)
    code, out, _ = quire("usage")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["tenant", "requests", "prompt_tokens", "cached_tokens", "output_tokens"],
        ["acme", "2", "6", "0", "5"],
        ["other", "1", "3", "0", "1"],
    ]
    first = json.loads(quire("usage", "--json")[1].splitlines()[0])
    assert (first["tenant"], first["output_tokens"]) == ("acme", 5)


def test_only_the_ends_of_the_given_time_count(quire, real_broker):
    use(real_broker, "a", "acme", tokens=2)
    ended_ms = int(real_broker.told(after="0-0")[0].ended_at * 1000)
    after = datetime.fromtimestamp(ended_ms / 1000 + 1, UTC).isoformat()
    assert "acme" not in quire("usage", "--since", after)[1]
    assert "acme" in quire("usage", "--until", after)[1]
    assert "acme" not in quire("usage", "--until", "2020-01-01")[1]
    code, _, err = quire("usage", "--since", "yesterday")
    assert code != 0 and "ISO 8601" in err
