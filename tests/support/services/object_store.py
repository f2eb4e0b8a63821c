"""A server with the part of S3's REST interface that obstore and s3fs use, on loopback, with objects in memory.

An object appears as a whole when it is put, or when its multipart upload is completed. From then on every read and
every listing shows it, as S3 promises. Objects cannot be renamed, and signatures are not checked.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class ObjectServer(ThreadingHTTPServer):
    """The objects of one bucket. ``on_change`` is called before each change of an object, and may delay it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.on_change: Callable[[str, str], None] = lambda _request, _key: None
        self.completed: list[str] = []
        """Keys in the order in which the objects appeared. A key that was written twice appears twice."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, key: str, data: bytes) -> None:
        with self.lock:
            self.objects[key] = data, time.time()  # noqa: TID251 - S3 says when an object was written
            self.completed.append(key)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ObjectServer
    _XML: ClassVar = {"Content-Type": "application/xml"}

    def log_message(self, *_: object) -> None:
        return

    def _request(self) -> tuple[str, dict[str, str]]:
        """Return the key without the bucket's name, and the query."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return unquote(parts.path).lstrip("/").partition("/")[2], query

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, length: int = -1) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length < 0 else length))
        try:
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # the client was killed

    def _answer_xml(self, root: str, inner: str) -> None:
        self._answer(200, f'<?xml version="1.0"?><{root} xmlns="{NAMESPACE}">{inner}</{root}>'.encode(), self._XML)

    def _not_found(self) -> None:
        self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>no such object</Message></Error>", self._XML)

    def do_HEAD(self) -> None:
        key, _ = self._request()
        found = self.server.objects.get(key)
        if not key:
            self._answer(200)
        elif found is None:
            self._not_found()
        else:
            self._answer(200, headers=_headers(*found), length=len(found[0]))

    def do_GET(self) -> None:
        key, query = self._request()
        if not key:
            self._list(query.get("prefix", ""), query.get("delimiter", ""))
            return
        found = self.server.objects.get(key)
        if found is None:
            self._not_found()
            return
        data, headers = found[0], _headers(*found)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
            self._answer(206, data[int(first) : end], headers)
        else:
            self._answer(200, data, headers)

    def _list(self, prefix: str, delimiter: str) -> None:
        with self.server.lock:
            found = {key: value for key, value in sorted(self.server.objects.items()) if key.startswith(prefix)}
        folders: dict[str, None] = {}
        inner = ""
        for key, (data, written) in found.items():
            folder, within, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if within:
                folders[f"{prefix}{folder}{delimiter}"] = None
                continue
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(written)) + f".{int(written % 1 * 1000):03d}Z"
            inner += f"<Contents><Key>{quote(key)}</Key><LastModified>{at}</LastModified><Size>{len(data)}</Size>"
            inner += f"<ETag>&quot;{md5(data).hexdigest()}&quot;</ETag></Contents>"
        inner += "".join(f"<CommonPrefixes><Prefix>{quote(folder)}</Prefix></CommonPrefixes>" for folder in folders)
        count = f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>"
        self._answer_xml("ListBucketResult", f"<Prefix>{quote(prefix)}</Prefix>{count}{inner}")

    def do_PUT(self) -> None:
        (key, query), body = self._request(), self._body()
        self.server.on_change("part" if "partNumber" in query else "put", key)
        if "partNumber" in query:
            with self.server.lock:
                self.server.uploads[query["uploadId"]][1][int(query["partNumber"])] = body
        elif key:
            self.server.put(key, body)
        self._answer(200, headers={"ETag": f'"{md5(body).hexdigest()}"'})

    def do_POST(self) -> None:
        (key, query), body = self._request(), self._body()
        if "delete" in query:
            self._delete(body)
        elif "uploads" in query:
            upload = uuid.uuid4().hex
            self.server.uploads[upload] = key, {}
            self._answer_xml("InitiateMultipartUploadResult", f"<Key>{escape(key)}</Key><UploadId>{upload}</UploadId>")
        else:
            self.server.on_change("complete", key)
            with self.server.lock:
                _, parts = self.server.uploads.pop(query["uploadId"])
            self.server.put(key, b"".join(parts[number] for number in sorted(parts)))
            self._answer_xml("CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key><ETag>&quot;0&quot;</ETag>")

    def _delete(self, body: bytes) -> None:
        keys = [element.text or "" for element in ElementTree.fromstring(body).iter(f"{{{NAMESPACE}}}Key")]
        for key in keys:
            self.server.on_change("delete", key)
            self.server.objects.pop(key, None)
        self._answer_xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))

    def do_DELETE(self) -> None:
        key, query = self._request()
        self.server.on_change("delete", key)
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"], None)
        else:
            self.server.objects.pop(key, None)
        self._answer(204)


def _headers(data: bytes, written: float) -> dict[str, str]:
    return {"ETag": f'"{md5(data).hexdigest()}"', "Last-Modified": formatdate(written, usegmt=True)}


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Yield a server, and stop it at the end of the block."""
    with ObjectServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
