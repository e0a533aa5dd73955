#!/usr/bin/env bash
# The quick suites, and one test with Spark, on each Python that is supported: `make pythons`, or VERSIONS="3.12" make pythons.
# Interpreters are searched on the path and under pyenv. An absent one is skipped, and the summary reports it.
# Each gets an environment of its own (.venv-py3.12, about 1 GB); the one that `make setup` chose is tested in .venv.
set -uo pipefail
cd "$(dirname "$0")/.."
VERSIONS=${VERSIONS:-3.11 3.12 3.13}
JOBS=${JOBS:-2}

interpreter() {  # prints the path of a Python of this minor version
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  return 1
}

environment() {  # prints the directory of the environment, which it makes where it is absent
  local place=".venv-py$1"
  if [ -x .venv/bin/python ] && .venv/bin/python -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')"; then
    echo .venv
    return
  fi
  if [ ! -f "$place/ready" ] || [ "$place/ready" -ot pyproject.toml ] || [ "$place/ready" -ot constraints.txt ]; then
    echo "pythons: making $place with $2 ..." >&2
    [ -x "$place/bin/python" ] || "$2" -m venv "$place" || return 1
    "$place/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt "pip>=25.1" || return 1
    "$place/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[all]" --group dev || return 1
    touch "$place/ready"
  fi
  echo "$place"
}

suites() {  # runs all of them in the environment; fails if one fails
  local python="$PWD/$1/bin/python" code=0
  export PYSPARK_PYTHON=$python PYSPARK_DRIVER_PYTHON=$python
  "$python" -m pytest -q -n "$JOBS" -p no:cacheprovider tests/unit || code=1
  "$python" -m pytest -q -n "$JOBS" -p no:cacheprovider tests/conformance -k embedded || code=1
  "$python" -m pytest -q -p no:cacheprovider \
    tests/spark/test_source.py::test_batch_read_has_the_default_columns || code=1
  return "$code"
}

summary=()
failed=0
for version in $VERSIONS; do
  if ! python=$(interpreter "$version"); then
    summary+=("Python $version: skipped, no interpreter on the path or under pyenv")
  elif ! place=$(environment "$version" "$python"); then
    summary+=("Python $version: FAILED, its environment could not be made")
    failed=1
  elif suites "$place"; then
    summary+=("Python $version: passed")
  else
    summary+=("Python $version: FAILED")
    failed=1
  fi
done
printf '%s\n' "${summary[@]}"
exit "$failed"
