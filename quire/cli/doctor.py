"""`quire doctor`: checks what would cause errors later, and prints what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from quire.cli.console import Console, add_server, few, sides_of
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK
from quire.cli.findings import Finding, Verdict
from quire.cli.model_checks import examined_table
from quire.cli.model_files import examined_model, examined_state
from quire.cli.schemes import url_hint
from quire.cli.server_checks import examined_cluster, examined_server
from quire.cli.sources import program_setting, values_of_variables
from quire.errors import QuireError
from quire.queue.repair.losses import Losses, inspect_losses
from quire.queue.repair.restore import Lost
from quire.queue.roles import Observer
from quire.queue.workers.workers import WorkerInfo
from quire.transport.connection import is_of_database, is_of_stranger, translated
from quire.version import install_hint

#: The oldest supported interpreter.
MIN_PYTHON = (3, 11)

#: The largest difference between the clocks of Redis and this machine; with more, the times in
#: different logs cannot be compared.
MAX_CLOCK_SKEW_SECONDS = 5.0

#: The advice for requests whose keys in Redis are lost, so that no worker can find them.
LOST_ADVICE = (
    "a worker restores them within a minute, or later if many thousands are open; without a worker "
    "they wait until they expire. A submit with the same id restores an entry at once. Find out "
    "what trims or deletes streams, or whether Redis evicts keys"
)

#: The longest time torch may take to load.
TORCH_SECONDS = 120.0


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire doctor`. InvalidRequest for an invalid file of settings."""
    model = program_setting(os.environ, "model")
    help_ = "folder or .gguf file to check [as for a worker: QUIRE_MODEL, or abacus]"
    parser.add_argument("--model", default=model, metavar="MODEL", help=help_)
    table = program_setting(os.environ, "models_file") or values_of_variables(
        os.environ, ("models_file",), prefix="QUIRE_GATEWAY_"
    ).get("models_file")
    parser.add_argument(
        "--models-file",
        default=table,
        metavar="FILE",
        help="table of models to check [as for a worker or a gateway: QUIRE_MODELS_FILE or "
        "QUIRE_GATEWAY_MODELS_FILE]",
    )
    parser.add_argument("--no-torch", action="store_true", help="do not load torch")
    add_server(parser)


def run_doctor(arguments: argparse.Namespace, console: Console) -> int:
    """Prints one line per check; 1 when one has failed."""
    findings = []
    for finding in _examine(arguments):
        findings.append(finding)
        advice = f"\n      -> {finding.advice}" if finding.advice else ""
        text = f"{finding.verdict:4}  {finding.check}: {finding.detail}{advice}"
        console.data(finding, text)
    failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    return EXIT_ERROR if failed else EXIT_OK


def _examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info[:2] >= MIN_PYTHON
    yield Finding("python", Verdict.OK if good else Verdict.FAIL, version)
    brokers = sides_of(Observer, arguments, retry_seconds=0.0)
    yield from _redis(brokers, url=arguments.redis_url)
    if arguments.models_file:
        yield from examined_table(brokers[0], Path(arguments.models_file))
    if not arguments.no_torch:
        yield _torch()
    yield examined_model(arguments.model)
    if not arguments.no_torch:
        yield from examined_state(arguments.model)
    preset = program_setting(os.environ, "preset")
    shown = "`quire config show --origin` shows what it sets"
    yield Finding("preset", Verdict.OK, f"{preset}; {shown}" if preset else "none is set here")


def _redis(brokers: Sequence[Observer], *, url: str) -> Iterator[Finding]:
    connection = brokers[0].connection
    try:
        began = time.monotonic()
        connection.ping()
        milliseconds = (time.monotonic() - began) * 1000
    except RedisError as error:
        yield Finding("redis", Verdict.FAIL, str(translated(error)), _advice(error, url))
        return
    yield Finding("redis", Verdict.OK, f"answers in {milliseconds:.1f} ms")
    info = _info(connection)
    if info:
        yield from examined_server(info)
    yield from examined_cluster(brokers)
    yield _scripts(connection)
    skew = abs(brokers[0].now_ms() / 1000 - time.time())
    verdict = Verdict.OK if skew <= MAX_CLOCK_SKEW_SECONDS else Verdict.WARN
    yield Finding("clock", verdict, f"{skew:.1f} s between Redis and this machine")
    for broker in brokers:
        yield from _workers(broker)
        yield from _losses(broker)


