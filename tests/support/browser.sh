#!/usr/bin/env bash
# Installs Chromium, which the tests of report pages need, from Debian's packages. Where that cannot be, the tests are
# skipped and say so; this ends well either way.
set -u
for program in chromium chromium-browser google-chrome; do
    if command -v "$program" >/dev/null; then
        exit 0
    fi
done
say="browser-tools: tests of report pages in a browser are skipped: chromium missing,"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "$say and installing needs root and apt-get"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1; then
    echo "$say and apt-get could not install it"
fi
