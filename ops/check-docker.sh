#!/bin/sh
# Prints what docker-compose.yml needs and this machine does not have; prints nothing if all is there.
#
# Health checks have `start_interval` since engine 25 and compose 2.20.2. Older versions ignore or
# refuse it.
set -eu
MIN_ENGINE=25
MIN_COMPOSE=2.20.2

fail() {
    echo "$1" >&2
    exit 1
}

# Whether version $1 is at least $2; both have up to three numbers.
at_least() {
    [ "$(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n -k3,3n | head -n1)" = "$2" ]
}

command -v docker > /dev/null 2>&1 ||
    fail "docker is missing: install Docker Engine $MIN_ENGINE or later with the compose plugin"
compose="$(docker compose version --short 2> /dev/null)" ||
    fail "docker has no compose plugin: install docker-compose-plugin (compose $MIN_COMPOSE or later)"
compose="${compose#v}"
at_least "${compose%%[-+]*}" "$MIN_COMPOSE" ||
    fail "docker compose is $compose, and $MIN_COMPOSE or later is needed"
engine="$(docker version --format '{{.Server.Version}}' 2> /dev/null)" ||
    fail "the docker engine does not answer: is it started, and may you use it (group docker)?"
at_least "${engine%%[-+]*}" "$MIN_ENGINE" ||
    fail "the docker engine is $engine, and $MIN_ENGINE or later is needed"