def _advice(error: RedisError, url: str) -> str:
    """What to do about a server that does not answer a PING."""
    if isinstance(error, AuthenticationError):
        return "set QUIRE_REDIS_PASSWORD, and put the user into the url unless it is the default"
    if is_of_stranger(error):
        return "add the CA that signed its certificate to the url: `?ssl_ca_certs=<file>`"
    if is_of_database(error):
        return "put another number, or none, after the last `/` of the url"
    if isinstance(error, ResponseError):
        return "repair the server first; see its log"
    return f"set --redis-url or QUIRE_REDIS_URL to a running server{url_hint(url, error)}"


def _info(connection: redis.Redis) -> dict[str, Any]:
    try:
        info: Any = connection.info()
    except RedisError:
        # Some managed servers and test doubles do not support INFO; its checks are skipped then.
        return {}
    return dict(info)


def _scripts(connection: redis.Redis) -> Finding:
    try:
        connection.eval("return 1", 0)
    except NoPermissionError:
        advice = "correct for an observer; all other roles need EVAL, EVALSHA and SCRIPT"
        return Finding("redis scripts", Verdict.WARN, "not allowed to this user", advice)
    except RedisError as error:
        advice = "every transition is a script: allow EVAL, EVALSHA and SCRIPT"
        return Finding("redis scripts", Verdict.FAIL, str(error), advice)
    return Finding("redis scripts", Verdict.OK, "allowed")


def _losses(broker: Observer) -> Iterator[Finding]:
    """Whether workers can find every open request; no finding if this user may not read them."""
    try:
        losses = inspect_losses(broker.connection, broker.keys)
    except QuireError as error:
        if not isinstance(error.__cause__, NoPermissionError):
            yield Finding("open requests", Verdict.FAIL, str(error))
        return
    where = f"on shard {broker.keys.shard} of queue {broker.keys.queue!r}"
    seen = f"{losses.num_seen} {where}"
    if losses.num_seen < losses.num_open:
        seen = f"{losses.num_seen} of {losses.num_open} {where}"
    if not losses.lost:
        yield Finding("open requests", Verdict.OK, f"{seen}, none of them lost")
        return
    yield Finding("open requests", Verdict.FAIL, f"{seen}, {_described(losses)}", LOST_ADVICE)


def _described(losses: Losses) -> str:
    request_id, what = next(iter(losses.lost.items()))
    missing = "its record" if what is Lost.RECORD else f"its {what} in Redis"
    return f"{len(losses.lost)} of them lost: {request_id}, for instance, lacks {missing}"


def _workers(broker: Observer) -> Iterator[Finding]:
    try:
        alive = [info for info in broker.workers() if info.is_alive]
    except QuireError as error:
        if isinstance(error.__cause__, NoPermissionError):
            detail = "this user may not read their registry"
            advice = "correct for a producer; run the check as another user"
            yield Finding("workers", Verdict.WARN, detail, advice)
        else:
            yield Finding("workers", Verdict.FAIL, str(error))
        return
    where = f"on shard {broker.keys.shard} of queue {broker.keys.queue!r}"
    if not alive:
        yield Finding("workers", Verdict.WARN, f"none {where}", "start one: quire worker")
        return
    named = ", ".join(f"{info.name} ({info.state})" for info in alive)
    yield Finding("workers", Verdict.OK, f"{len(alive)} {where}: {named}")
    # A loading worker has not reported its abilities yet.
    ready = [info for info in alive if info.is_ready]
    yield from _twins(ready, where)
    yield from _models(ready, where)
    yield from _constraints(ready, where)
    yield from _lengths(ready, where)
    yield from _adapters(ready, where)
    yield from _policies(ready, where)


def _twins(workers: Sequence[WorkerInfo], where: str) -> Iterator[Finding]:
    """Whether several workers have the same name, and so the same entry of the registry."""
    if names := _those_with(workers, "twins", 1):
        detail = f"several workers {where} have the name {few(names)}"
        advice = "give each its own name, or leave worker_name unset"
        yield Finding("names", Verdict.FAIL, detail, advice)


def _models(workers: Sequence[WorkerInfo], where: str) -> Iterator[Finding]:
    """Whether different workers serve different models."""
    models = sorted({info.model for info in workers if info.model})
    if len(models) > 1:
        parts = [
            f"{model!r} by {few([info.name for info in workers if info.model == model])}"
            for model in models
        ]
        advice = "give each model its own queue: a worker takes every request of its queue"
        yield Finding("models", Verdict.FAIL, f"served {where}: {', '.join(parts)}", advice)


