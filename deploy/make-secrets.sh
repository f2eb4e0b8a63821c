#!/usr/bin/env bash
# Writes the compose fleet's secrets to deploy/secrets and .env; keeps what is there. Only you may enter the directory.
# Tokens that a container's own user reads are open to all inside that container; the fleet's secret and the database's
# password are not.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
mkdir -p -m 700 secrets
chmod 700 secrets
for name in fleet postgres grafana; do
  test -s "secrets/$name" || od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "secrets/$name"
done
token() { "${CONTROLLER_COMMAND:-../.venv/bin/everstep-controller}" token --role "$1" --subject "$2" --secret-file secrets/fleet; }
token agent agent-1 > secrets/token-agent-1
token agent agent-2 > secrets/token-agent-2
token viewer prometheus > secrets/token-prometheus
token operator "$(id -un)" > secrets/token-operator
chmod 644 secrets/grafana secrets/token-agent-1 secrets/token-agent-2 secrets/token-prometheus
test -e ../.env || printf 'EVERSTEP_UID=%s\nEVERSTEP_GID=%s\n' "$(id -u)" "$(id -g)" > ../.env
echo "secrets are in deploy/secrets; ask the controller with"
echo "  EVERSTEP_TOKEN_FILE=deploy/secrets/token-operator everstep status"
