#!/bin/sh
# Starts Redis with the password of the secret. It goes through a file in memory, because arguments
# and environment can be read by others; arguments of this script are handed to redis-server.
set -eu
umask 077
printf 'requirepass %s\n' "$(cat /run/secrets/redis_password)" > /run/redis/password.conf
exec redis-server /etc/redis/redis.conf "$@"
