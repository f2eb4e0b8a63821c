#!/bin/sh
# An example of Slurm's HealthCheckProgram: drain a node that Everstep's policy takes out of service. Its running job
# goes on. Nodes that are drained already keep their reason, and nothing resumes a node: a person does after the repair.
reason=$(sh "$(dirname "$0")/node-health.sh") && exit 0
node=${SLURMD_NODENAME:-$(hostname -s)}
case $(scontrol show node "$node") in
  *State=*DRAIN*) exit 0 ;;
esac
scontrol update "NodeName=$node" State=DRAIN "Reason=everstep: $reason"
