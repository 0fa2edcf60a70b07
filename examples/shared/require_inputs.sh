#!/usr/bin/env bash
# Refuse a wrong number of arguments, and files that do not exist, before an example trains for days.
#
#   bash examples/shared/require_inputs.sh USAGE COUNT [RUN_DIRECTORY [INPUT...]]
#
# USAGE: the line that is printed if there are inputs, and the arguments are not COUNT.  INPUT: a
# path, or a pattern of files.  The exit status is 2 if one is missing.
set -euo pipefail

usage=$1 count=$2
shift 2
if [ $# -ge 2 ] && [ $# -ne "$count" ]; then
    echo "usage: $usage" >&2
    exit 2
fi
for input in "${@:2}"; do
    if ! compgen -G "$input" > /dev/null; then
        echo "error: no such file: \`$input\`" >&2
        exit 2
    fi
done
