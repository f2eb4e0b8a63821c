"""A certificate authority for tests, made by the openssl program, with certificates for servers and clients."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

_CONFIG = "[req]\ndistinguished_name=dn\n[dn]\n"


class Pair(NamedTuple):
    """PEM files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Sign certificates that are valid for a day, with their files in ``directory``."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._config = directory / f"{name}.cnf"
        self._config.write_text(_CONFIG)
        self.pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
        self._run(self.pair, name, "basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")

    def server(self, address: str = "127.0.0.1") -> Pair:
        """Return a certificate for a server at an IP address."""
        return self._signed("server", f"subjectAltName=IP:{address}")

    def client(self, *uris: str) -> Pair:
        """Return a certificate for a client with these URIs as names. Without URIs it names no role."""
        name = "-".join(uri.rpartition("/")[2] for uri in uris) or "nameless"
        names = ",".join(f"URI:{uri}" for uri in uris) or "DNS:nameless"
        return self._signed(f"client-{name}", f"subjectAltName={names}")

    def trust(self, client: Pair | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority and shows a certificate."""
        context = ssl.create_default_context(cafile=str(self.pair.certificate))
        if client is not None:
            context.load_cert_chain(*client)
        return context

    def _signed(self, name: str, *extensions: str) -> Pair:
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        signer = ("-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key))
        self._run(pair, name, "basicConstraints=critical,CA:FALSE", *extensions, signer=signer)
        return pair

    def _run(self, pair: Pair, name: str, *extensions: str, signer: tuple[str, ...] = ()) -> None:
        command = ["openssl", "req", "-x509", "-config", str(self._config), "-days", "1", "-nodes"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}", *signer]
        for extension in extensions:
            command += ["-addext", extension]
        command += ["-keyout", str(pair.key), "-out", str(pair.certificate)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
