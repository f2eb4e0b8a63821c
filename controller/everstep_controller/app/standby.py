"""Answer requests while this controller stands by, and record the agents that contact it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import Receive, Scope, Send

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.wire.v1.agent import MAX_BODY_BYTES
from everstep.wire.v1.operator_history import PolicyTrialRequest
from everstep_controller.api.routes import PLAIN_ROUTES, POLICY_ROUTES
from everstep_controller.auth.authenticator import Authenticator, Headers, RouteAccess
from everstep_controller.auth.credentials import CredentialStore, Keyring
from everstep_controller.auth.identity_provider import IdentityProvider
from everstep_controller.auth.peers import ConnectionPeer
from everstep_controller.config import ControllerSettings
from everstep_controller.journal.policy_replay import PolicyTrialRunner
from everstep_controller.leadership.lease import NotLeadingError, StandbyContacts
from everstep_controller.policy.rulebook import with_rules
from everstep_controller.read_models.prometheus import standby_registry
from everstep_controller.server import responses
from everstep_controller.server.connections import SCOPE_KEY
from everstep_controller.store.rows import CredentialRow

_trial_decoder = msgspec.json.Decoder(PolicyTrialRequest)


class StandbyApp:
    """ASGI application of a standby. It keeps no connection open, so that clients move to the leader soon."""

    def __init__(
        self,
        settings: ControllerSettings,
        keyring: Keyring,
        clock: Clock,
        leader: Callable[[], str],
        provider: IdentityProvider | None = None,
    ) -> None:
        self._provider = provider
        self._settings = settings
        self._keyring = keyring
        self._clock = clock
        self._leader = leader
        self.update_credentials(())
        self.start()
        self._trials = PolicyTrialRunner(settings.journal.journal_dir)
        self._registry = standby_registry(lambda: self.contacts.count_persistent())

    def update_credentials(self, credentials: Iterable[CredentialRow]) -> None:
        """Replace the stored credentials, which decide who may read the metrics."""
        store = CredentialStore(credentials)
        clock = self._clock
        self._authenticator = Authenticator(self._settings, self._keyring, store, {}, clock, clock.wall, self._provider)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        try:
            if path == "/healthz":
                await responses.send_answer(send, b'{"ok":true,"role":"standby"}')
            elif path == "/readyz":
                body = msgspec.json.encode({"ok": False, "role": "standby", "leader": self._leader()})
                await responses.send_answer(send, body, 503)
            elif path == "/metrics":
                await self._authorize(PLAIN_ROUTES["metrics"].access, scope)
                text = CONTENT_TYPE_LATEST.encode()
                await responses.send_answer(send, generate_latest(self._registry), media_type=text)
            elif _is_local_trial(scope):
                await self._run_policy_trial(scope, receive, send)
            else:
                raise self.not_leading_error()
        except responses.ClientGone:
            pass
        except EverstepError as error:
            headers = list((dict(responses.error_headers(error)) | {b"connection": b"close"}).items())
            body, media_type = responses.problem_of(error), responses.MEDIA_TYPE.encode()
            await responses.send_answer(send, body, error.status, headers, media_type)

    def start(self) -> StandbyContacts:
        """Begin to stand by, with an empty record of contacts."""
        self.contacts = StandbyContacts(self._clock, self._settings.leadership.resign_after_s / 3)
        return self.contacts

    def record_contact(self, node: str, headers: Headers, peer: ConnectionPeer) -> None:
        """Record an agent that asks for a session. Only an agent that is authorized for one counts."""
        with contextlib.suppress(EverstepError):
            self._authenticator.authorize_agent(headers, node, peer)
            self.contacts.record(node)

    async def _authorize(self, access: RouteAccess, scope: Scope) -> None:
        await self._authenticator.prepare(scope["headers"])
        self._authenticator.authorize(access, scope["headers"], scope.get(SCOPE_KEY))

    async def _run_policy_trial(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Try a policy change on the journal that this controller recorded while it led."""
        await self._authorize(POLICY_ROUTES["try_policy"].access, scope)
        wanted = responses.decode(_trial_decoder, await responses.read_body(scope, receive, MAX_BODY_BYTES))
        result = await self._trials.run(with_rules(self._settings.policy), wanted, self._clock.wall())
        await responses.send_answer(send, responses.encode(result), headers=[(b"connection", b"close")])

    def not_leading_error(self) -> NotLeadingError:
        """Return the error for requests that need a leader."""
        leader = self._leader()
        action = f"send the request to the leader, {leader}" if leader else "no leader is known yet, try again"
        return NotLeadingError(f"this controller is standby: {action}", leader)


def _is_local_trial(scope: Scope) -> bool:
    route = POLICY_ROUTES["try_policy"]
    is_trial = scope.get("method") == route.method and scope.get("path") == route.path
    return is_trial and responses.parse_query(scope).get("local") in ("true", "1")
