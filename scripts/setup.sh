#!/usr/bin/env bash
# Installs what `make test` needs on a fresh Debian machine, or with the argument `demo` what `make demo` needs.
# `demo postgres` is for `make demo SOURCE=postgres`. Safe to repeat.
# MILLSTREAM_PYTHON names the interpreter; it must be 3.11 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."
goal=${1:-test}
source=${2:-}
case "$goal $source" in
  "test " | "demo " | "demo postgres") ;;
  *) echo "usage: scripts/setup.sh [test | demo [postgres]]" >&2; exit 2 ;;
esac

say() { printf '%s\n' "$*" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else return 1; fi
}

missing=()
if [ "$goal" = test ]; then command -v redis-server >/dev/null || missing+=(redis-server); fi
java_major() { java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -1; }
if ! command -v java >/dev/null || [ "$(java_major)" -lt 17 ] 2>/dev/null; then missing+=(openjdk-17-jre-headless); fi

if [ "$goal" = test ] || [ "$source" = postgres ]; then
  # Debian installs PostgreSQL servers under this directory; on other systems initdb is on the PATH.
  { ls /usr/lib/postgresql/*/bin/initdb || command -v initdb; } >/dev/null 2>&1 || missing+=(postgresql)
fi

# Debian starts servers after installation. The tests start their own servers, so RUNLEVEL=1 prevents that.
install() {
  command -v apt-get >/dev/null \
    && as_root apt-get update -qq \
    && as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

if [ ${#missing[@]} -gt 0 ]; then
  say "setup: installing ${missing[*]} with apt-get ..."
  if ! install "${missing[@]}"; then
    say "setup: could not install: ${missing[*]}."
    say "       Install them by hand, then run make again. Oldest versions: redis-server 7.0, PostgreSQL 13, Java 17."
    exit 1
  fi
fi

# Only for the dashboard tests, which are skipped without it.
if [ "$goal" = test ] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
  say "setup: installing chromium with apt-get ..."
  as_root apt-get update -qq \
    && as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null \
    || say "setup: could not install chromium; the tests of the dashboard will be skipped."
fi

# Only for the MariaDB tests, which are skipped without it.
if [ "$goal" = test ] && ! PATH="$PATH:/usr/sbin" command -v mariadbd >/dev/null; then
  say "setup: installing mariadb-server with apt-get ..."
  install mariadb-server || say "setup: could not install mariadb-server; the MariaDB tests will be skipped."
fi

# Only for the tests of alert rules, which are skipped without it.
if [ "$goal" = test ] && ! command -v promtool >/dev/null && command -v apt-get >/dev/null; then
  say "setup: installing prometheus with apt-get ..."
  install prometheus || say "setup: could not install prometheus; the tests of alert rules will be skipped."
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
if [ "$goal" = test ]; then packages=(-e ".[all]" --group dev)
elif [ "$source" = postgres ]; then packages=(-e ".[spark,cdc]")
else packages=(-e ".[spark]"); fi
.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "${packages[@]}"

# The demo starts Spark, which takes half the time with an archive of its Java classes. The tests make their own.
if [ "$goal" = demo ] || [ -z "${CI:-}" ]; then
  .venv/bin/python -m millstream pipeline prepare >/dev/null || say "setup: Spark will start without a class archive."
fi
say "setup: ready."
