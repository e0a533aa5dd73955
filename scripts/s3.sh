#!/usr/bin/env bash
# Installs what the tests with S3 need into the tests' cache: Hadoop's connector with the AWS bundle, and moto in its
# own environment.
set -euo pipefail
HADOOP=3.5.0
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/millstream-tests"

if [ ! -x "$CACHE/moto/bin/moto_server" ]; then
  .venv/bin/python -m venv "$CACHE/moto"
  # Without constraints.txt: moto needs an older dateutil than the documentation's tools.
  "$CACHE/moto/bin/python" -m pip install -q --disable-pip-version-check "pip>=25.1"
  "$CACHE/moto/bin/python" -m pip install -q --disable-pip-version-check --group s3
fi
if [ ! -e "$CACHE/s3a-$HADOOP/ready" ]; then
  command -v mvn >/dev/null || { echo "Maven is missing: apt-get install maven" >&2; exit 1; }
  work="$(mktemp -d)"
  trap 'rm -rf "$work"' EXIT
  cat > "$work/pom.xml" <<POM
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>millstream</groupId><artifactId>s3</artifactId><version>1</version><dependencies><dependency>
<groupId>org.apache.hadoop</groupId><artifactId>hadoop-aws</artifactId><version>$HADOOP</version>
<exclusions><exclusion><groupId>org.apache.hadoop</groupId><artifactId>*</artifactId></exclusion></exclusions>
</dependency></dependencies></project>
POM
  (cd "$work" && mvn -q -B dependency:copy-dependencies "-DoutputDirectory=$CACHE/s3a-$HADOOP" -DincludeScope=runtime)
  touch "$CACHE/s3a-$HADOOP/ready"
fi
