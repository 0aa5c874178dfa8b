#!/bin/sh
# Makes the secrets that docker-compose.yml mounts; existing files are kept.
#
# The files are readable by everyone, because a bind-mounted secret keeps its mode and each container
# reads it as another user. The folder is only accessible to its owner.
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
