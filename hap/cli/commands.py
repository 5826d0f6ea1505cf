"""The command line: ``hap plan``, ``verify``, ``run``, ``export``, ``import``, ``show``, ``profile``,
``simulate``, ``testbed``, ``rules``.

Exit codes: 0; 1 the program does not compute what one device computes, or a rank failed; 2 bad input; 3 nothing
fits in memory; 4 planning was stopped, and wrote its best plan so far; 5 it was stopped before there was one; 75,
130, 141 and 143 are in docs/troubleshooting.md. Heavy modules come through the lazy face ``hap``, so that ``hap
--help`` is quick. Commands with a file of their own, such as ``hap report``, are added by ``_command``.
"""

from __future__ import annotations

import functools
import json
import shlex
import time
from collections.abc import Callable
from typing import Any

import click

import hap
from hap import cli
from hap.cli import explain_command, init_command, report_command, simulate_command, what_if_command
from hap.cli.answers import Seconds, Seed, answered
from hap.cli.own_process import OWN_PROCESS, gc_paused_to_end
from hap.errors import InputError, VerifyError
from hap.files import check_output
from hap.ir.half_gradients import ROUNDINGS
from hap.launchers import launcher, refuse_mpirun, started_as


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False,
    callback=lambda context, option, asked: _versions(context) if asked else None,
    help="Show the versions of hap, torch and the backends, and exit.",
)  # fmt: skip
def main() -> None:
    """Plan, verify and run the training of a PyTorch model on a heterogeneous cluster."""


def console() -> None:
    """Run the command of ``sys.argv`` in this process, which ends with it."""
    main(prog_name="hap", obj=OWN_PROCESS)


def _versions(context: click.Context) -> None:
    click.echo(cli.versions.versions())
    context.exit()


def _command(
    function: Callable[..., None], group: click.Group = main, name: str | None = None
) -> click.Command:
    """Register a command that answers errors with one paragraph."""
    told = answered(function)
    asks = any(isinstance(p, click.Argument) for p in getattr(told, "__click_params__", ()))
    return group.command(name, no_args_is_help=asks)(told)


@_command
@click.argument("model")
@click.option("--cluster", required=True, help="yaml file, hostfile, `local` or `local:4`.")
@click.option("-o", "--output", default="plan.json", show_default=True, help="The plan file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the screen.")
@click.option("--allow-idle", is_flag=True, help="Accept a batch with fewer rows than devices.")
@click.option(
    "--mesh/--no-mesh",
    default=None,
    help="Plan over two mesh axes, between nodes and inside them, or over one.  [default: better]",
)
@click.option("--compare", is_flag=True, help="Also plan every baseline, and show all of them.")
@click.option(
    "--all-devices", is_flag=True, help="Keep all devices, even those that slow the step down."
)
@click.option(
    "--engine",
    default="exact",
    show_default=True,
    metavar="[exact|astar|cpsat|bounded]",
    help="The search engine. exact: elimination; graphs that are too entangled for it go to "
    "bounded. astar: the search of the HAP paper; it may stop early, and then prints its largest "
    "distance from the optimum. cpsat: a general solver, to check the other two. bounded: exact "
    "if its tables fit, else a short astar.",
)
@click.option(
    "--recompute",
    type=click.Choice(["none", "cheap", "blocks"]),
    help="Activations that the backward recomputes.  [default: what is fastest within the memory]",
)
@click.option("--accumulate/--no-accumulate", default=True, help="Microbatches if memory is short.")
@click.option(
    "--prove", type=click.IntRange(min=0), default=0, metavar="N",
    help="Spend N more searches on a better lower bound of the step.",
)  # fmt: skip
@click.option(
    "--strict-rules",
    is_flag=True,
    help="Refuse operators without a rule, instead of discovering their rules by running them, "
    "or replicating them.",
)
@click.option(
    "--pin", "pins", multiple=True, metavar="NAME=PLACEMENT",
    help="Force the placement of a tensor, such as layers.3.weight=S0 (sharded in dim 0) or =R.",
)  # fmt: skip
@click.option("--keep", multiple=True, metavar="DEVICE", help="Do not leave out this device.")
@click.option(
    "--allow", multiple=True, type=click.Choice([*ROUNDINGS]), metavar="ROUNDING",
    help=f"Round gradients if that is faster; training then differs from that on one device. "
    f"[{'|'.join(ROUNDINGS)}]",
)  # fmt: skip
@click.option(
    "--stages", is_flag=True, help="Also plan pipelines of stages, and take one if it is faster."
)
@click.option(
    "--time-limit", type=Seconds(), metavar="SECONDS",
    help="End the search after this time, with the best plan so far; Ctrl-C does so at once.",
)  # fmt: skip
@click.argument("extra", nargs=-1)
@gc_paused_to_end
def plan(
    model: str, cluster: str, output: str, as_json: bool, recompute: str | None,
    time_limit: float | None, extra: tuple[str, ...], **options: Any,
) -> None:  # fmt: skip
    """Plan MODEL, a file `model.py` or `model.py:function`.

    Arguments after `--` are sys.argv of the model file. The plan keeps them for verify and run.

    Exit code 4: the search was stopped, and the plan is the best one so far; 5: there was none.
    """
    path, arguments = model.rpartition(":")[0] or model, shlex.join(extra)
    check_output(output, path, model, cluster)
    start = time.perf_counter()
    again = "" if recompute == "none" else recompute
    chosen = hap.PlanOptions(recompute=again, **options)
    with started_as([path, *extra]), cli.stoppable.planning_progress(time_limit) as progress:
        made = cli.stoppable.planned(
            lambda: hap.api.plan_file(
                model, cluster, options=chosen, progress=progress, arguments=arguments
            ),
            time_limit,
        )
    made.save(output)
    _note(f"planned in {time.perf_counter() - start:.1f} s, written to {output}")
    if as_json:
        click.echo(json.dumps(cli.plan_screen.plan_json(made), indent=1, allow_nan=False))
    else:
        cli.terminal.emit(cli.plan_screen.plan_screen(made, output, compare=options["compare"]))
    if made.stopped:
        _note(f"the search was not finished ({made.stopped}): the plan is the best one so far")
        raise SystemExit(4)
    restricted = any(options[o] for o in ("stages", "mesh", "pins", "keep", "all_devices"))
    if not (as_json or restricted) and (
        hint := cli.pipeline_hint.pipeline_hint(made, hap.load_cluster(cluster))
    ):
        _note(hint)


