#!/usr/bin/env bash
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch.sh" demo recipe=demo "$@"
