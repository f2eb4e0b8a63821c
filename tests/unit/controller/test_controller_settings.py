from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import ConfigurationError
from everstep.vocabulary import FindingKind, Mode
from everstep_controller.config import load_settings, read_password, read_secret
from everstep_controller.core.policy import CorePolicy

GIVEN = {"secret_file": "secret"}


def test_explicit_argument_overrides_all_other_sources(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("listen = '127.0.0.1:3'\nmax_commit_batch = 3\n[policy.checkpoints]\nversion_window = 7\n")
    environment = {
        "EVERSTEP_CONTROLLER_LISTEN": "127.0.0.1:2",
        "EVERSTEP_CONTROLLER_MAX_COMMIT_BATCH": "2",
        "EVERSTEP_CONTROLLER_QUEUE_LIMIT": "22",
        "EVERSTEP_CONTROLLER_POLICY_CHECKPOINTS_VERSION_WINDOW": "5",
        "EVERSTEP_CONTROLLER_POLICY_LIVENESS_LOST_AFTER_S": "9.5",
    }
    given = {**GIVEN, "listen": "127.0.0.1:4"}
    settings = load_settings({**given, "preset": "lab", "settings": str(file)}, environment)
    assert settings.listeners.listen == "127.0.0.1:4"
    assert (settings.transactions.max_commit_batch, settings.transactions.queue_limit) == (2, 22)
    assert (settings.policy.checkpoints.version_window, settings.policy.liveness.lost_after_s) == (5, 9.5)
    assert settings.policy.jobs.growth_interval_s == CorePolicy.lab_preset().jobs.growth_interval_s
    origins, prefix = settings.policy_origins, "environment, EVERSTEP_CONTROLLER_POLICY_"
    assert origins["checkpoints.version_window"] == f"{prefix}CHECKPOINTS_VERSION_WINDOW"
    assert origins["liveness.lost_after_s"] == f"{prefix}LIVENESS_LOST_AFTER_S"
    assert origins["jobs.growth_interval_s"] == "preset lab"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("POLICY_BUDGET_CUONT", "POLICY_BUDGET_COUNT"), ("RETENTION_DYAS", "RETENTION_DAYS"), ("POLICY_RULES", "")],
)
def test_misspelt_variable_is_refused_with_suggestion(name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"EVERSTEP_CONTROLLER_{name}: no such setting; .*{meant}"):
        load_settings(GIVEN, {f"EVERSTEP_CONTROLLER_{name}": "2"})


def test_kubernetes_service_variables_are_ignored() -> None:
    links = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTPS", "PORT", "PORT_7700_TCP", "PORT_7700_TCP_PROTO",
             "PORT_7700_TCP_PORT", "PORT_7700_TCP_ADDR")  # fmt: skip
    environment = {f"EVERSTEP_CONTROLLER_{link}": "x" for link in links}
    assert load_settings(GIVEN, environment) == load_settings(GIVEN, {})


def test_site_rules_are_loaded_and_checked(tmp_path: Path) -> None:
    rules = tmp_path / "site.toml"
    rules.write_text('[[rule]]\nkind = "gpu.xid"\nmode = "observe"\nsource = "a test"\n')
    settings = load_settings({**GIVEN, "policy_dir": str(tmp_path)}, {})
    assert settings.policy.rules.default_rule(FindingKind.GPU_XID).mode is Mode.OBSERVE
    assert settings.policy_origins == {"gpu.xid": f"{tmp_path}: mode, source"}
    rules.write_text('[[rule]]\nkind = "gpu.xid"\nmoed = "observe"\nsource = "a test"\n')
    with pytest.raises(ConfigurationError, match="line 3: unknown key `moed`"):
        load_settings({**GIVEN, "policy_dir": str(tmp_path)}, {})


