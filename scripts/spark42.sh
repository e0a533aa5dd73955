#!/usr/bin/env bash
# Creates .venv-spark42 for the smoke test: PySpark 4.2, everything else from .venv. Does nothing if it exists.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -f .venv-spark42/ready ]; then
  exit 0
fi
echo "setup: making .venv-spark42 with PySpark 4.2 (about 450 MB) ..."
rm -rf .venv-spark42
.venv/bin/python -m venv .venv-spark42
.venv-spark42/bin/python -m pip install -q --disable-pip-version-check --no-deps "pyspark==4.2.*" "py4j==0.10.9.9"
# Its own packages come first on the path; all others are imported from the main environment.
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$(.venv-spark42/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
touch .venv-spark42/ready
