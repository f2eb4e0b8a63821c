#!/bin/sh
# An example of Slurm's Prolog: refuse a job on a node that Everstep's policy takes out of service. Slurm then drains
# the node and requeues the job. Append the lines to a Prolog of your own.
reason=$(sh "$(dirname "$0")/node-health.sh") || { echo "everstep: $reason" >&2; exit 1; }