def test_remediation_enforcement_needs_a_remediator(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("[policy.remediation]\nmode = 'enforce'\n")
    with pytest.raises(ConfigurationError, match="dry_run only logs"):
        load_settings({**GIVEN, "settings": str(file)}, {})


@pytest.mark.parametrize("url", ["http://pager.example:77000/x", "http://pager.example:x/", "ftp://x", "http:///x"])
def test_invalid_url_is_refused_at_start(url: str) -> None:
    with pytest.raises(ConfigurationError, match="alert_url"):
        load_settings({**GIVEN, "alert_url": url}, {})
    hook = {"remediation_backend": "webhook", "webhook_url": url, "webhook_secret_file": "w"}
    with pytest.raises(ConfigurationError, match="webhook_url"):
        load_settings({**GIVEN, **hook}, {})


@pytest.mark.parametrize("preset", ["lab", "production"])
def test_every_preset_is_valid(preset: str) -> None:
    assert load_settings({**GIVEN, "preset": preset}, {}).secret_file == "secret"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"secret_file": ""}, "openssl rand"),
        ({"listen": "7700"}, "expected host:port"),
        ({"listen": "127.0.0.1:99999"}, "expected host:port"),
        ({"tls_key": "k"}, "or neither"),
        ({"heartbeat_interval_s": 4.0}, "one late heartbeat makes no node suspect"),
        ({"max_commit_batch": 0}, "at least 1"),
        ({"resign_after_s": 2.0}, "at least lease_s"),
        ({"commit_timeout_s": 0}, "commit_timeout_s must be positive"),
        ({"remediation_backend": "webhook"}, "or none of them"),
        ({"remediation_backend": "email"}, "--remediation-backend: 'email' is not one of dry_run, webhook"),
        ({"remediation_backend": "webhook", "webhook_url": "ftp://x", "webhook_secret_file": "f"}, "http or https"),
        ({"max_commit_batch": "many"}, "--max-commit-batch: 'many' is not a whole number"),
    ],
)
def test_invalid_setting_is_refused_with_advice(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_settings({**GIVEN, **given}, {})


def test_invalid_settings_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings({**GIVEN, "settings": str(file)}, {})
    file.write_text("listen = ")
    with pytest.raises(ConfigurationError, match="not TOML"):
        load_settings({**GIVEN, "settings": str(file)}, {})
    file.write_text("[policy]\nlost_after_s = 3\n")
    hint = "line 2: unknown key `policy.lost_after_s`; did you mean `policy.liveness.lost_after_s`"
    with pytest.raises(ConfigurationError, match=hint):
        load_settings({**GIVEN, "settings": str(file)}, {})


def test_secret_readable_by_others_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match=f"chmod 600 {file}"):
        read_secret(str(file))
    file.chmod(0o600)
    assert read_secret(str(file)) == b"0123456789abcdef"


def test_missing_or_short_secret_is_refused_with_advice(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigurationError, match="openssl rand"):
        read_secret(str(file))
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(ConfigurationError, match="openssl rand"):
        read_secret(str(file))


def test_database_password_needs_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("short\n")
    file.chmod(0o600)
    assert read_password(str(file)) == "short"
    file.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_password(str(file))
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        read_password(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="is not text"):
        read_password(str(file))


@pytest.mark.parametrize(
    ("database", "why"),
    [
        ("sqlite:///c.db", "postgresql://USER@HOST/NAME"),
        ("postgresql://host/name", "postgresql://USER@HOST/NAME"),
        ("postgresql://user:shown@host/name", "remove it from the URL"),
    ],
)
def test_password_file_is_refused_for_unsuitable_database(database: str, why: str) -> None:
    given = {**GIVEN, "database": database, "database_password_file": "password"}
    with pytest.raises(ConfigurationError, match=why):
        load_settings(given, {})


LOGIN = {
    **GIVEN,
    "oidc_issuer": "https://id.example.com/realms/ai",
    "oidc_client_id": "everstep",
    "oidc_roles": "admins=operator,gpu=users=viewer",
}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"oidc_issuer": ""}, "oidc_client_id needs oidc_issuer"),
        ({"oidc_issuer": "http://id.example.com"}, "oidc_issuer must be https unless its host is loopback"),
        ({"oidc_issuer": "https://id.example.com?x=1"}, "must not have a query"),
        ({"oidc_issuer": "id.example.com"}, "oidc_issuer must be an https URL"),
        ({"oidc_client_id": ""}, "oidc_client_id is missing"),
        ({"oidc_roles": ""}, "list of VALUE=ROLE"),
        ({"oidc_roles": "admins=agent"}, "list of VALUE=ROLE"),
        ({"oidc_roles": "=viewer"}, "list of VALUE=ROLE"),
        ({"oidc_roles": "operator"}, "list of VALUE=ROLE"),
        ({"oidc_role_claim": ""}, "oidc_role_claim is missing"),
        ({"oidc_scopes": "profile"}, "must contain openid"),
        ({"oidc_redirect_uri": "https://c.example.com/"}, "must end in /v1/login/callback"),
        ({"oidc_redirect_uri": "https://c.example.com/v1/login/callback?x=1"}, "must end in"),
        ({"oidc_redirect_uri": "http://c.example.com/v1/login/callback"}, "oidc_redirect_uri must be https"),
        ({"oidc_clock_skew_s": 1000}, "oidc_clock_skew_s"),
        ({"oidc_session_s": 1e6}, "oidc_session_s"),
    ],
)
def test_invalid_login_setting_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_settings({**LOGIN, **given}, {})
    load_settings({**LOGIN, "oidc_redirect_uri": "http://127.0.0.1:7700/v1/login/callback"}, {})


def test_commands_use_a_client_without_secret() -> None:
    assert load_settings(LOGIN, {}).oidc.command_client() == "everstep"
    secret = {**LOGIN, "oidc_client_secret_file": "f"}
    assert load_settings(secret, {}).oidc.command_client() == ""
    assert load_settings({**secret, "oidc_command_client_id": "cli"}, {}).oidc.command_client() == "cli"
