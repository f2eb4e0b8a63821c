#!/bin/sh
# Ask the Everstep agent of this node whether the node is fit for a job. Takes a few milliseconds: the agent keeps a
# file, and no program but date is started.
#
# Exit status: 1, with the reason on stdout, if the agent's policy takes the node out of service (a finding of severity
# critical, mode enforce, with a reset, reboot, drain or repair as its action). 0 otherwise, so also for warnings, and
# where no agent runs: a monitor that fails must not drain a cluster.
#
# EVERSTEP_HEALTH_FILE: `health` in the agent's --run-dir. Run this as root or as the agent's user.
file=${EVERSTEP_HEALTH_FILE:-/run/everstep/health}
max_age_s=60  # the agent writes the file every 10 s

at='' health='' reason=''
[ -r "$file" ] || { echo "everstep: $file cannot be read, so this node's health is unknown" >&2; exit 0; }
while IFS='=' read -r name value; do
  case $name in
    at) at=$value ;;
    health) health=$value ;;
    reason) reason=$value ;;
  esac
done < "$file"
case $at in
  '' | *[!0-9]*) exit 0 ;;
esac
if [ $(($(date +%s) - at)) -gt "$max_age_s" ]; then
  echo "everstep: $file is old: the agent has ended or hangs" >&2
  exit 0
fi
[ "$health" = unfit ] || exit 0
printf '%s\n' "$reason"
exit 1
