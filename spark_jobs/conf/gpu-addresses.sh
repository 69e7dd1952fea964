#!/bin/sh
# Tells Spark the GPUs of this host, one line of JSON: {"name": "gpu", "addresses": ["0", "1"]}
set -eu
indices=$(nvidia-smi --query-gpu=index --format=csv,noheader)
printf '{"name": "gpu", "addresses": [%s]}\n' "$(printf '%s\n' "$indices" | sed 's/.*/"&"/' | paste -sd, -)"
