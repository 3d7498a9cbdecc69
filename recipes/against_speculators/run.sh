#!/usr/bin/env bash
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$here/../../launch.sh" setup
exec "$here/../../.venv/bin/python" "$here/compare.py" "$@"
