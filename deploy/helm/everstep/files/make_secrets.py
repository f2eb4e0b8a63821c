"""Make the Secrets of a fleet where they are missing. Existing ones are left alone, and none is printed.

Runs in the controller's image, with the standard library, Everstep itself and the openssl program.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import secrets
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from everstep.bearer_tokens import TokenRole, mint, split_secrets
from everstep.client import Client
from everstep.errors import EverstepError
from everstep.wire.v1.enrolment import IssueJoin

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NAME = "helm-chart"
"""The chart's name in the event log."""
WAIT_FOR_CONTROLLER_S = 600.0
RETRY_S = 5.0

Data = Mapping[str, bytes]


class SecretStore:
    """The Secrets of one namespace.

    Args:
        url: Address of the Kubernetes API.
        token: Bearer token of the service account.
        namespace: The namespace.
        tls: For https.
    """

    def __init__(self, url: str, token: str, namespace: str, tls: ssl.SSLContext | None = None) -> None:
        self._path = f"{url}/api/v1/namespaces/{namespace}/secrets"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._tls = tls

    def get(self, name: str) -> dict[str, bytes] | None:
        """Return the data of a Secret, or None if there is none."""
        try:
            found = self._request("GET", f"{self._path}/{name}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    def create(self, name: str, data: Data, kind: str = "Opaque") -> None:
        """Create a Secret. Does nothing if it exists."""
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": kind,
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "everstep"}},
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }
        try:
            self._request("POST", self._path, body)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise

    def ensure(self, name: str, make: Callable[[], Data], kind: str = "Opaque") -> dict[str, bytes]:
        """Return the data of a Secret, which is made if there is none."""
        found = self.get(name)
        if found is None:
            self.create(name, make(), kind)
            print(f"made Secret {name}")
            found = self.get(name)
        assert found is not None, f"Secret {name} vanished"
        return found

    def _request(self, method: str, url: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers, method=method)  # noqa: S310 - the API's own address
        with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
            return found


def self_signed(names: list[str]) -> Data:
    """Return a key and a certificate for ``names`` that is its own authority, for ten years."""
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder, "tls.key"), Path(folder, "tls.crt")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "3650", "-subj", "/CN=everstep", "-keyout", str(key), "-out", str(certificate)]
        command += ["-addext", "subjectAltName=" + ",".join(f"DNS:{name}" for name in names)]
        subprocess.run(command, check=True, capture_output=True)
        return {"tls.crt": certificate.read_bytes(), "tls.key": key.read_bytes(), "ca.crt": certificate.read_bytes()}


def issue_join_token(client: Client, replace: bool) -> str:
    """Return a join token for any number of nodes. Waits for a controller that leads. Raises EverstepError."""
    body = IssueJoin(subject="*", uses=None, replace=replace, reason="installed by Helm", note="the chart's agents")
    end = time.monotonic() + WAIT_FOR_CONTROLLER_S  # noqa: TID251 - a program of its own
    while True:
        try:
            return client.issue_credential(body).token
        except EverstepError as error:
            if time.monotonic() > end:  # noqa: TID251
                raise
            print(f"no controller yet: {error}", flush=True)
            time.sleep(RETRY_S)


def run(options: argparse.Namespace, store: SecretStore) -> None:
    """Make the missing Secrets that ``options`` name."""
    fleet = store.ensure(options.fleet, lambda: {"secret": secrets.token_hex(32).encode()})
    secret = split_secrets(fleet["secret"])[0]

    def scraping_tokens() -> Data:
        return {
            "controller": mint(secret, TokenRole.VIEWER, "prometheus").encode(),
            "agent": secrets.token_hex(32).encode(),
        }

    store.ensure(options.metrics, scraping_tokens)
    tls = None
    if options.tls:
        pair = store.ensure(options.tls, lambda: self_signed(options.tls_names.split(",")), "kubernetes.io/tls")
        tls = ssl.create_default_context(cadata=pair["ca.crt"].decode())
    if options.join:
        client = Client(options.controllers, mint(secret, TokenRole.OPERATOR, NAME), tls=tls)
        store.ensure(options.join, lambda: {"token": issue_join_token(client, options.join_replaces).encode()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("namespace", "fleet", "metrics"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("tls", "tls-names", "join", "controllers"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--join-replaces", action="store_true")
    options = parser.parse_args()
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    address = f"[{host}]" if ":" in host else host
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    token = (ACCOUNT / "token").read_text().strip()
    run(options, SecretStore(f"https://{address}:{port}", token, options.namespace, trust))


if __name__ == "__main__":
    main()
