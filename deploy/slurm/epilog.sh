#!/bin/sh
# An example of Slurm's Epilog: after a job, drain a node that Everstep's policy takes out of service. Slurm drains the
# node of an Epilog that fails. Append the lines to an Epilog of your own.
reason=$(sh "$(dirname "$0")/node-health.sh") || { echo "everstep: $reason" >&2; exit 1; }
