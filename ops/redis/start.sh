#!/bin/sh
# Starts Redis with the password from the secret. The password is passed in a file in memory, because
# other processes can read arguments and environment. Arguments are passed on to redis-server.
set -eu
umask 077

# The server checks logs if it is called by this name. Some distributions install only the server.
if ! command -v redis-check-aof > /dev/null; then
    ln -sf "$(command -v redis-server)" /run/redis/redis-check-aof
    PATH="$PATH:/run/redis"
fi

# If a crash has torn the log inside a transaction, cut it back to the last complete one first. Redis
# would also start with such a log. But it would leave the incomplete transaction in the file, and
# after the next crash run it together with the writes after it (docs/adr/0006). Damage larger than
# the effects of any script is not a torn end: Redis does not start, and an operator must decide.
largest_end=16777216
# One file before Redis 7, in a folder since. Only the last file that is appended to can be torn. The
# folder is not checked as a whole, because Valkey's checker refuses the snapshots of Valkey 9.
folder=/data/appendonlydir
last=$(sed -n 's/^file \([^ ]*\) .*type i.*$/\1/p' "$folder/appendonly.aof.manifest" 2> /dev/null | tail -n 1)
for log in "$folder/${last:-none}" /data/appendonly.aof; do
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
