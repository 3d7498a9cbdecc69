#!/usr/bin/env bash
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch.sh" sft recipe=sft -m loss=hard_ce,e2e_tv "$@"
