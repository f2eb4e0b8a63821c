"""The two sides of the mutual challenge that begins every connection between vaults."""

from __future__ import annotations

import secrets

from agent.vault.jobs import JobBook, JobFacts
from everstep.channel import Channel
from everstep.errors import AuthenticationError, MalformedMessage
from everstep.wire.v1.transfer import NONCE_BYTES, Challenge, Greeting, Proof, Refused, prove, proves, refused_error
from everstep.wire.version import VAULTS_SPEAK, negotiate


def introduce(channel: Channel, facts: JobFacts, node: str, to: str, *, read_only: bool = False) -> None:
    """The client's side, as ``node``. Raises AuthenticationError where the peer does not prove to be ``to``."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    greeting = Greeting(protocols=VAULTS_SPEAK, job=facts.job, node=node, to=to, nonce=nonce, read_only=read_only)
    channel.send(greeting)
    challenge = channel.opening_answer()
    if isinstance(challenge, Refused):
        raise refused_error(challenge, channel.peer)
    if not isinstance(challenge, Challenge):
        raise MalformedMessage(f"{channel.peer} answered a greeting with {type(challenge).__name__}")
    negotiate([challenge.protocol], VAULTS_SPEAK)
    channel.send(Proof(mac=prove(facts.secret, "client", greeting, challenge)))
    answer = channel.opening_answer()
    if isinstance(answer, Refused):
        raise refused_error(answer, channel.peer)
    if not isinstance(answer, Proof) or not proves(answer.mac, facts.secret, "server", greeting, challenge):
        raise AuthenticationError(f"{channel.peer} does not know the secret of job {facts.job}, or is not {to}")


def admit(channel: Channel, book: JobBook, node: str) -> tuple[JobFacts, Greeting]:
    """The server's side, as ``node``: the job that the connection is for, and what the client said of itself.

    Raises NotFound for an unknown job, AuthenticationError for a stranger, VersionMismatch, MalformedMessage.
    """
    greeting = channel.opening()
    if not isinstance(greeting, Greeting):
        raise MalformedMessage(f"{channel.peer} began with {type(greeting).__name__}, not with a greeting")
    if greeting.to != node:
        raise AuthenticationError(f"{greeting.node} means to reach {greeting.to}, and this is {node}")
    challenge = Challenge(protocol=negotiate(greeting.protocols, VAULTS_SPEAK), nonce=secrets.token_bytes(NONCE_BYTES))
    facts = book.facts(greeting.job)
    channel.send(challenge)
    proof = channel.opening()
    if not isinstance(proof, Proof) or not proves(proof.mac, facts.secret, "client", greeting, challenge):
        raise AuthenticationError(f"{channel.peer} does not know the secret of job {greeting.job}")
    channel.send(Proof(mac=prove(facts.secret, "server", greeting, challenge)))
    return facts, greeting
