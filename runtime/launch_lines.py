"""The shell lines that start a command on several machines, by torchrun or by srun."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence

from hap.errors import InputError

NOTICE_S = 120
"""Seconds before its time limit at which Slurm sends SIGTERM to a job of :func:`batch_script`."""

ENDED = 128 + signal.SIGTERM
"""Exit code of a run that SIGTERM ended, after its checkpoint."""

_CONF = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
"""Of torch's rendezvous: seconds to wait for further machines, and until a lost one is left out."""


def launch_lines(command: list[str], cluster_nodes: Sequence[tuple[str, int]]) -> str:
    """Return shell lines that run a command on several machines, ``(host name, devices)`` each.

    Ranks are numbered machine by machine in the given order, which must be the order of the
    devices in the cluster file. Machines may differ in their number of devices. torchrun: the
    static rendezvous sums the counts of earlier machines, so every machine needs its own line with
    its own count (and TORCH_ELASTIC_WORKER_IDENTICAL unset). srun: --ntasks-per-node is one number
    for all, and --nodelist is sorted, so a host file with a line per rank sets count and order.

    Raises:
        InputError: No machine, no command, or a machine without devices.
    """
    if not command or not cluster_nodes or any(count < 1 for _, count in cluster_nodes):
        what = f"cannot launch {command!r} on {list(cluster_nodes)!r}"
        raise InputError(what, hint="give a command and at least one device on each machine")
    program, head = shlex.join(command), shlex.quote(cluster_nodes[0][0])
    lines = ["# torchrun: each line on the machine that it names"]
    for node, (host, count) in enumerate(cluster_nodes):
        place = f"--nnodes={len(cluster_nodes)} --node-rank={node} --nproc-per-node={count}"
        lines += [
            f"# on {host}",
            f"torchrun {place} --master-addr={head} --master-port=29500 --no-python -- {program}",
        ]
    return "\n".join(
        [
            *lines,
            "",
            "# srun: inside an allocation that owns these machines and their GPUs",
            *_srun(command, cluster_nodes),
        ]
    )


def _srun(command: list[str], cluster_nodes: Sequence[tuple[str, int]]) -> list[str]:
    program, head = shlex.join(command), shlex.quote(cluster_nodes[0][0])
    hosts = shlex.join(host for host, count in cluster_nodes for _ in range(count))
    sizes = f"--nodes={len(cluster_nodes)} --ntasks={sum(count for _, count in cluster_nodes)}"
    return [
        f"printf '%s\\n' {hosts} > hap.hosts",
        f"MASTER_ADDR={head} MASTER_PORT=29500 SLURM_HOSTFILE=hap.hosts \\",
        f"  srun --distribution=arbitrary {sizes} --kill-on-bad-exit=1 {program}",
    ]


def batch_script(command: list[str], cluster_nodes: Sequence[tuple[str, int]]) -> str:
    """Return a batch script for Slurm that is queued again until the run has ended.

    Slurm sends SIGTERM to the ranks before the time limit and on preemption; they save and exit with
    143, and the script then puts itself into the queue again.

    Args:
        command: resumes by itself when it is started again.
    """
    hosts = ",".join(host for host, _ in cluster_nodes)
    tasks = sum(count for _, count in cluster_nodes)
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --nodes={len(cluster_nodes)} --nodelist={hosts} --ntasks={tasks}",
            f"#SBATCH --requeue --open-mode=append --signal=TERM@{NOTICE_S}",
            *_srun(command, cluster_nodes),
            "code=$?",
            f'if [ $code -eq {ENDED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            "exit $code",
        ]
    )


def elastic_lines(
    command: list[str], cluster_nodes: Sequence[tuple[str, int]], max_restarts: int
) -> str:
    """Return a torchrun line for each machine, with which a run outlives the loss of machines.

    The first machine serves the rendezvous, and must stay.

    Args:
        max_restarts: how often torchrun starts the ranks again.
    """
    program, head = shlex.join(command), shlex.quote(cluster_nodes[0][0])
    lines = ["# each line on the machine that it names; the first one must stay"]
    for number, (host, count) in enumerate(cluster_nodes):
        conf = f"{_CONF},is_host={int(number == 0)}"
        place = f"--nnodes=1:{len(cluster_nodes)} --nproc-per-node={count}"
        lines += [
            f"# on {host}",
            f"HAP_NODE={shlex.quote(host)} TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun {place} "
            f"--max-restarts={max_restarts} --rdzv-backend=c10d --rdzv-endpoint={head}:29400 "
            f"--rdzv-id=hap --rdzv-conf={conf} --local-addr={shlex.quote(host)} --no-python -- "
            f"{program}",
        ]
    return "\n".join(lines)
