"""The web page's static files: fixed names, entity tags, compression, headers, and their use of the REST API."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from everstep.wire.v1 import operator as op
from everstep_controller.api import web_page
from tests.support.fleet.controllers import OPERATOR, VIEWER, InProcess, get

MOST_BYTES = 300_000
SHIPPED = sorted(str(path.relative_to(web_page.FOLDER)) for path in web_page.FOLDER.rglob("*") if path.is_file())
LINKED = {*web_page.PAGES, "/openapi.json"}
SERVED = [name for name in SHIPPED if not name.startswith("vendor/LICENSE")]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with TestClient(InProcess(f"sqlite:///{tmp_path_factory.mktemp('page') / 'c.db'}")) as client:
        yield client


def test_list_of_files_matches_the_package() -> None:
    assert sorted(web_page.FILES) == SERVED


def test_vendored_libraries_have_their_licences() -> None:
    licences = {name for name in SHIPPED if name.startswith("vendor/LICENSE")}
    assert licences == {"vendor/LICENSE.htm", "vendor/LICENSE.preact", "vendor/LICENSE.uplot"}


def test_page_stays_small() -> None:
    assert sum((web_page.FOLDER / name).stat().st_size for name in SERVED) < MOST_BYTES


def test_page_is_served_without_a_token(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.mark.parametrize("name", web_page.FILES)
def test_file_is_served_with_type_and_compression(client: TestClient, name: str) -> None:
    plain = client.get(f"/web/{name}", headers={"accept-encoding": "identity"})
    assert plain.status_code == 200
    assert plain.content == (web_page.FOLDER / name).read_bytes()
    assert plain.headers["content-type"] == web_page.MEDIA_TYPES[name.rpartition(".")[2]]
    assert plain.headers["x-content-type-options"] == "nosniff"
    assert plain.headers["vary"] == "accept-encoding"
    with client.stream("GET", f"/web/{name}", headers={"accept-encoding": "gzip"}) as packed:
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(b"".join(packed.iter_raw())) == plain.content


def test_file_with_known_tag_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/web/app.js").headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        answer = client.get("/web/app.js", headers={"if-none-match": known})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert client.get("/web/app.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/web/",
        "/web/vendor/LICENSE.htm",
        "/web/../app.py",
        "/web/%2e%2e/app.py",
        "/web/..%2fapp.py",
        "/web//etc/passwd",
        "/web/%2fetc%2fpasswd",
        "/web/app.js%00",
        "/web/app.js/",
        "/web/App.js",
        "/web/" + "x" * 5000,
    ],
)
def test_other_names_are_not_found(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_page_takes_only_reading_methods(client: TestClient) -> None:
    answer = client.post("/web/app.js")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_scripts_import_only_shipped_files() -> None:
    ours = [name for name in SERVED if name.endswith((".js", ".html")) and not name.startswith("vendor/")]
    for name in ours:
        text = (web_page.FOLDER / name).read_text()
        for target in re.findall(r'(?:from|import) "([^"]+)"|(?:src|href)="(/[^"]+)"', text):
            path = (target[0] or target[1]).removeprefix("./").removeprefix("/web/")
            assert path in SERVED or target[1] in LINKED, f"{name} loads {path}"
        assert "https://" not in text
        assert ' style="' not in text, "the content security policy refuses style attributes"


def test_identity_tells_role_and_name(client: TestClient) -> None:
    assert get(client, "/v1/identity", op.CallerIdentity) == op.CallerIdentity(role="viewer", subject="vera")
    assert get(client, "/v1/identity", op.CallerIdentity, OPERATOR).role == "operator"
    assert client.get("/v1/identity").status_code == 401
    assert client.get("/v1/nodes", headers=VIEWER).status_code == 200
