"""The programs inside the chart: the Job that makes Secrets, and the copy of the kernel log."""

from __future__ import annotations

import argparse
import base64
import http.server
import importlib.util
import json
import os
import re
import ssl
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from everstep.bearer_tokens import Identity, TokenRole, hash_secret, verify_with_secret
from everstep.client import Client
from everstep.errors import Unavailable
from everstep.wire.v1.enrolment import Credential, Issued, IssueJoin
from everstep_agent.config import read_token
from everstep_agent.drivers.kmsg import KernelLog
from everstep_controller.config import read_password, read_secret
from tests.support.fleet.controllers import SECRET, ControllerProcess
from tests.support.services.helm import CHART, Manifest, containers, render


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CHART / "files" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_secrets: Any = script("make_secrets")
kernel_log: Any = script("kernel_log")


class SecretsApi:
    """The part of the Kubernetes API that knows Secrets of one namespace."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = api.secrets.get(self.path.rpartition("/")[2])
                self._answer(404 if found is None else 200, found or {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Authorization"] == "Bearer token"
                name = body["metadata"]["name"]
                self._answer(409 if name in api.secrets else 201, body)
                api.secrets.setdefault(name, body)

            def _answer(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def store(self) -> Any:
        return make_secrets.SecretStore(f"http://127.0.0.1:{self._server.server_address[1]}", "token", "ns")

    def data(self, name: str) -> dict[str, str]:
        return {key: base64.b64decode(value).decode() for key, value in self.secrets[name]["data"].items()}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def api() -> Iterator[SecretsApi]:
    made = SecretsApi()
    yield made
    made.close()


class Leader:
    """A controller that is away at first."""

    def __init__(self, away: int = 0) -> None:
        self.away = away
        self.asked: list[IssueJoin] = []

    def issue_credential(self, body: IssueJoin) -> Issued:
        if self.away:
            self.away -= 1
            raise Unavailable("no controller answers")
        self.asked.append(body)
        credential = Credential(id="0" * 16, role=TokenRole.JOIN, subject="*", created_at=0.0, created_by="helm-chart")
        return Issued(credential=credential, token="es1.join.secret", trace="0" * 16)


def options(**given: Any) -> argparse.Namespace:
    names = {"fleet": "fleet", "metrics": "metrics", "tls": "", "tls_names": "", "join": "", "controllers": ""}
    return argparse.Namespace(**{**names, "join_replaces": False, **given})


def test_secrets_are_made_once_and_usable(api: SecretsApi, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_secrets.run(options(), api.store())
    first = {name: api.data(name) for name in api.secrets}
    make_secrets.run(options(), api.store())
    assert {name: api.data(name) for name in api.secrets} == first, "a second run changes nothing"
    file = tmp_path / "secret"
    file.write_text(first["fleet"]["secret"])
    file.chmod(0o400)
    secret = read_secret(str(file))
    assert verify_with_secret([secret], first["metrics"]["controller"])[0] == Identity(TokenRole.VIEWER, "prometheus")
    file = tmp_path / "metrics"
    file.write_text(first["metrics"]["agent"])
    assert read_token(file, "metrics token")
    shown = "".join(capfd.readouterr())
    assert "made Secret fleet" in shown
    assert not any(value in shown for data in first.values() for value in data.values())


def test_existing_fleet_secret_signs_new_tokens(api: SecretsApi) -> None:
    api.store().create("fleet", {"secret": b"a" * 64 + b"\n" + b"b" * 64})
    make_secrets.run(options(), api.store())
    assert verify_with_secret([b"a" * 64], api.data("metrics")["controller"])
    assert api.data("fleet")["secret"].startswith("aaa")


def test_another_job_that_was_first_wins(api: SecretsApi) -> None:
    store = api.store()
    store.create("fleet", {"secret": b"first"})
    store.create("fleet", {"secret": b"second"})
    assert api.data("fleet") == {"secret": "first"}


def test_join_token_waits_for_a_leader(api: SecretsApi, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(away=2)
    monkeypatch.setattr(make_secrets, "Client", lambda *_, **__: leader)
    monkeypatch.setattr(make_secrets, "RETRY_S", 0.001)
    make_secrets.run(options(join="join", join_replaces=True), api.store())
    assert api.data("join") == {"token": "es1.join.secret"}
    (body,) = leader.asked
    assert (body.subject, body.uses, body.replace) == ("*", None, True)


@pytest.mark.slow
def test_join_token_of_a_real_controller_enrols_nodes(api: SecretsApi, tmp_path: Path) -> None:
    controller = ControllerProcess(tmp_path).start()
    try:
        api.store().create("fleet", {"secret": SECRET})
        make_secrets.run(options(join="join", controllers=controller.url), api.store())
        token = api.data("join")["token"]
        for node in ("n1", "n2"):
            enrolled = Client(controller.url, token).enrol(node, hash_secret("s" * 64))
            assert enrolled.node == node
        Client(controller.url, api.data("metrics")["controller"]).nodes().collect()
    finally:
        controller.terminate()


def the_job(release: list[Manifest]) -> Manifest:
    (found,) = [container for name, _, container in containers(release) if name.endswith("/make-secrets")]
    return found


def test_job_passes_every_option_the_script_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    job = the_job(render({"secrets": {"joinReplaces": True}}))
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(make_secrets, "run", lambda options, _: seen.append(options))
    monkeypatch.setattr(make_secrets, "SecretStore", lambda *_: None)
    monkeypatch.setattr(make_secrets.ssl, "create_default_context", lambda **_: None)
    monkeypatch.setattr(make_secrets.Path, "read_text", lambda _: "token")
    monkeypatch.setattr("sys.argv", ["make_secrets.py", *job["args"]])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    make_secrets.main()
    (found,) = seen
    assert found.join_replaces
    assert found.controllers.startswith("https://everstep-controller-0.")


@pytest.mark.slow
def test_made_certificate_serves_every_controllers_name() -> None:
    job = the_job(render())
    (names,) = [word.partition("=")[2] for word in job["args"] if word.startswith("--tls-names=")]
    (urls,) = [word.partition("=")[2] for word in job["args"] if word.startswith("--controllers=")]
    pair = make_secrets.self_signed(names.split(","))
    assert pair["ca.crt"] == pair["tls.crt"]
    host = urls.removeprefix("https://").rpartition(":")[0]
    for name in (host, "localhost", "everstep-controller.everstep-system.svc"):
        _handshake(pair, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(pair, "example.com")


def _handshake(pair: dict[str, bytes], host: str) -> None:
    """A client that trusts the certificate greets a server that has it, without a network."""
    here = Path(os.environ["TMPDIR"])
    for name in ("tls.crt", "tls.key"):
        (here / name).write_bytes(pair[name])
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(here / "tls.crt", here / "tls.key")
    client = ssl.create_default_context(cadata=pair["ca.crt"].decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass


@pytest.mark.slow
def test_copied_secrets_are_readable_for_the_controller_alone(tmp_path: Path) -> None:
    """The kubelet shows files of a Secret as links to files that the group may read."""
    values = {"kind": "postgresql", "postgresql": {"secretName": "database", "passwordKey": "password"}}
    release = render({"controller": {"database": values}})
    (copies,) = [container for name, _, container in containers(release) if name.endswith("/copy-secrets")]
    shown, private = tmp_path / "secrets", tmp_path / "private"
    (shown / "..data").mkdir(parents=True)
    private.mkdir()
    for name in ("fleet", "database-password"):
        (shown / "..data" / name).write_text("0123456789abcdef")
        (shown / "..data" / name).chmod(0o440)
        (shown / name).symlink_to(Path("..data") / name)
    command = [word.replace("/secrets/", f"{shown}/").replace("/private/", f"{private}/") for word in copies["command"]]
    for _ in range(2):  # a restarted pod sandbox runs it again
        subprocess.run(command, check=True)
    assert {file.name for file in private.iterdir()} == {"fleet", "database-password"}
    assert read_secret(str(private / "fleet")) == b"0123456789abcdef"
    assert read_password(str(private / "database-password")) == "0123456789abcdef"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to another user")
def test_prepared_directories_belong_to_the_agent(tmp_path: Path) -> None:
    (prepare,) = [container for name, _, container in containers(render()) if name.endswith("/prepare-directories")]
    script = prepare["command"][-1]
    folders = {}
    for mount in prepare["volumeMounts"]:
        folders[mount["mountPath"]] = tmp_path / mount["name"]
        folders[mount["mountPath"]].mkdir()
        script = re.sub(rf"{mount['mountPath']}(?=[/ ;\n])", str(folders[mount["mountPath"]]), script)
    bounds = ["setpriv", "--bounding-set=-all,+chown", "--inh-caps=-all,+chown", "--no-new-privs"]
    for _ in range(2):
        subprocess.run([*bounds, *prepare["command"][:-1], script], check=True)
    for name in ("/run/everstep", "/var/lib/everstep", "/dev/shm/everstep"):
        found = folders[name].stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (10001, 10001, 0o700)
    found = (folders["/run/kernel-log"] / "pipe").stat()
    assert stat.S_ISFIFO(found.st_mode)
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (10001, 0o600)


RECORDS = [
    b"4,811,1000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci\n",
    b"6,812,1001,-;two\\x0alines\n",
    b"6,813,1002,-;\n",
    b"12,814,1003,-;NVRM: Xid (PCI:0000:3b:00): 79, written by a program\n",
]


def test_agent_reads_the_copied_kernel_log_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, source = tmp_path / "pipe", tmp_path / "kmsg"
    os.mkfifo(pipe, 0o600)
    source.write_bytes(b"4,1,1,-;an old line\n")
    log = KernelLog(str(pipe))
    log.open()
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    records = iter(RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr(kernel_log.os, "read", lambda *_: next(records))
        with pytest.raises(StopIteration):
            kernel_log.main(str(source), str(pipe))
    assert log.read() == ["NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "two", "lines"]
    log.close()
