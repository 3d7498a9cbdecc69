#!/usr/bin/env bash
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch.sh" eval recipe=eval model=hf model.dtype=float32 "$@"
