"""``everstep login`` against a controller process and a provider: by browser and by code, refreshed, and ended."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
import typer
from typer.testing import CliRunner

from everstep import oidc
from everstep.cli.context import ConnectionOptions, connected_client, state_dir
from everstep.cli.login import flows, stored
from everstep.cli.main import app
from everstep.errors import AuthenticationError, ConfigurationError, Unavailable
from tests.support.fleet.controllers import ControllerProcess, controller_process
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.services.openid_provider import COMMANDS, OpenidProvider, login_settings, openid_provider

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def shared_provider() -> Iterator[OpenidProvider]:
    with openid_provider() as provider:
        yield provider


@pytest.fixture
def provider(shared_provider: OpenidProvider) -> Iterator[OpenidProvider]:
    """The provider, as it was at first."""
    before = dict(vars(shared_provider))
    shared_provider.claims = dict(shared_provider.claims)
    yield shared_provider
    vars(shared_provider).update(before)
    shared_provider.requests.clear()
    shared_provider.revoked.clear()


@pytest.fixture(scope="module")
def process(
    program_forks: ForkPool, shared_provider: OpenidProvider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControllerProcess]:
    folder = tmp_path_factory.mktemp("login")
    arguments = ("--settings", str(login_settings(folder, shared_provider)))
    with controller_process(folder, program_forks, arguments=arguments) as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stored logins."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return state_dir(os.environ)


@pytest.fixture
def run(process: ControllerProcess, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, on a machine whose browser agrees to all requests of the provider."""

    def browse(url: str) -> bool:
        threading.Thread(target=httpx.get, args=(url,), kwargs={"follow_redirects": True}).start()
        return True

    monkeypatch.setattr(webbrowser, "open", browse)

    def run(*words: str, controller: str = process.url) -> Any:
        return CliRunner().invoke(app, ["--controller", controller, *words])

    return run


def test_login_by_browser_serves_later_commands(run: Run, provider: OpenidProvider, folder: Path) -> None:
    done = run("login", "--browser")
    assert done.exit_code == 0, done.output
    assert f"as olga (00u1 at {provider.issuer}), with the role operator" in done.stdout
    file = folder / stored.FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (login,) = json.loads(file.read_text())["logins"]
    assert login["id_token"] not in done.output
    assert run("status").exit_code == 0
    assert run("token", "issue", "--role", "viewer", "--subject", "wall", "-r", "a display").exit_code == 0
    assert "olga (00u1 at" in run("orders").stdout
    done = run("logout")
    assert done.exit_code == 0, done.output
    assert provider.revoked == [login["refresh_token"]]
    assert json.loads(file.read_text()) == {"logins": []}
    assert run("status").exit_code == 2
    assert "there is no login" in run("logout").stdout


