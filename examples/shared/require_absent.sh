#!/usr/bin/env bash
# Refuse the paths that exist, which an example would write to.
#
#   bash examples/shared/require_absent.sh PATH...
#
# The exit status is 2 if one exists.
set -euo pipefail

for path in "$@"; do
    if [ -e "$path" ]; then
        echo "error: \`$path\` exists; remove it, or name another RUN_DIRECTORY" >&2
        exit 2
    fi
done
