"""Store credentials: issue, rotate, revoke, enrol and verify them.

Credentials are also kept in memory, so a check costs no SQL. The leader writes every change in the loop's transaction,
together with its entry in the event log. A change holds in memory at once, and is answered when it is durable.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import secrets
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from itertools import islice

import msgspec
import xxhash

from everstep import bearer_tokens
from everstep.bearer_tokens import Identity, TokenRole, hash_secret
from everstep.clock import Clock
from everstep.errors import AuthenticationError, ConfigurationError, Conflict, NotFound, PermissionDenied
from everstep.wire.v1 import enrolment as wire
from everstep_controller.config import read_secrets
from everstep_controller.core.effects import EventLogEntry
from everstep_controller.runtime.transaction import Transaction
from everstep_controller.store.rows import DEAD_CREDENTIAL_KEPT_S, CredentialRow, decode_cursor, encode_cursor

# ---- secret file
# The file is watched, so rotating the fleet's secret needs no restart.

log = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
"""Seconds between checks of the file's modification time; a check costs 2 us."""

Secrets = tuple[bytes, ...]


def fingerprint(secret: bytes) -> str:
    """Return a name for a secret in logs and identities that reveals nothing of the secret."""
    return "secret-" + hashlib.sha256(b"everstep/1 fingerprint\0" + secret).hexdigest()[:12]