def test_login_with_the_browser_of_the_environment(
    process: ControllerProcess, provider: OpenidProvider, folder: Path, tmp_path: Path
) -> None:
    """The program as it is started by a person; the browser is another program."""
    browser = tmp_path / "browser.py"
    browser.write_text("import sys, httpx\nhttpx.get(sys.argv[1], follow_redirects=True).raise_for_status()\n")
    environ = {**os.environ, "BROWSER": f"{sys.executable} {browser} %s &", "DISPLAY": ":0", "WAYLAND_DISPLAY": ""}
    environ.pop("SSH_CONNECTION", None)
    command = [sys.executable, "-m", "everstep.cli.main", "--controller", process.url]
    done = subprocess.run([*command, "login"], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "/device" not in provider.requests
    done = subprocess.run([*command, "status"], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_login_by_code_waits_for_the_person(run: Run, provider: OpenidProvider) -> None:
    provider.approves_devices = False

    def approve() -> None:
        until(lambda: provider.requests.count("/token") >= 2, "two questions for the token")
        provider.approves_devices = True

    with ThreadPoolExecutor(1) as person:
        approved = person.submit(approve)
        done = run("login", "--device")
        approved.result()
    assert done.exit_code == 0, done.output
    assert f"open {provider.issuer}/activate and enter WDJB-MJHT" in done.output
    assert run("status").exit_code == 0


def test_code_is_the_way_where_there_is_no_display(provider: OpenidProvider) -> None:
    with_codes = oidc.read_provider(json.dumps(provider.metadata()).encode(), provider.issuer)
    assert flows.prefers_device(with_codes, {})
    assert flows.prefers_device(with_codes, {"DISPLAY": ":10", "SSH_CONNECTION": "x"})
    assert not flows.prefers_device(with_codes, {"DISPLAY": ":0"})
    without = {**provider.metadata(), "device_authorization_endpoint": ""}
    assert not flows.prefers_device(oidc.read_provider(json.dumps(without).encode(), provider.issuer), {})


def test_token_is_refreshed_before_its_end(run: Run, provider: OpenidProvider, folder: Path) -> None:
    provider.lifetime_s = stored.REFRESH_BEFORE_S - 10
    assert run("login", "--browser").exit_code == 0
    tokens = set()
    for _ in range(3):
        assert run("status").exit_code == 0
        (login,) = json.loads((folder / stored.FILE).read_text())["logins"]
        tokens.add(login["refresh_token"])
    assert len(tokens) == 3
    provider.lifetime_s = 300.0
    assert run("status").exit_code == 0
    asked = len(provider.requests)
    assert run("status").exit_code == 0
    assert len(provider.requests) == asked


def test_long_command_refreshes_its_login(run: Run, provider: OpenidProvider, process: ControllerProcess) -> None:
    provider.lifetime_s = stored.REFRESH_BEFORE_S - 10
    assert run("login", "--browser").exit_code == 0
    context = SimpleNamespace(obj=ConnectionOptions(process.url))
    with connected_client(cast(typer.Context, context)) as client:
        before = provider.requests.count("/token")
        for _ in range(2):
            client.status()
    assert provider.requests.count("/token") == before + 2


def test_revoked_login_is_reported(run: Run, provider: OpenidProvider) -> None:
    provider.lifetime_s = 20.0
    assert run("login", "--browser").exit_code == 0
    provider.refresh_tokens.clear()
    done = run("status")
    assert done.exit_code == 2
    assert "your login has ended" in done.output
    assert "everstep login" in done.output


def test_refresh_for_another_person_is_refused(
    run: Run, provider: OpenidProvider, process: ControllerProcess, folder: Path
) -> None:
    provider.lifetime_s = 20.0
    assert run("login", "--browser").exit_code == 0
    provider.claims["sub"] = "00u2"
    with pytest.raises(AuthenticationError, match="another person"):
        stored.current_token(folder, [process.url])


def test_token_goes_only_to_the_controllers_of_the_login(
    run: Run, process: ControllerProcess, provider: OpenidProvider, folder: Path
) -> None:
    assert run("login", "--browser").exit_code == 0
    assert stored.current_token(folder, [process.url + "/"]) != ""
    for others in (["http://127.0.0.1:1"], [process.url, "http://127.0.0.1:1"], [process.url.replace("http", "https")]):
        assert stored.current_token(folder, others) == ""
    done = run("status", controller="http://127.0.0.1:1")
    assert (done.exit_code, "no token" in done.output) == (2, True)


def test_person_without_role_is_not_logged_in(run: Run, provider: OpenidProvider, folder: Path) -> None:
    provider.claims["groups"] = ["visitors"]
    done = run("login", "--browser")
    assert done.exit_code == 1
    assert "has no role here" in done.output
    assert not (folder / stored.FILE).exists()


def test_controller_without_login_is_reported(run: Run, program_forks: ForkPool, tmp_path: Path) -> None:
    with controller_process(tmp_path, program_forks) as plain:
        done = run("login", controller=plain.url)
    assert done.exit_code == 2
    assert "this controller has no login" in done.output


@pytest.mark.promise("roles")
def test_callback_takes_only_its_own_state() -> None:
    with flows._Callback(0, "right") as server, ThreadPoolExecutor(1) as waiting:
        found = waiting.submit(server.wait)
        for path, query in (
            ("/callback", {"state": "wrong", "code": "stolen"}),
            ("/callback", {"code": "stolen"}),
            ("/", {"state": "right", "code": "x"}),
            ("/favicon.ico", {}),
        ):
            url = f"http://127.0.0.1:{server.server_port}{path}?{urlencode(query)}"
            assert httpx.get(url).status_code == 404
        answer = httpx.get(f"{server.redirect_uri}?{urlencode({'state': 'right', 'code': 'mine'})}")
        assert answer.status_code == 200
        assert "mine" not in answer.text
        assert found.result(30) == {"state": "right", "code": "mine"}


def test_callback_gives_up_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "LOGIN_TIMEOUT_S", 0.0)
    with flows._Callback(0, "right") as server, pytest.raises(AuthenticationError, match="no browser came back"):
        server.wait()
    with flows._Callback(0, "x") as server, pytest.raises(ConfigurationError, match="cannot be used"):
        flows._Callback(server.server_port, "y")


def test_address_for_the_browser_has_proofs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def browse(url: str) -> bool:
        seen.append(url)
        threading.Thread(target=httpx.get, args=(url,), kwargs={"follow_redirects": True}).start()
        return True

    monkeypatch.setattr(webbrowser, "open", browse)
    assert run("login", "--browser").exit_code == 0
    assert run("login", "--browser").exit_code == 0
    first, second = (parse_qs(urlsplit(url).query) for url in seen)
    assert first["client_id"] == [COMMANDS]
    assert first["code_challenge_method"] == ["S256"]
    assert urlsplit(first["redirect_uri"][0]).hostname == "127.0.0.1"
    assert all(first[name] != second[name] for name in ("state", "nonce", "code_challenge"))


@pytest.mark.parametrize("damage", ["mode", "link", "text"])
def test_file_that_others_could_change_is_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    folder.mkdir(parents=True)
    file = folder / stored.FILE
    if damage == "link":
        (tmp_path / "other").write_text("{}")
        file.symlink_to(tmp_path / "other")
    else:
        file.write_text('{"logins": []}' if damage == "mode" else "{")
        file.chmod(0o644 if damage == "mode" else 0o600)
    with pytest.raises(ConfigurationError):
        stored.current_token(folder, ["http://127.0.0.1:1"])


def test_unusable_folder_is_reported(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("no folder")
    login = stored.StoredLogin(
        controllers=("http://127.0.0.1:1",),
        client_id="c",
        provider=oidc.Provider(issuer="https://id.example.com", jwks_uri="https://id.example.com/keys"),
        id_token="t",
        ends_at=0.0,
    )
    for change in (lambda: stored.store(folder, login), lambda: stored.remove(folder, ["http://127.0.0.1:1"])):
        with pytest.raises(ConfigurationError, match="cannot be"):
            change()


def test_unreadable_authority_is_reported() -> None:
    with pytest.raises(ConfigurationError, match="/missing"):
        stored.send("https://id.example.com", "/missing")


def test_answer_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, provider: OpenidProvider) -> None:
    monkeypatch.setattr(oidc, "MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(Unavailable, match="over 10 bytes"):
        stored.send(f"{provider.issuer}/keys")
