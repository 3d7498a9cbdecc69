#!/usr/bin/env bash
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch.sh" bench recipe=against_speculators "$@"
