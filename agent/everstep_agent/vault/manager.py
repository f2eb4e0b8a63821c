"""The supervisor's side of the vault: take it over or start it, keep it running, configure its jobs.

**An agent is upgraded** by stopping it (SIGTERM) and starting the new one over the same run directory; meanwhile the
trainers run on, and the vault keeps serving. The new supervisor finds it by ``vault.json`` and ``vault.sock``. The
vault itself is upgraded when no job has segments on the node: stop the agent with ``--stop-vault-on-exit``, or send the
vault SIGTERM and the supervisor starts the new one. Under systemd this needs ``KillMode=process``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from everstep.clock import Backoff, Clock
from everstep.errors import DECODE_ERRORS, EverstepError, MalformedMessage, StaleGeneration, Unavailable
from everstep.layout.vault_status import is_locked
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.directives import ProtectVersion, SpillVersion
from everstep.wire.v1.training import AnyReport, FindingRaised, PeerConnectionLost
from everstep.wire.v1.vault_reports import ParityGroup, VersionProtected, VersionSpilled
from everstep_agent.config import AgentSettings, parse_listen_address
from everstep_agent.jobs.local_processes import LocalJob
from everstep_agent.lifecycle import delete_segments, peer_credentials, wait_readable
from everstep_agent.vault.settings import VaultSettings, encode_settings


def vault_command(settings: AgentSettings, listen: str) -> list[str]:
    """Return the command line of a vault that listens at ``listen`` for other vaults."""
    die_with_parent = settings.shutdown.die_with_parent and not settings.shutdown.vault_survives_kill_of
    chosen = VaultSettings(
        node=settings.node,
        run_dir=settings.run_dir.absolute(),
        segment_dir=settings.resolved_segment_dir.absolute(),
        listen=listen,
        memory_limit=settings.vault.vault_memory_limit_bytes,
        die_with_parent=die_with_parent,
        linger_s=None if die_with_parent else settings.shutdown.vault_linger_s,
        send_bytes_per_s=settings.vault.vault_send_bytes_per_s,
        log_format=settings.logs.log_format,
        log_level=settings.logs.log_level,
    )
    return [sys.executable, "-P", "-m", "everstep_agent.vault.process", encode_settings(chosen)]


log = logging.getLogger(__name__)

READY_TIMEOUT_S = 20.0  # seconds to wait for a new vault's ready file; Python starts slowly on a starved machine
EXIT_TIMEOUT_S = 10.0  # seconds between SIGTERM and SIGKILL: unlinking segments takes as long as freeing their memory
STABLE_AFTER_S = 10.0
"""Seconds of running after which an ended vault is restarted at once; an earlier end lengthens the back-off."""

VaultRequest = local.Statistics | local.Protect | local.Spill
VaultAnswer = local.StatisticsAnswer | local.Protected | local.Spilled | local.RequestFailed


class _VaultReadyFile(msgspec.Struct, frozen=True):
    """The content of ``vault.json``."""

    pid: int
    address: str


@dataclass(eq=False)
class VaultManager:
    """Keep one vault running; ``on_change``: it was lost or is back; ``on_peer_lost``: another node's was lost."""

    _settings: AgentSettings
    _clock: Clock
    _on_finding: Callable[[FindingRaised], None]
    _on_peer_lost: Callable[[PeerConnectionLost], None]
    _on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self.address = self.down_reason = ""
        self.pid = self.restarts = 0
        self._ready_file = self._settings.run_dir / "vault.json"
        self._numbers = itertools.count(1)
        self._job_configs: dict[str, local.ConfigureJob] = {}
        self._forgotten: dict[int, str] = {}
        """Jobs whose end the vault has not acknowledged, by the request."""
        self._pending: dict[int, tuple[VaultRequest, asyncio.Future[VaultAnswer]]] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def configure(self, job: LocalJob) -> None:
        """Tell the vault which generation counts: the running one until the boundary of the next one is reached."""
        if job.spec is None:
            return
        self._forgotten = {number: name for number, name in self._forgotten.items() if name != job.name}
        message = self._job_configs[job.name] = local.ConfigureJob(
            request=next(self._numbers),
            job=job.name,
            generation=job.oldest_generation,
            secret=job.spec.secret,
            holders=job.spec.holders,
        )
        self._send(message)

    def forget(self, job: str) -> None:
        """Tell the vault that the job is over, so that it unlinks the job's segments."""
        self._job_configs.pop(job, None)
        number = next(self._numbers)
        self._forgotten[number] = job
        self._send(local.ForgetJob(request=number, job=job))

    def is_configured(self, job: str) -> bool:
        return job in self._job_configs

    async def request(self, message: VaultRequest) -> VaultAnswer:
        """Send a request under the next number and return the answer; a restarted vault is asked again."""
        message = msgspec.structs.replace(message, request=next(self._numbers))
        future: asyncio.Future[VaultAnswer] = asyncio.get_running_loop().create_future()
        self._pending[message.request] = message, future
        self._send(message)
        try:
            return await future
        finally:
            del self._pending[message.request]

    async def statistics(self, timeout_s: float) -> local.StatisticsAnswer | None:
        """Return the vault's statistics, or None if it does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.request(local.Statistics(request=0))
        except TimeoutError:
            return None
        return answer if isinstance(answer, local.StatisticsAnswer) else None

    async def start(self) -> None:
        """Take over a running vault, also a starting or ending one, or start one. Raises Unavailable."""
        end = self._clock.monotonic() + READY_TIMEOUT_S
        while not await self._adopt():
            try:
                if not is_locked(self._settings.run_dir):
                    await self._spawn()
                    break
            except Unavailable:
                if not is_locked(self._settings.run_dir):
                    raise
            if self._clock.monotonic() > end:
                raise Unavailable(f"another vault has locked {self._settings.run_dir} but does not answer: stop it")
            await asyncio.sleep(0.05)
        self.down_reason = ""

    async def run(self) -> None:
        """Handle the vault's messages, and start another vault whenever it ends."""
        attempt = 0
        backoff = Backoff(floor_s=0.05, ceiling_s=10.0)
        while True:
            started_at = self._clock.monotonic()
            self._resend_all()
            self.down_reason = await self._read_until_closed()
            self.restarts += 1
            log.error("the vault is lost: %s", self.down_reason, extra={"node": self._settings.node})
            self._on_change()
            attempt = 0 if self._clock.monotonic() - started_at > STABLE_AFTER_S else attempt + 1
            while self.down_reason:
                if attempt:
                    await asyncio.sleep(backoff.delay_s(attempt - 1, random.random()))
                attempt += 1
                try:
                    await self.start()
                except (EverstepError, OSError) as error:
                    self.down_reason = f"{self.down_reason.partition(';')[0]}; restarting the vault failed: {error}"
                    log.error("%s", error, extra={"node": self._settings.node})
            self._on_change()

    async def stop(self) -> None:
        """End the vault in order, or by force after a time-out; either way its segments are deleted."""
        for job in list(self._job_configs):
            self.forget(job)
        self._disconnect()
        if self._pidfd >= 0:
            self._signal(signal.SIGTERM)
            if not await self._wait_exit(EXIT_TIMEOUT_S):
                log.error("killing the vault, which did not exit within %s s", EXIT_TIMEOUT_S)
                self._signal(signal.SIGKILL)
                await self._wait_exit(EXIT_TIMEOUT_S)
            self._reap()
        # A locked directory belongs to an earlier agent's vault, which another agent may take over.
        if self.pid and not is_locked(self._settings.resolved_segment_dir):
            delete_segments(self._settings.resolved_segment_dir)

    def detach(self) -> None:
        """Let go of the vault, which keeps serving."""
        self._disconnect()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._child is not None:
            self._child.returncode = 0  # Popen would warn about a child that was not waited for

    def has_segments(self) -> bool:
        """Return whether the segment directory holds a job's slots; names with a dot are the vault's own."""
        directory = self._settings.resolved_segment_dir
        return directory.is_dir() and any(p.is_file() and not p.name.startswith(".") for p in directory.rglob("*"))

    def _read_ready_file(self) -> _VaultReadyFile | None:
        try:
            return msgspec.json.decode(self._ready_file.read_bytes(), type=_VaultReadyFile)
        except (OSError, *DECODE_ERRORS):
            return None

    async def _adopt(self) -> bool:
        """Take over the vault that ``vault.json`` names, if its process answers on ``vault.sock``."""
        ready = self._read_ready_file()
        if ready is None:
            return False
        try:
            await self._connect(ready)
        except (Unavailable, OSError):
            return False
        log.info("took over the vault with pid %d at %s", self.pid, self.address, extra={"node": self._settings.node})
        return True

    async def _spawn(self) -> None:
        listen = self._settings.vault.vault_listen
        if self.address and parse_listen_address(listen)[1] == 0 and not self.down_reason.count(";"):
            listen = self.address  # peers know this address and need not learn another
        self._ready_file.unlink(missing_ok=True)
        command = vault_command(self._settings, listen)
        child = self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            await self._connect(await self._wait_for(child))
        except BaseException:  # also when cancelled: otherwise the process would be orphaned
            child.kill()
            child.wait()
            raise

    async def _wait_for(self, child: subprocess.Popen[bytes]) -> _VaultReadyFile:
        """Return the new vault's ready file. Raises Unavailable if it ends or takes too long."""
        end = self._clock.monotonic() + READY_TIMEOUT_S
        while self._clock.monotonic() < end:
            ready = self._read_ready_file()
            if ready is not None and ready.pid == child.pid:
                return ready
            if child.poll() is not None:
                raise Unavailable(f"the vault ended with status {child.returncode} before it was ready")
            await asyncio.sleep(0.01)
        raise Unavailable(f"the vault was not ready within {READY_TIMEOUT_S:g} s")

    async def _connect(self, ready: _VaultReadyFile) -> None:
        """Connect to the vault. Raises Unavailable if another process than ``ready`` names listens on the socket."""
        reader, writer = await asyncio.open_unix_connection(str(self._settings.vault_socket))
        pid, uid = peer_credentials(writer.get_extra_info("socket"))
        if pid != ready.pid or uid != os.geteuid():
            writer.close()
            raise Unavailable(f"{self._settings.vault_socket} belongs to pid {pid} of user {uid}, not to our vault")
        self._pidfd = os.pidfd_open(pid)
        self.pid, self.address = ready.pid, ready.address
        self._reader, self._writer = reader, writer

    def _send(self, message: local.ConfigureJob | local.ForgetJob | VaultRequest) -> None:
        if self._writer is None or self._writer.is_closing():
            return  # everything is sent again after a reconnect
        self._writer.write(encode_frame(message))

    def _resend_all(self) -> None:
        for number, job in self._forgotten.items():  # a new vault adopts the segments of all jobs
            self._send(local.ForgetJob(request=number, job=job))
        for message in self._job_configs.values():
            self._send(message)
        for request, _ in self._pending.values():
            self._send(request)
        # the vault sends findings only to a supervisor, which it recognizes by a first request
        if not self._job_configs:
            self._send(local.Statistics(request=next(self._numbers)))

    async def _read_until_closed(self) -> str:
        """Handle the vault's messages until its connection ends, and then the vault; return the reason."""
        assert self._reader is not None
        decoder: FrameDecoder[local.FromVault] = FrameDecoder(local.FromVault, local.MAX_FRAME_BYTES)
        reason = "its process ended"
        try:
            while data := await self._reader.read(1 << 16):
                for message in decoder.feed(data):
                    self._handle_message(message)
        except MalformedMessage as error:
            reason = f"it sent a malformed message: {error}"
        except OSError as error:
            reason = f"its connection broke: {error}"
        # make sure that the vault is gone: two must never own the same segments
        self._disconnect()
        if not await self._wait_exit(1.0):
            self._signal(signal.SIGKILL)
            await self._wait_exit(EXIT_TIMEOUT_S)
            reason += ", and its process was killed"
        status = self._reap()
        return reason if status is None else f"{reason} with status {status}"

    def _handle_message(self, message: local.FromVault) -> None:
        match message:
            case local.VaultFinding():
                self._on_finding(message.finding)
            case PeerConnectionLost():
                self._on_peer_lost(message)
            case local.StatisticsAnswer() | local.Protected() | local.Spilled() | local.RequestFailed():
                _, future = self._pending.get(message.request, (None, None))
                if future is not None and not future.done():
                    future.set_result(message)
                elif isinstance(message, local.RequestFailed):
                    log.warning("the vault refused a request: %s (%s)", message.message, message.code)
            case local.RequestDone():
                self._forgotten.pop(message.request, None)
            case _:
                raise MalformedMessage(f"{type(message).__name__} is not an answer to a supervisor")

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    def _signal(self, signum: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
        except ProcessLookupError:
            pass

    async def _wait_exit(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await wait_readable(self._pidfd)
        except TimeoutError:
            return False
        return True

    def _reap(self) -> int | None:
        """Reap the process. Returns its exit status if it was our child, else None."""
        os.close(self._pidfd)
        self._pidfd = -1
        child, self._child = self._child, None
        if child is None or child.pid != self.pid:
            return None
        return child.wait()


# Vault orders: the controller's requests to spill versions or to protect them by parity.
#
# The controller repeats an order until it receives the outcome, so nothing is remembered here. A repeated order is
# ignored while it runs; a completed one is sent to the vault again, which finds it done.

MAX_CONCURRENT_GROUPS = 4  # groups whose parity is made at once: each reads from all of its members

VaultOrder = SpillVersion | ProtectVersion
OrderKey = tuple[str, type[VaultOrder]]


@dataclass(eq=False)
class VaultOrderRunner:
    """Run the controller's orders on the event loop of one agent. ``report`` receives the outcome of each."""

    _node: str
    _vault: VaultManager
    _report: Callable[[AnyReport], None]
    _clock: Clock
    _running: dict[OrderKey, tuple[VaultOrder, asyncio.Task[None]]] = field(default_factory=dict)

    def submit(self, order: VaultOrder) -> None:
        """Run an order unless it runs or its job is not configured yet; it replaces an older one of its kind."""
        key = order.job, type(order)
        running, _ = self._running.get(key, (None, None))
        if running == order or not self._vault.is_configured(order.job):
            return
        self._cancel(key)
        self._running[key] = order, asyncio.ensure_future(self._execute(key, order))

    def cancel_job(self, job: str) -> None:
        """Cancel the orders of a job that is over."""
        for key in [key for key in self._running if key[0] == job]:
            self._cancel(key)

    def close(self) -> None:
        """Cancel all orders because the agent ends; the vault completes the requests it has."""
        for key in list(self._running):
            self._cancel(key)

    def _cancel(self, key: OrderKey) -> None:
        if key in self._running:
            self._running.pop(key)[1].cancel()

    async def _execute(self, key: OrderKey, order: VaultOrder) -> None:
        outcome = await (self._spill(order) if isinstance(order, SpillVersion) else self._protect(order))
        del self._running[key]  # not reached if cancelled: another order has the place
        if outcome.code:
            context = {"node": self._node, "job": order.job, "generation": order.generation}
            log.warning("%s of version %s: %s", type(order).__name__, order.version, outcome.message, extra=context)
        if outcome.code != StaleGeneration.code:  # a stale order is repeated in the newer generation's name
            self._report(outcome)

    async def _spill(self, order: SpillVersion) -> VersionSpilled:
        answer = await self._vault.request(
            local.Spill(
                request=0,
                job=order.job,
                generation=order.generation,
                version=order.version,
                url=order.url,
                writers=order.writers,
                keep_last=order.keep_last,
                earlier=order.earlier,
            )
        )
        now = self._clock.wall()
        outcome = partial(VersionSpilled, job=order.job, at=now, version=order.version, attempt=order.attempt)
        if isinstance(answer, local.RequestFailed):
            return outcome(code=answer.code, message=answer.message)
        assert isinstance(answer, local.Spilled)
        return outcome(
            url=f"{order.url}/{answer.folder}",
            bytes=answer.bytes,
            complete=answer.complete,
            removed=answer.removed,
            remaining=answer.remaining,
        )

    async def _protect(self, order: ProtectVersion) -> VersionProtected:
        """Protect all groups of the order, a few at a time; stop at the first that fails."""
        outcome = partial(VersionProtected, job=order.job, at=self._clock.wall(), version=order.version)
        made: dict[int, str] = {}
        for first in range(0, len(order.groups), MAX_CONCURRENT_GROUPS):
            some = order.groups[first : first + MAX_CONCURRENT_GROUPS]
            answers = await asyncio.gather(*(self._protect_one(order, group) for group in some))
            for group, answer in zip(some, answers, strict=True):
                if isinstance(answer, local.RequestFailed):
                    return outcome(members_digests=made, code=answer.code, message=answer.message)
                made[group.group] = answer.members_digest
        return outcome(members_digests=made)

    async def _protect_one(self, order: ProtectVersion, group: ParityGroup) -> local.Protected | local.RequestFailed:
        answer = await self._vault.request(
            local.Protect(
                request=0,
                job=order.job,
                generation=order.generation,
                version=order.version,
                group=group,
                keep=order.keep,
            )
        )
        assert isinstance(answer, local.Protected | local.RequestFailed)
        return answer
