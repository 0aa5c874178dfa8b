#!/bin/sh
# Starts Redis with the password of the secret. It goes through a file in memory, because arguments
# and environment can be read by others; arguments of this script are handed to redis-server.
set -eu
umask 077

# A log that a crash has torn inside of a transaction is cut back to the last whole one first. Redis
# would start on it as well, but leave the half in the file and, after the next crash, run it as a
# part of what it wrote behind it (docs/adr/0006). A damage larger than any script's effects is not
# a torn end; what to do about that is for a person to say, and Redis refuses to start on it.
largest_end=16777216
for log in /data/appendonlydir/*.manifest /data/appendonly.aof; do
    [ -f "$log" ] || continue
    report=$(redis-check-aof "$log" 2>&1) && continue
    torn=$(printf '%s\n' "$report" | sed -n 's/^AOF analyzed:.* diff=\([0-9]*\)$/\1/p' | tail -n 1)
    if [ "${torn:-$largest_end}" -lt "$largest_end" ]; then
        echo "cutting $torn torn bytes off the end of $log" >&2
        echo y | redis-check-aof --fix "$log" >&2
    fi
done

printf 'requirepass %s\n' "$(cat /run/secrets/redis_password)" > /run/redis/password.conf
exec redis-server /etc/redis/redis.conf "$@"
