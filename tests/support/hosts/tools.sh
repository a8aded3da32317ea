#!/usr/bin/env bash
# Installs what the tests on several hosts need, from Debian's packages. Where that cannot be, the tests are skipped and
# say so; this ends well either way.
set -u
programs="sshd ssh ip slurmctld slurmd srun munged"
packages="openssh-server openssh-client iproute2 slurm-wlm slurmctld slurmd slurm-client munge"
missing=""
for program in $programs; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing="$missing $program"
done
if [ -z "$missing" ]; then
    exit 0
fi
say="hosts-tools: tests on several hosts are skipped:$missing missing,"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "$say and installing needs root and apt-get: $packages"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # several words are meant
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends $packages; } >/dev/null 2>&1; then
    echo "$say and apt-get could not install: $packages"
fi
