"""The checks of `quire doctor` on a Redis server: on its INFO, and as a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import redis
from redis.exceptions import NoPermissionError, NoScriptError, RedisError

from quire.cli.findings import Finding, Verdict
from quire.queue.roles import Observer
from quire.transport.cluster.connection import SlotConnection
from quire.transport.connection import translated

#: The oldest server that has all the commands we use.
MIN_REDIS = (6, 2)

#: Fields of INFO: the results of the last writes to disk.
_WRITE_STATUS = ("aof_last_write_status", "rdb_last_bgsave_status")

#: A resource is nearly used up from this share of its limit.
NEAR_SHARE = 0.8

EVICTION_ADVICE = "set maxmemory-policy noeviction, or requests vanish when memory is short"
MEMORY_ADVICE = "raise maxmemory, or shorten the retention: see RedisOutOfMemory in the runbook"
EVICTED_ADVICE = (
    "parts of requests or results may be lost: see `open requests` below. The number stays until "
    "the server is restarted, or until CONFIG RESETSTAT"
)


def examined_server(info: dict[str, Any]) -> Iterator[Finding]:
    """The findings about a server with this INFO."""
    yield _version(info)
    yield _role(info)
    yield _persistence(info)
    yield _memory(info)
    yield from _evictions(info)
    yield from _clients(info)


def _version(info: dict[str, Any]) -> Finding:
    name = "valkey" if "valkey_version" in info else "redis"
    version = str(info.get(f"{name}_version", "unknown"))
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts >= MIN_REDIS:
        return Finding("redis version", Verdict.OK, f"{name} {version}")
    advice = f"needs {'.'.join(map(str, MIN_REDIS))} or later"
    return Finding("redis version", Verdict.FAIL, f"{name} {version}", advice)


def _role(info: dict[str, Any]) -> Finding:
    role = str(info.get("role", "unknown"))
    if role != "slave":
        return Finding("redis role", Verdict.OK, role)
    advice = "a replica takes no writes: use the url of its master, or of its sentinels"
    return Finding("redis role", Verdict.FAIL, role, advice)


def _persistence(info: dict[str, Any]) -> Finding:
    failing = [name for name in _WRITE_STATUS if info.get(name, "ok") != "ok"]
    if failing:
        advice = "its disk is full or broken: see RedisDiskFailing in the runbook"
        return Finding("redis persistence", Verdict.FAIL, f"{', '.join(failing)} err", advice)
    if info.get("aof_enabled"):
        return Finding("redis persistence", Verdict.OK, "append-only file")
    advice = "set appendonly yes, or requests are lost when the server dies"
    return Finding("redis persistence", Verdict.WARN, "no append-only file", advice)


def _memory(info: dict[str, Any]) -> Finding:
    policy, limit = str(info.get("maxmemory_policy", "unknown")), int(info.get("maxmemory", 0))
    # Redis compares this difference with the limit.
    used = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
    share = used / limit if limit else 0.0
    detail = f"{used} bytes used, maxmemory {limit or 'unlimited'}, policy {policy}"
    if limit and policy != "noeviction":
        return Finding("redis memory", Verdict.FAIL, detail, EVICTION_ADVICE)
    if limit and used >= limit:
        return Finding("redis memory", Verdict.FAIL, f"full, {detail}", MEMORY_ADVICE)
    if share >= NEAR_SHARE:
        detail = f"{share:.0%} of maxmemory, {detail}"
        return Finding("redis memory", Verdict.WARN, detail, f"before it is full: {MEMORY_ADVICE}")
    if policy != "noeviction":
        return Finding("redis memory", Verdict.WARN, detail, EVICTION_ADVICE)
    total = int(info.get("total_system_memory", 0))
    if not limit and total and used >= NEAR_SHARE * total:
        detail = f"{used / total:.0%} of the machine's memory, {detail}"
        advice = "set maxmemory: without it the system kills Redis when memory is short"
        return Finding("redis memory", Verdict.WARN, detail, advice)
    return Finding("redis memory", Verdict.OK, detail)


def _evictions(info: dict[str, Any]) -> Iterator[Finding]:
    """No finding without evictions: `redis memory` covers the policy that allows them."""
    if number := int(info.get("evicted_keys", 0)):
        detail = f"{number} keys since the server was started"
        yield Finding("redis evictions", Verdict.WARN, detail, EVICTED_ADVICE)


def _clients(info: dict[str, Any]) -> Iterator[Finding]:
    """No finding while more connections are possible."""
    number, limit = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    if limit and number >= NEAR_SHARE * limit:
        advice = "raise maxclients: at the limit no new client can connect"
        yield Finding("redis clients", Verdict.WARN, f"{number} of {limit}", advice)


#: The hash of no script.
_NO_SCRIPT = "0" * 40

REPLICA_ADVICE = "give it a replica, or its shards are away as long as it is, and lost if it is"
COVERAGE_ADVICE = "assign all slots to masters: see `redis-cli --cluster check`"
USER_ADVICE = "nodes do not copy users: create this one on every node, with `+cluster|slots`"


def examined_cluster(brokers: Sequence[Observer]) -> Iterator[Finding]:
    """The findings about each master, and which one has which shard; none for a single server."""
    connection = brokers[0].connection
    if not isinstance(connection, SlotConnection):
        return
    try:
        masters = connection.nodes.masters()
    except RedisError as error:
        yield Finding("cluster", Verdict.FAIL, str(translated(error)), USER_ADVICE)
        return
    shards: dict[str, list[int]] = {name: [] for name in masters}
    for broker in brokers:
        shards.setdefault(broker.node, []).append(broker.keys.shard)
    places = ", ".join(f"{name} has {_listed(numbers)}" for name, numbers in shards.items())
    yield Finding("cluster", Verdict.OK, f"{len(masters)} masters: {places}")
    for name, master in masters.items():
        for finding in _examined_master(master):
            yield replace(finding, detail=f"{name}: {finding.detail}")


def _listed(shards: Sequence[int]) -> str:
    if not shards:
        return "no shard"
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"


def _examined_master(master: redis.Redis) -> Iterator[Finding]:
    try:
        info: Any = master.info()
    except NoPermissionError:
        info = {}
    except RedisError as error:
        yield Finding("redis", Verdict.FAIL, str(translated(error)), USER_ADVICE)
        return
    if info:
        yield from (one for one in examined_server(info) if one.verdict is not Verdict.OK)
    if info and not info.get("connected_slaves", 0):
        yield Finding("replicas", Verdict.WARN, "none", REPLICA_ADVICE)
    yield from _coverage(master)
    yield from _quirks(master)


def _coverage(master: redis.Redis) -> Iterator[Finding]:
    """No finding while all slots are served; or where a managed service does not tell."""
    try:
        # Two words, so that the reply is the text that a server sends.
        words: Any = master.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
    except RedisError:
        return
    text = words.decode() if isinstance(words, bytes) else str(words)
    lines = dict(line.split(":", 1) for line in text.split() if ":" in line)
    if lines.get("cluster_state", "ok") != "ok":
        served = lines.get("cluster_slots_ok", "?")
        detail = f"state {lines['cluster_state']}, {served} of 16384 slots served"
        yield Finding("cluster state", Verdict.FAIL, detail, COVERAGE_ADVICE)


def _quirks(master: redis.Redis) -> Iterator[Finding]:
    """What managed services leave out or do in their own way."""
    try:
        master.evalsha(_NO_SCRIPT, 0)
    except (NoScriptError, NoPermissionError):
        pass
    except RedisError as error:
        advice = "scripts are loaded when a node answers NOSCRIPT: this service must answer it"
        yield Finding("unknown scripts", Verdict.FAIL, str(error), advice)
    else:
        advice = "this service is no Redis: it runs a script that it does not have"
        yield Finding("unknown scripts", Verdict.FAIL, "no error", advice)
    if _lacks(master, "WAITAOF", 0, 0, 0):
        advice = "`durable` needs it, or `appendfsync always`; without `durable` nothing is missing"
        yield Finding("durable writes", Verdict.WARN, "no WAITAOF", advice)
    if _lacks(master, "CLUSTER", "SHARDS"):
        detail = "no CLUSTER SHARDS: CLUSTER SLOTS is used"
        yield Finding("cluster commands", Verdict.OK, detail)


def _lacks(master: redis.Redis, *words: str | int) -> bool:
    try:
        master.execute_command(*words)  # type: ignore[no-untyped-call]
    except RedisError as error:
        return "unknown" in str(error).lower()
    return False
