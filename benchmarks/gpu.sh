#!/usr/bin/env bash
# All benchmarks on this machine's GPU, into one JSON file: benchmarks/gpu.sh OUT.json. Takes less than six minutes: each has the
# seconds below, and one that fails or takes longer is left out, with the end of what it said.
set -uo pipefail
out=$(realpath "$1")
cd "$(dirname "$0")/.."
parts=$(mktemp -d)
for limited in planning:100 training:170 "data --rows 1000000:30" evaluation:30 scaling:25; do
    command=${limited%:*}
    name=${command%% *}
    timeout "${limited#*:}" "${PYTHON:-python3}" -m benchmarks.$command --json >"$parts/$name.json" 2>"$parts/$name.log"
    echo "$name: exit code $?, $SECONDS s so far" >&2
done
"${PYTHON:-python3}" - "$parts" "$out" <<'PYTHON'
import json, sys
from pathlib import Path

parts, out = map(Path, sys.argv[1:])
result = {}
for log in sorted(parts.glob("*.log")):
    try:
        result[log.stem] = json.loads(log.with_suffix(".json").read_text())
    except ValueError:
        result[log.stem] = {"failed": log.read_text()[-2000:]}
out.write_text(json.dumps(result, indent=2) + "\n")
PYTHON
cat "$out"