def _constraints(workers: Sequence[WorkerInfo], where: str) -> Iterator[Finding]:
    """Whether all workers serve requests with a constraint, or all refuse them."""
    able, unable = _those_with(workers, "grammars", 1), _those_with(workers, "grammars", 0)
    if able and unable:
        detail = f"served by {', '.join(able)} {where}, refused by {', '.join(unable)}"
        advice = "install the extra `grammars` for all workers, or send such requests to one queue"
        yield Finding("constraints", Verdict.WARN, detail, advice)
    elif able:
        yield Finding("constraints", Verdict.OK, f"served {where}")
    elif unable:
        detail = f"refused {where}: no worker has the extra `grammars`"
        advice = "install it for all workers, unless no request of this queue has a constraint"
        yield Finding("constraints", Verdict.WARN, detail, advice)


def _lengths(workers: Sequence[WorkerInfo], where: str) -> Iterator[Finding]:
    """Whether all workers have the same limit for the length of a request."""
    named = "max_model_len"
    lengths = sorted({info.load[named] for info in workers if named in info.load})
    if len(lengths) > 1:
        parts = [
            f"{length:.0f} tokens for {' and '.join(_those_with(workers, named, length))}"
            for length in lengths
        ]
        advice = "set the same max_model_len, or one worker refuses what another serves"
        detail = f"longest request {where}: {', '.join(parts)}"
        yield Finding("lengths", Verdict.WARN, detail, advice)


def _adapters(workers: Sequence[WorkerInfo], where: str) -> Iterator[Finding]:
    """Whether all workers have the same adapters, in the same revisions."""
    owners = {name: [info for info in workers if name in info.adapters] for name in _names(workers)}
    if not owners:
        return
    missing = [name for name, having in owners.items() if len(having) < len(workers)]
    if missing:
        without = {info.name for info in workers if not info.adapters.keys() >= set(missing)}
        detail = f"{few(missing)} {where}: refused by {few(sorted(without))}"
        advice = "give all workers the same folder of adapters, or each folder its own queue"
        yield Finding("adapters", Verdict.WARN, detail, advice)
    differing = [
        name for name, having in owners.items() if len({info.adapters[name] for info in having}) > 1
    ]
    if differing:
        detail = f"{few(differing)} {where}: in several revisions"
        advice = "no worker continues a request of another revision: give all the same revision"
        yield Finding("adapters", Verdict.WARN, detail, advice)
    if not missing and not differing:
        yield Finding("adapters", Verdict.OK, f"{few(list(owners))} {where}")


def _policies(workers: Sequence[WorkerInfo], where: str) -> Iterator[Finding]:
    """Whether all workers order requests in the same way."""
    policies = sorted({info.policy for info in workers if info.policy})
    if len(policies) > 1:
        parts = [
            f"{policy} by {few([info.name for info in workers if info.policy == policy])}"
            for policy in policies
        ]
        advice = (
            "set the same policy, aging_seconds and max_model_len for all workers: the queue is "
            "ranked by those of the worker that started last"
        )
        detail = f"several policies {where}: {'; '.join(parts)}"
        yield Finding("policies", Verdict.WARN, detail, advice)


def _names(workers: Sequence[WorkerInfo]) -> list[str]:
    return sorted({name for info in workers for name in info.adapters})


def _those_with(workers: Sequence[WorkerInfo], ability: str, value: float) -> list[str]:
    """The names of the workers whose registry entry has this value."""
    return [info.name for info in workers if info.load.get(ability) == value]


_TORCH_PROGRAM = """
import json, torch
cuda = torch.cuda.is_available()
name = torch.cuda.get_device_name(0) if cuda else "cpu"
print(json.dumps([torch.__version__, torch.version.cuda, name, torch.get_num_threads()]))
"""


def _torch() -> Finding:
    try:
        # In a separate process: the command itself never loads torch.
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _TORCH_PROGRAM],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return Finding("torch", Verdict.FAIL, f"did not load within {TORCH_SECONDS:.0f} s")
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        advice = f"only workers need it, with {install_hint('worker')}"
        return Finding("torch", Verdict.WARN, last, advice)
    version, cuda, device, threads = json.loads(done.stdout.splitlines()[-1])
    build = f"CUDA {cuda}" if cuda else "no CUDA"
    if cuda and device == "cpu":
        advice = "the build has CUDA and finds no device: check the driver"
        return Finding("torch", Verdict.WARN, f"{version} ({build}), device cpu", advice)
    return Finding("torch", Verdict.OK, f"{version} ({build}), {device}, {threads} threads")
