"""Messages with descriptors between a launcher's processes."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from everstep.errors import MalformedMessage
from everstep_trainer.launch.forking.fork_messages import ControlChannel, make_socket_pair


class Word(msgspec.Struct, tag=True):
    text: str


def test_descriptors_arrive_with_their_message() -> None:
    ours, theirs = make_socket_pair()
    sender, receiver = ControlChannel[Word](theirs, Word), ControlChannel[Word](ours, Word)
    readable, writable = os.pipe()
    sender.send(Word("here"), (writable,))
    os.close(writable)
    message, (arrived,) = receiver.receive() or pytest.fail("nothing came")
    os.write(arrived, b"x")
    assert (message, os.read(readable, 1)) == (Word("here"), b"x")
    for number in (readable, arrived):
        os.close(number)
    sender.close()
    assert receiver.receive() is None
    receiver.close()


def test_descriptors_of_a_malformed_message_are_closed() -> None:
    ours, theirs = make_socket_pair()
    channel = ControlChannel[Word](ours, Word)
    readable, writable = os.pipe()
    socket.send_fds(theirs, [b"\xc1"], [writable])
    os.close(writable)
    with pytest.raises(MalformedMessage):
        channel.receive()
    assert os.read(readable, 1) == b"", "the writing end must be closed"
    os.close(readable)
    theirs.close()
    channel.close()