_backend = click.option(
    "--backend",
    type=click.Choice(["eager", "inductor", "cudagraphs", "inductor-cudagraphs"]),
    default="eager",
    show_default=True,
    help="inductor: compile what each rank runs between collectives, in the first step. "
    "cudagraphs: launch each rank's kernels as CUDA graphs. inductor-cudagraphs: both.",
)


@_command
@click.argument("plan_file", metavar="PLAN")
@click.option("--processes", is_flag=True, help="Run each rank in a process, not in a thread.")
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    show_default=True,
    help="Precision of the comparison; float64 distinguishes rounding from errors.",
)
@click.option("--seed", type=Seed(), default=0, help="Seed of weights and data.", show_default=True)
@_backend
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device of the ranks and of the reference. Ranks share GPUs if there are fewer.",
)
def verify(
    plan_file: str, processes: bool, dtype: str, seed: int, backend: str, device: str
) -> None:
    """Compare PLAN with one device: same loss, same gradients?"""
    made = hap.Plan.load(plan_file)
    with started_as(made.source.argv):
        model_file = hap.api.model_file_of(made)
        verdict = hap.api.verify(
            made, model_file, processes=processes, dtype=dtype, seed=seed, backend=backend,
            device=device,
        )  # fmt: skip
    cli.terminal.emit(cli.verdict_screen.verdict_table(verdict))
    if not verdict.ok:
        raise VerifyError(
            f"{verdict.first_bad} is the first tensor that differs from one device's",
            hint="hap show lists what computes it; please report this with the plan file",
        )
    click.echo(cli.verdict_screen.agreement(verdict))
    if made.recipe.gradients and dtype == "float64":
        click.echo(f"compared without the rounding of gradients ({made.recipe.gradients}) of a run")


