#!/bin/sh
# Makes the secrets docker-compose.yml mounts, once: a file that exists is kept.
#
# The files are readable by everyone, and the folder by its owner alone: a bind-mounted secret keeps
# its mode, and each container reads it as another user.
set -eu
folder="$(dirname "$0")/secrets"
mkdir -p "$folder"
chmod 700 "$folder"
for name in redis_password grafana_admin_password; do
    if [ ! -s "$folder/$name" ]; then
        od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > "$folder/$name"
        chmod 444 "$folder/$name"
    fi
done
