"""What the bench's agents say. Real messages of the contract; the beat, which is said most, from a filled-in form."""

from __future__ import annotations

import time

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep.wire.v1.agent import (
    UPGRADE,
    Domain,
    FrameKind,
    Gpu,
    GpuGauges,
    Heartbeat,
    NumberedReport,
    Register,
    Reports,
    encode_frame,
)
from everstep.wire.v1.training import AnyReport, JobSpec, LauncherJoined, RankLost, RankProgress, Resumed

RANKS = 8
"""Per node: its GPUs, and the ranks of its job."""
NODES_OF_A_JOB = 1250
INCARNATION = 1
STEP_S = 0.5


def node_name(index: int) -> str:
    return f"n{index:06d}"


def job_of(index: int, jobs: int) -> str:
    """The job of a node; empty for one that has none."""
    number = index // NODES_OF_A_JOB
    return f"job-{number:03d}" if number < jobs else ""


def upgrade(index: int, token: str) -> bytes:
    """The request that opens a session."""
    return (
        f"GET /v1/agents/{node_name(index)}/session HTTP/1.1\r\nHost: controller\r\nConnection: Upgrade\r\n"
        f"Upgrade: {UPGRADE}\r\nAuthorization: Bearer {token}\r\n\r\n"
    ).encode()


def register(index: int) -> bytes:
    """A node of eight GPUs, sixteen nodes to a rack."""
    gpus = tuple(
        Gpu(
            index=number,
            uuid=f"GPU-{index:08x}-{number:04x}-4a6b-9f21-{index:012x}",
            name="NVIDIA H200",
            pci_bus_id=f"00000000:{0x19 + number * 0x11:02X}:00.0",
            memory_bytes=150_754_820_096,
            serial=f"165{index:07d}{number}",
        )
        for number in range(RANKS)
    )
    message = Register(
        protocols=(1,),
        node=node_name(index),
        incarnation=INCARNATION,
        agent_version="0.1.0",
        vault=f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}:7702",
        boot_id=f"{index:08x}-0c5e-4f1b-8a53-9d1f2a3b4c5d",
        driver_version="570.133.20",
        domain=Domain(rack=f"rack-{index // 16:05d}", switch=f"leaf-{index // 64:04d}", power=f"pdu-{index // 32:05d}"),
        gpus=gpus,
    )
    return encode_frame(FrameKind.REGISTER, msgspec.json.encode(message))


def picture() -> bytes:
    """A beat with the whole picture: all is well."""
    beat = Heartbeat(incarnation=INCARNATION, seq=1, sent_at=0.0, findings=())
    return encode_frame(FrameKind.HEARTBEAT, msgspec.json.encode(beat))


def gauges() -> str:
    """The field of a beat that has the gauges of eight busy GPUs."""
    made = tuple(
        GpuGauges(
            index=number,
            temperature_c=61 + number,
            memory_temperature_c=72,
            power_w=644.5 - number,
            power_limit_w=700.0,
            utilization=0.98,
            memory_used_bytes=(112 << 30) + number,
            sm_clock_mhz=1755,
            memory_clock_mhz=2619,
            throttled_by=("power_cap",),
            ecc_corrected=0,
            ecc_uncorrected=0,
        )
        for number in range(RANKS)
    )
    return f'"gpu_gauges":{msgspec.json.encode(made).decode()},'


GAUGES = gauges()


class BeatForm:
    """A heartbeat of a node whose ranks are in ``generation`` of ``job``, but for its numbers.

    ``fill`` makes a frame of it in a twentieth of the time that building and encoding the message takes; the first one
    is read back by the contract's decoder.
    """

    def __init__(self, job: str, generation: int, first_rank: int) -> None:
        ranks = ",".join(
            f'["{job}",{generation},{first_rank + local},%(step)d,{STEP_S},2.3125]' for local in range(RANKS) if job
        )
        self._text = (
            f'{{"incarnation":{INCARNATION},"seq":%(seq)d,"sent_at":%(at).6f,%(more)s"ranks":[{ranks}],'
            '"directives_through":%(directives)d}'
        )
        read = msgspec.json.decode(self._body(7, 1.5, 3, 5, GAUGES), type=Heartbeat)
        assert len(read.gpu_gauges) == RANKS
        assert len(read.ranks) == (RANKS if job else 0), "the form is not a heartbeat"
        assert not job or read.ranks[-1] == RankProgress(
            job=job, generation=generation, rank=first_rank + RANKS - 1, step=3, step_s=STEP_S, loss=2.3125
        )

    def _body(self, seq: int, at: float, step: int, directives: int, more: str = "") -> bytes:
        values = {"seq": seq, "at": at, "step": step, "directives": directives, "more": more}
        return (self._text % values).encode()

    def fill(self, seq: int, at: float, directives: int, *, asks: bool, shows: bool, measures: bool) -> bytes:
        """The frame of one beat; ``asks``: whether it is to be answered, ``shows``: with the picture (all is well),
        ``measures``: with the GPUs' gauges. Ranks step all the time."""
        more = ('"findings":[],' if shows else "") + (GAUGES if measures else "")
        body = self._body(seq, at, int(at / STEP_S) & 0xFFFFFF, directives, more)
        return encode_frame(FrameKind.HEARTBEAT if asks else FrameKind.ONE_WAY_HEARTBEAT, body)


def reports(first: int, bodies: list[AnyReport]) -> bytes:
    """Reports from number ``first`` on."""
    numbered = tuple(NumberedReport(number=first + place, body=body) for place, body in enumerate(bodies))
    return encode_frame(FrameKind.REPORTS, msgspec.json.encode(Reports(incarnation=INCARNATION, reports=numbered)))


def launcher_joined(job: str, nodes: int, store_port: int, launcher: int) -> LauncherJoined:
    """A launcher, which began at ``launcher``, offers its node; the job runs with a third of them too."""
    spec = JobSpec(job=job, min_nodes=max(1, nodes // 3), max_nodes=nodes, nproc_per_node=RANKS, join_wait_s=600.0)
    return LauncherJoined(job=job, at=time.time(), spec=spec, launcher=launcher, store=f"127.0.0.1:{store_port}")


def resumed(job: str, generation: int, first_rank: int) -> list[AnyReport]:
    """All ranks of a node have stepped."""
    phases = {"abort": 0.01, "teardown": 0.02, "rendezvous": 0.05, "restore": 0.2, "first_step": STEP_S}
    return [
        Resumed(job=job, at=time.time(), generation=generation, rank=rank, step=1, restored=None, phases_s=phases)
        for rank in range(first_rank, first_rank + RANKS)
    ]


def rank_lost(job: str, generation: int, rank: int) -> RankLost:
    return RankLost(
        job=job,
        at=time.time(),
        generation=generation,
        rank=rank,
        local_rank=rank % RANKS,
        detail="killed by the bench",
        signal=9,
    )


def xid(number: int, severity: Severity, gpu: int = 0) -> Finding:
    """A line of the kernel log about one GPU."""
    action = Action.RESET_GPU if severity is Severity.CRITICAL else Action.NONE
    return Finding(
        kind=FindingKind.GPU_XID,
        subject=f"GPU-{gpu}",
        severity=severity,
        message=f"Xid (PCI:0000:19:00): {number}, pid='<unknown>', name=<unknown>",
        action=action,
        rule=f"xid.{number}",
        xid=number,
        since=time.time(),
    )