class Keyring:
    """The secrets that verify minted tokens; the first one mints. ``names`` are their fingerprints.

    ``path`` is the secrets' file, reread when it changes; empty for none. Raises ConfigurationError for short secrets.
    """

    def __init__(self, secrets: Secrets, path: str = "") -> None:
        self._path = path
        self._seen = self._stamp()
        self._look_at = 0.0
        self.changes = 0  # of the secrets; each may invalidate cached tokens
        self._take(secrets)

    @classmethod
    def of_file(cls, path: str) -> Keyring:
        """Return the secrets in a file, reread when it changes. Raises ConfigurationError if it is unusable now."""
        return cls(read_secrets(path), path)

    def _stamp(self) -> object:
        """Return a value that changes with the file; None if there is no file."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _take(self, secrets: Secrets) -> None:
        self.secrets = tuple(bearer_tokens.check_secret(secret) for secret in secrets)
        self._names = {secret: fingerprint(secret) for secret in self.secrets}
        self.names = frozenset(self._names.values())

    def verify(self, token: str) -> Identity:
        """Return the identity in a minted token. Raises AuthenticationError."""
        identity, secret = bearer_tokens.verify_with_secret(self.secrets, token)
        return Identity(identity.role, identity.subject, self._names[secret])

    def verify_login(self, token: str) -> Identity:
        """Return the identity in the token of a login on the web page. Raises AuthenticationError.
        The caller checks its end."""
        identity, secret = bearer_tokens.verify_login(self.secrets, token)
        return msgspec.structs.replace(identity, credential=self._names[secret])

    def refresh(self, clock: Clock) -> int:
        """Reread the file if it has changed, checking at most once per second. Return ``changes``."""
        if self._path and clock.monotonic() >= self._look_at:
            self._look_at = clock.monotonic() + RELOAD_INTERVAL_S
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                self._read_again()
        return self.changes

    def _read_again(self) -> None:
        before = self.secrets
        try:
            self._take(read_secrets(self._path))
        except ConfigurationError as error:
            log.error("the fleet's secrets could not be reread and stay unchanged: %s", error)
        if self.secrets != before:
            self.changes += 1
            log.info("the fleet's secrets have changed to %s", ", ".join(self._names.values()))


MAX_CREDENTIALS = 300_000
"""Maximum credentials: two per node of the largest fleet. A stolen join token cannot fill the memory."""
FIRST_SWEEP = 1024
RETRY_WINDOW_S = 86400.0
"""Seconds for which a used-up join token still answers the nodes it enrolled, because an answer may be lost."""
_DUMMY_HASH = hash_secret("no credential has this secret")


class ChangeContext(msgspec.Struct, frozen=True):
    """The author of a change, the reason, and the trace of the stimulus."""

    identity: Identity
    reason: str
    trace: str


def public_credential(row: CredentialRow) -> wire.Credential:
    """Return the credential as shown to operators."""
    values = msgspec.structs.asdict(row) | {"role": TokenRole(row.role), "replace": row.replaces}
    return wire.Credential(**{name: values[name] for name in wire.Credential.__struct_fields__})


class CredentialStore:
    """All stored credentials. ``on_invalidated`` is called when a credential becomes invalid or ends sooner."""

    def __init__(self, rows: Iterable[CredentialRow] = ()) -> None:
        self._rows: dict[str, CredentialRow] = {}
        self._of_node: dict[str, set[str]] = {}
        self._order: list[tuple[float, str]] = []
        self._digest = 0
        self._sweep_at = FIRST_SWEEP
        self.on_invalidated: Callable[[], None] = lambda: None
        for row in rows:
            self._index(row)

    # --- verification

    def verify(self, token: str, now: float) -> tuple[Identity, float]:
        """Return a stored token's identity and end (wall seconds or infinity). Raises AuthenticationError."""
        id, secret = bearer_tokens.split_stored(token)
        row = self._rows.get(id)
        expected = row.hash if row is not None else _DUMMY_HASH  # an unknown id takes as long as a wrong secret
        if not hmac.compare_digest(hash_secret(secret), expected) or row is None:
            raise AuthenticationError("the token does not verify: it is damaged, or belongs to another fleet")
        if not row.is_valid_at(now):
            state = "was revoked" if row.revoked_at is not None else "has expired"
            raise AuthenticationError(f"credential {id} {state}: ask an operator for another")
        end = row.ends_at()
        return Identity(TokenRole(row.role), row.subject, id), math.inf if end is None else end

    def is_valid(self, id: str, now: float) -> bool:
        """Return whether a valid credential has this id."""
        row = self._rows.get(id)
        return row is not None and row.is_valid_at(now)

    def page(self, role: str, subject: str, cursor: str, limit: int) -> tuple[list[CredentialRow], str]:
        """Return a page of a role and subject (empty: any), oldest first, and the next page's cursor."""
        place = decode_cursor(cursor, (float, str))
        begin = bisect_right(self._order, place) if place is not None else 0
        found: list[CredentialRow] = []
        for _, id in islice(self._order, begin, None):
            row = self._rows[id]
            if (role and row.role != role) or (subject and row.subject != subject):
                continue
            if len(found) == limit:
                return found, encode_cursor((found[-1].created_at, found[-1].id))
            found.append(row)
        return found, ""

    def get(self, id: str) -> CredentialRow:
        """Return the credential. Raises NotFound."""
        row = self._rows.get(id)
        if row is None:
            raise NotFound(f"no credential {id}: `everstep token list` lists them")
        return row

    def digest(self) -> str:
        """Return a hex digest that changes with any listed credential. It is maintained, so a call costs nothing."""
        return f"{self._digest:016x}"

    # --- changes

    def issue(self, request: wire.IssueRequest, context: ChangeContext, tx: Transaction, now: float) -> wire.Issued:
        """Issue a credential, whose token is only in the answer. Raises Conflict if there are too many."""
        join = request if isinstance(request, wire.IssueJoin) else None
        row = CredentialRow(
            id=self._new_id(now),
            role=str(request.__struct_config__.tag),
            subject=request.subject,
            hash="",
            created_at=now,
            created_by=context.identity.subject,
            expires_at=None if request.expires_in_s is None else now + request.expires_in_s,
            uses_left=join.uses if join else None,
            replaces=join is not None and join.replace,
            note=request.note,
        )
        return self._issued(row, f"{context.identity.subject} issued {_named(row)}", context, tx)

    def rotate(self, id: str, grace_s: float, context: ChangeContext, tx: Transaction, now: float) -> wire.Issued:
        """Issue a second credential for the same subject, and limit the first to ``grace_s`` more seconds.

        The second credential's lifetime equals the first one's. A join token's remaining uses move to the second at
        once, so no more nodes can enrol than intended. Raises NotFound, or Conflict if the first is not valid.
        """
        old = self._valid_row(id, now)
        life_s = None if old.expires_at is None else old.expires_at - old.created_at
        new = msgspec.structs.replace(
            old,
            id=self._new_id(now),
            created_at=now,
            created_by=context.identity.subject,
            expires_at=None if life_s is None else now + life_s,
        )
        end = now + grace_s
        uses_left = None if old.uses_left is None else 0
        self._put(msgspec.structs.replace(old, expires_at=min(end, old.expires_at or end), uses_left=uses_left), tx)
        sentence = f"{context.identity.subject} rotated {_named(old)}, valid for {grace_s:g} s more, into {new.id}"
        return self._issued(new, sentence, context, tx)

    def revoke(self, id: str, context: ChangeContext, tx: Transaction, now: float) -> str:
        """End a credential, and return a sentence about it. Raises NotFound, or Conflict if it is no longer valid."""
        row = self._valid_row(id, now)
        self._put(msgspec.structs.replace(row, revoked_at=now), tx)
        return _note("revoked", f"{context.identity.subject} revoked {_named(row)}", row, context, tx, now)

    def enrol(self, request: wire.Enrol, identity: Identity, trace: str, tx: Transaction, now: float) -> wire.Enrolled:
        """Issue a node's own credential for a join token. A repeated request gets the same answer."""
        join = self._rows.get(identity.credential)
        if join is None or not join.is_valid_at(now):
            raise AuthenticationError("the join token is expired or revoked: ask an operator for another")
        if not fnmatchcase(request.node, join.subject):
            raise PermissionDenied(f"this join token is for nodes named {join.subject}, not for {request.node}")
        ids = sorted(self._of_node.get(request.node, ()))
        node_credentials = [row for id in ids if (row := self._rows[id]).is_valid_at(now)]
        by = f"join:{join.id}"
        for row in node_credentials:
            if row.created_by == by and hmac.compare_digest(row.hash, request.secret_hash):
                return wire.Enrolled(credential=row.id, node=request.node)
        if join.uses_left == 0:
            raise PermissionDenied("this join token is used up: ask an operator for another")
        if node_credentials and not join.replaces:
            raise Conflict(
                f"node {request.node} is enrolled already with credential {node_credentials[0].id}: revoke it "
                f"(`everstep token revoke {node_credentials[0].id}`), or use a join token issued with --replace"
            )
        row = CredentialRow(
            id=self._new_id(now),
            role=TokenRole.AGENT,
            subject=request.node,
            hash=request.secret_hash,
            created_at=now,
            created_by=by,
            note=join.note,
        )
        self._put(row, tx)
        for old in node_credentials:
            self._put(msgspec.structs.replace(old, revoked_at=now), tx)
        if join.uses_left is not None:
            left, end = join.uses_left - 1, join.expires_at
            if left == 0:
                end = min(now + RETRY_WINDOW_S, end or now + RETRY_WINDOW_S)
            self._put(msgspec.structs.replace(join, uses_left=left, expires_at=end), tx)
        instead = f" instead of {', '.join(old.id for old in node_credentials)}" if node_credentials else ""
        sentence = f"node {request.node} enrolled by join token {join.id} and has credential {row.id}{instead}"
        order = ChangeContext(Identity(TokenRole.JOIN, by, join.id), join.note or "enrolment", trace)
        _note("enrolled", sentence, row, order, tx, now)
        return wire.Enrolled(credential=row.id, node=request.node)

    # --- storage

    def _issued(self, row: CredentialRow, sentence: str, order: ChangeContext, tx: Transaction) -> wire.Issued:
        secret = secrets.token_hex(32)
        row = msgspec.structs.replace(row, hash=hash_secret(secret))
        self._put(row, tx)
        _note("issued", sentence, row, order, tx, row.created_at)
        return wire.Issued(
            credential=public_credential(row), token=bearer_tokens.stored_token(row.id, secret), trace=order.trace
        )

    def _new_id(self, now: float) -> str:
        self._forget_dead(now)
        if len(self._rows) >= MAX_CREDENTIALS:
            raise Conflict(f"the maximum of {MAX_CREDENTIALS} credentials is reached: revoke unused ones")
        return secrets.token_hex(8)

    def _forget_dead(self, now: float) -> None:
        """Drop dead credentials now and then, as the table does."""
        if len(self._rows) < self._sweep_at:
            return
        for id, row in list(self._rows.items()):
            if not row.is_valid_at(now - DEAD_CREDENTIAL_KEPT_S):
                del self._rows[id]
                self._digest ^= _digest(row)
                self._of_node.get(row.subject, set()).discard(id)
        self._of_node = {node: ids for node, ids in self._of_node.items() if ids}
        self._order = [place for place in self._order if place[1] in self._rows]
        self._sweep_at = max(FIRST_SWEEP, 2 * len(self._rows))

    def _valid_row(self, id: str, now: float) -> CredentialRow:
        row = self.get(id)
        if not row.is_valid_at(now):
            raise Conflict(f"credential {id} is {'revoked' if row.revoked_at is not None else 'expired'} already")
        return row

    def _put(self, row: CredentialRow, tx: Transaction) -> None:
        before = self._rows.get(row.id)
        self._index(row)
        tx.put_credential(row)
        if before is not None and before.ends_at() != row.ends_at():
            self.on_invalidated()

    def _index(self, row: CredentialRow) -> None:
        before = self._rows.get(row.id)
        self._rows[row.id] = row
        self._digest ^= _digest(row)
        if before is None:
            insort(self._order, (row.created_at, row.id))
        else:
            self._digest ^= _digest(before)
        if row.role == TokenRole.AGENT:
            self._of_node.setdefault(row.subject, set()).add(row.id)


def _digest(row: CredentialRow) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(public_credential(row)))


def _named(row: CredentialRow) -> str:
    holder = f"node {row.subject}" if row.role == TokenRole.AGENT else row.subject
    return f"{row.role} credential {row.id} of {holder}"


def _note(change: str, sentence: str, row: CredentialRow, order: ChangeContext, tx: Transaction, now: float) -> str:
    """Write an entry to the event log with the author and reason of a change, and return its sentence."""
    sentence = f"{sentence}: {order.reason}"
    data = {"actor": order.identity.subject, "reason": order.reason, "credential": row.id}
    node = row.subject if row.role == TokenRole.AGENT else None
    job = row.subject if row.role == TokenRole.TRAINER else None
    kind = f"credential.{change}"
    entry = EventLogEntry(kind=kind, sentence=sentence, at=now, trace=order.trace, node=node, job=job, data=data)
    tx.add_event_log_entry(entry)
    return sentence