@_command
@click.argument("plan_file", metavar="PLAN")
@report_command.log_option
@click.option("--nproc", type=click.IntRange(min=1), help="Run this many ranks on this machine.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=10, show_default=True,
    help="Total number of steps, including those before a resume.",
)  # fmt: skip
@_backend
@click.option("--checkpoint", metavar="DIR", help="Save checkpoints into this folder.")
@click.option(
    "--every", type=click.IntRange(min=1), default=100, show_default=True,
    help="Steps between two checkpoints; the last step is saved as well.",
)  # fmt: skip
@click.option(
    "--keep", type=click.IntRange(min=1), default=3, show_default=True,
    help="Number of newest checkpoints to keep.",
)  # fmt: skip
@click.option(
    "--resume", default="no", show_default=True, metavar="[auto|auto:DIR|no|DIR/step-N]",
    help="auto: continue from the newest complete checkpoint, if there is one. auto:DIR: from the newest in DIR, "
    "unless the folder of --checkpoint has a later one. DIR/step-N: from this one.",
)  # fmt: skip
@click.option(
    "--max-restarts", type=click.IntRange(min=0), default=0, show_default=True,
    help="After a failure, start all ranks again from the newest checkpoint, at most this often; on several "
    "machines only with --elastic.",
)  # fmt: skip
@click.option(
    "--elastic", is_flag=True, help="Print torchrun lines for a run that survives failed machines."
)
@click.option("--adapt", is_flag=True, help="Plan anew when a device becomes slower or faster.")
@click.argument("extra", nargs=-1)
def run(
    plan_file: str, log: str, nproc: int | None, steps: int, backend: str, checkpoint: str | None,
    every: int, keep: int, resume: str, max_restarts: int, elastic: bool, adapt: bool,
    extra: tuple[str, ...],
) -> None:  # fmt: skip
    """Train the model of PLAN, or print the lines that start the training.

    Arguments after `--` replace those that the plan keeps for the model file. A plan for one machine runs here, a process
    per rank: on GPUs under NCCL if there is one for each rank, else on the CPU under gloo. For a
    plan on several machines this prints the lines to start there; --nproc runs all ranks here.
    Under torchrun or srun this process is one rank. Without --checkpoint no weights are saved.
    """
    report_command.check_log(log, plan_file)
    job = cli.worker.RunJob(
        path=plan_file, steps=steps, extra=extra, backend=backend, log=log,
        max_restarts=max_restarts, elastic=elastic, adapt=adapt,
        checkpoints=cli.checkpoint_commands.checkpoints(checkpoint, every, keep, resume),
    )  # fmt: skip
    if (max_restarts or elastic or adapt) and job.checkpoints is None:
        raise InputError(
            "--max-restarts, --elastic and --adapt without --checkpoint",
            hint="give --checkpoint DIR: ranks that are started again resume from there",
        )
    if elastic and job.checkpoints and not job.checkpoints.goes_on:
        raise InputError("--elastic without --resume auto", hint="give --resume auto as well")
    if nproc is None and launcher():
        (cli.elastic_run.run_elastic if elastic else cli.worker.run_as_rank)(job)
        return
    if nproc is None:
        refuse_mpirun()
    made = hap.Plan.load(plan_file)
    if nproc is None and (elastic or len(made.cluster.nodes) > 1):
        if max_restarts and not elastic:
            raise InputError(
                f"--max-restarts without --elastic for a plan on {len(made.cluster.nodes)} machines",
                hint="add --elastic: torchrun then starts lost ranks again",
            )
        click.echo(cli.worker.machine_lines(made, job))
        return
    with cli.terminal.training_progress(steps) as on_step:
        cli.local_run.run_here(job, nproc or made.world_size, on_step)


@_command
@click.argument("checkpoint", metavar="DIR")
@click.option("--to", required=True, metavar="FOLDER", help="A new folder.")
def export(checkpoint: str, to: str) -> None:
    """Write the weights of DIR's newest checkpoint as ordinary safetensors.

    DIR may also be one checkpoint, DIR/step-N. The tensors are whole and have the model's names.
    """
    click.echo(cli.checkpoint_commands.export_weights(checkpoint, to))


@functools.partial(_command, name="import")
@click.argument("weights")
@click.option("--to", required=True, metavar="DIR", help="A folder without checkpoints.")
def import_(weights: str, to: str) -> None:
    """Make a checkpoint of WEIGHTS, from which `hap run --resume auto` starts.

    WEIGHTS is a folder of safetensors, as save_pretrained writes it, a safetensors file, or a file
    that torch.save wrote of a state_dict.
    """
    click.echo(cli.checkpoint_commands.import_weights(weights, to))


