#!/usr/bin/env bash
# Brings a fresh Debian machine to where `make test` and `make demo` run. Safe to repeat.
# MILLSTREAM_PYTHON names the interpreter; it must be 3.11 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else return 1; fi
}

missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
java_major() { java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -1; }
if ! command -v java >/dev/null || [ "$(java_major)" -lt 17 ] 2>/dev/null; then missing+=(openjdk-17-jre-headless); fi

# Debian's tools find the servers of every version under this directory; on other systems the path leads to initdb.
{ ls /usr/lib/postgresql/*/bin/initdb || command -v initdb; } >/dev/null 2>&1 || missing+=(postgresql)

# Debian starts servers on install; the tests start their own, so nothing may run by itself.
install() {
  command -v apt-get >/dev/null \
    && as_root apt-get update -qq \
    && as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

if [ ${#missing[@]} -gt 0 ]; then
  say "setup: installing ${missing[*]} with apt-get ..."
  if ! install "${missing[@]}"; then
    say "setup: could not install: ${missing[*]}."
    say "       Install redis-server 7.0, PostgreSQL 13 and Java 17, each or newer, by hand, then run make again."
    exit 1
  fi
fi

# For the tests of the dashboard alone: where it cannot be had, they say so and are skipped.
if ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
  say "setup: installing chromium with apt-get ..."
  as_root apt-get update -qq \
    && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null \
    || say "setup: could not install chromium; the tests of the dashboard will be skipped."
fi

# MariaDB is only followed, never needed: without it the tests that follow one are skipped.
if ! PATH="$PATH:/usr/sbin" command -v mariadbd >/dev/null; then
  say "setup: installing mariadb-server with apt-get ..."
  install mariadb-server || say "setup: could not install mariadb-server; the tests of following a MariaDB are skipped."
fi

python=${MILLSTREAM_PYTHON:-}
if [ -z "$python" ]; then
  # 3.11 first: it is what the pinned versions are tested with.
  for candidate in python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
fi
if [ -z "$python" ]; then
  say "setup: Python 3.11 or newer is needed. Install it, or name it: MILLSTREAM_PYTHON=/path/to/python3.11 make setup"
  exit 1
fi

if [ ! -x .venv/bin/python ]; then
  say "setup: making .venv with $($python --version) ..."
  "$python" -m venv .venv
fi
say "setup: installing pinned packages (about 500 MB with Spark; some minutes the first time) ..."
.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "pip>=25.1"
.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[all]" --group dev
say "setup: ready."