@_command
@click.option(
    "-o",
    "--output",
    default="cluster.yaml",
    show_default=True,
    help="The cluster file; samples are stored in the same folder.",
)
@click.option("--nproc", type=click.IntRange(min=1), help="Start this many ranks on this machine.")
@click.option(
    "--testbed", metavar="CLUSTER", help="Emulate this cluster, and measure the emulation."
)
@click.option("--nodes", metavar="A,A,B,..", help="Machine of each rank.  [default: its host name]")
@click.option("--quick", is_flag=True, help="Fewer operators, sizes and repeats.")
@click.option("--resume", is_flag=True, help="Continue from the stored samples.")
def profile(
    output: str, nproc: int | None, testbed: str | None, nodes: str | None, quick: bool,
    resume: bool,
) -> None:  # fmt: skip
    """Measure devices and links, and write a cluster file.

    Under torchrun or srun this process is one rank; --nproc starts ranks here, and --testbed on
    emulated hosts.
    """
    if testbed and (nproc or nodes):
        raise InputError(
            "--testbed takes the ranks from its cluster file", hint="leave out --nproc and --nodes"
        )
    check_output(output, testbed)
    names = tuple(nodes.split(",")) if nodes else ()
    made = cli.profiling.Settings(output=output, nodes=names, quick=quick, resume=resume)
    start = time.perf_counter()
    found: cli.profiling.Profile | None
    with cli.terminal.profiling_progress() as progress:
        if testbed:
            found = cli.testbed_command.profile(testbed, made, progress)
        elif nproc:
            found = cli.profiling.profile(made, nproc, progress=progress)
        elif launcher():
            found = cli.profiling.run_as_rank(made, progress)
        else:
            hint = "give --nproc or --testbed, or start with torchrun"
            raise InputError("no ranks to measure", hint=hint)
    if found is not None:
        cli.terminal.emit(cli.profile_screen.profile_screen(found, output))
        _note(f"measured in {time.perf_counter() - start:.0f} s, written to {output}")


@_command
@click.argument("plan_file", metavar="PLAN")
@click.option("--rank", type=click.IntRange(min=0), help="Show the shapes on this rank.")
@click.option("--code", is_flag=True, help="Show the Python that the rank (or rank 0) runs.")
@click.option("--forward", "side", flag_value="fwd", help="The forward's instructions only.")
@click.option("--backward", "side", flag_value="bwd", help="The backward's instructions only.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan's figures as JSON instead.")
def show(plan_file: str, rank: int | None, code: bool, side: str | None, as_json: bool) -> None:
    """Show the program of PLAN, one instruction to a line."""
    made = hap.Plan.load(plan_file)
    if rank is not None and rank >= made.world_size:
        raise InputError(f"there is no rank {rank}", hint=f"ranks are 0..{made.world_size - 1}")
    if as_json:
        figures = cli.report.figures_json.show_json(made)
        click.echo(json.dumps(figures, indent=1, allow_nan=False))
        return
    if code:
        click.echo(hap.api.code(made, rank or 0))
        return
    for line in cli.plan_screen.program_lines(made, rank=rank, side=side or ""):
        click.echo(line)


_command(explain_command.explain)
_command(init_command.init)
_command(report_command.report)
_command(simulate_command.simulate)
_command(what_if_command.what_if, name="what-if")


@main.group(no_args_is_help=True)
def rules() -> None:
    """List, show and discover the rules by which operators are split."""


@functools.partial(_command, group=rules, name="list")
def list_rules() -> None:
    """List the operators that have a rule."""
    click.echo("\n".join(cli.rules_screen.known()))


@functools.partial(_command, group=rules, name="show")
@click.argument("op")
@click.option("--model", help="Take the calls of this model file.")
def show_rule(op: str, model: str | None) -> None:
    """Show the rows (sharding strategies) of OP, such as aten.mm.default, on small sizes."""
    click.echo(cli.rules_screen.rows_text(op, model))


@functools.partial(_command, group=rules, name="discover")
@click.argument("op")
@click.option("--model", help="Take the calls of this model file; it may define OP itself.")
def discover_rule(op: str, model: str | None) -> None:
    """Find the rows (sharding strategies) of OP by running it on split inputs.

    Each input is replicated, cut along each dim, or a sum of terms. A row is kept if it gave the
    whole result for all tried sizes, values and cuts.
    """
    click.echo(cli.rules_screen.discovered_text(op, model))


@_command
@click.argument("cluster", required=False)
@click.option("--cores", type=float, help="Cores for all ranks together.  [default: all]")
@click.option(
    "--links",
    default="scaled",
    show_default=True,
    metavar="[scaled|as-written|unlimited]",
    help="Link rates: scaled like the speeds, as the file has them, or no limit (needs no root).",
)
@click.option("--clean", is_flag=True, help="Remove the leftovers of killed testbeds, and stop.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def testbed(
    cluster: str | None, cores: float | None, links: str, clean: bool, command: tuple[str, ...]
) -> None:
    """Run the command after `--` on emulated hosts, one for each device of CLUSTER.

    Speeds, links and memory are limited as the file says, all slower by one factor. Without a
    command, show the hosts.
    """
    if clean:
        click.echo("\n".join(cli.testbed_command.clean()) or "nothing was left behind")
    elif cluster is None:
        raise InputError("no cluster", hint="give a cluster file, then -- and a command")
    else:
        raise SystemExit(cli.testbed_command.emulate(cluster, cores, links, command))


def _note(text: str) -> None:
    """Print to stderr text that varies between runs; equal inputs give equal stdout."""
    click.echo(text, err=True)
