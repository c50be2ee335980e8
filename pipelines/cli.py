"""The `tap` command. Each command imports what it needs when it runs, so that `tap --help` is fast."""

import math
import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pipelines.command_line import App, Dataset
from pipelines.orchestration import process

PARAMS = Path("params.yaml")


sys.path.insert(0, "")  # an environment's module may be in the project's folder, as with `python -m`
app = App(
    no_args_is_help=True,
    help="""TAP, the Trajectory Autoencoding Planner: learn to act from a file of recorded trajectories.

    `tap run` does everything that params.yaml lists: it gets and checks the data, trains, evaluates in simulation, writes the
    report, and promotes the best policy. It skips what is up to date.

    ```
    tap run                        # then open data/report/index.html
    tap run --dataset ID --seed 0  # one dataset and seed of params.yaml
    tap datasets | grep door       # datasets to add to params.yaml
    tap validate ID                # the contents of a dataset, and what looks wrong
    tap export-dataset ID --to minari  # its episodes as a Minari dataset
    tap models                     # the registered policies
    tap promote ID --rollback      # back to the previous champion
    tap serve ID                   # the champion over HTTP
    tap export ID@champion DIR     # the champion as a folder that runs without this project
    tap sync                       # deliver the runs that MLflow missed
    tap ui                         # serve MLflow's and Prefect's pages
    tap worker cpu                 # on each machine of a team
    tap sweep                      # what `tap run` does, on the workers
    tap reap                       # return the runs of lost workers to their pool
    ```
    """,
)

Remote = Annotated[
    str | None,
    typer.Option(help="The DVC remote that shares results: a folder or a URL. [default: DVC's default]", envvar="TAP_REMOTE"),
]


def show(table: Table) -> None:
    """Print a table, on a terminal as wide as the terminal."""
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@app.command()
def run(
    dataset: Annotated[list[str] | None, typer.Option(help="Only this dataset; may be repeated. [default: all listed]")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only this seed; may be repeated. [default: all listed]")] = None,
    promote: Annotated[bool, typer.Option(help="Make the best policy champion if it beats the current one.")] = True,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", min=1, help="Stages at a time, sharing the cores. [default: 1 with a GPU, else the cores, up to 4]"
        ),
    ] = None,
) -> None:
    """Bring everything up to date: fetch, train, evaluate, report, promote.

    Ctrl-C is safe: the next run resumes from the last checkpoint.

    Example: `tap run --dataset hopper-medium-replay --seed 0 --seed 1`
    """
    from pipelines.orchestration import flow

    flow.run(dataset or None, seed or None, promote, jobs)


@app.command()
def datasets() -> None:
    """List the known datasets, with the returns that score 0 and 100.

    Example: `tap datasets | grep door`
    """
    from tap.data.catalog import known_datasets

    table = Table("dataset", "source", "environment", "steps", "random", "expert", box=box.SIMPLE_HEAD)
    for info in known_datasets().values():
        reference = [f"{score:.1f}" for score in (info.reference_min_score, info.reference_max_score) if score is not None]
        table.add_row(info.id, info.source, info.environment, str(info.max_episode_steps), *reference)
    show(table)


@app.command()
def validate(
    dataset: Dataset,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Also write a page to look at the data before training: returns, each dimension, what deserves attention, "
            "what training does with it. It is one file that needs no network; open it in a browser.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check a dataset's file and environment as the stage fetch does, and describe it.

    Example: `tap validate hopper-medium-replay --html hopper.html`
    """
    import numpy as np

    from pipelines.stages.fetch import recording_of
    from tap.data import validation
    from tap.data.catalog import lookup
    from tap.data.profile import profile
    from tap.settings import load_params

    params = load_params(PARAMS, dataset)
    with recording_of(lookup(dataset, params.fetch), params.fetch) as recording:
        validated = validation.validate(recording)
        if html is not None:
            from tap.reporting.data_page import write_data_page

            boundaries, rng = recording.boundaries, np.random.default_rng(0)
            profiled = profile(recording.chunks(), boundaries.lengths, recording.timestamps(), rng)
            write_data_page(html, validated, profiled, boundaries, params)
    report = validated.as_json()
    counts, warnings = report.pop("return_histogram")["counts"], report.pop("warnings")
    if not validated.has_rewards:
        del report["return"]
    del report["non_finite"]  # would have been an error
    report["boundaries"] = report["boundaries"]["how"]
    table = Table(box=None, show_header=False)
    for key, value in report.items():
        table.add_row(key.replace("_", " "), _in_words(value))
    if validated.has_rewards:
        table.add_row("returns, low to high", "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * count / max(counts))] for count in counts))
    show(table)
    print(*(f"note: {warning}" for warning in warnings), sep="\n")
    if html is not None:
        print(f"page: {html}")


def _in_words(value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{name} {_in_words(part)}" for name, part in value.items())
        case list() if any(each is not None for each in value):
            return ", ".join(map(_in_words, value))
        case list() | None:
            return "none"
        case float():
            return f"{value:.6g}"
    return str(value)


@app.command()
def export_dataset(
    dataset: Dataset, to: Annotated[Literal["minari"], typer.Option(help="The layout.", show_default=False)]
) -> None:
    """Write a dataset's episodes, as training gets them, in another project's layout: for Minari into its cache.

    Example: `tap export-dataset hopper-medium-replay --to minari`
    """
    from pipelines.stages.fetch import recording_of
    from tap.data.catalog import lookup
    from tap.data.minari_export import export_to_minari
    from tap.settings import Runtime, load_params

    fetch = load_params(PARAMS, dataset).fetch
    with recording_of(lookup(dataset, fetch), fetch) as recording:
        name = export_to_minari(recording, Runtime().minari_datasets_path.expanduser())
    print(f"{name} is in Minari's cache: minari.load_dataset({name!r}), or `fetch: {{source: minari, path: {name}}}`")


@app.command()
def promote(
    dataset: Dataset,
    rollback: Annotated[bool, typer.Option("--rollback", help="Move the alias back to the previous champion.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Only list the decisions so far.")] = False,
) -> None:
    """Make the best policy, of whichever method, champion if its recipe beats the current champion's over seeds and episodes.

    Example: `tap promote hopper-medium-replay --rollback`
    """
    from pipelines import promote as promotion

    if history:
        table = Table("time", "by", "version", "decision", "previous champion", "reason", box=box.SIMPLE_HEAD)
        for made in promotion.history(dataset):
            table.add_row(*(str(made[key] or "") for key in ("time", "by", "version", "outcome", "champion", "reason")))
        show(table)
        return
    decision = promotion.rollback(dataset) if rollback else promotion.promote(dataset, PARAMS)
    print(f"{decision.model} version {decision.version}: {decision.outcome} ({decision.reason})")


@app.command()
def models() -> None:
    """List the registered policies: one version per evaluation.

    Example: `tap models`
    """
    from pipelines import promote as promotion

    if not (rows := promotion.models()):
        raise ValueError("no policy is registered yet: `tap run` trains and registers one")
    table = Table("model", "version", "alias", "method", "data", "seed", "score", "latency", "reason", box=box.SIMPLE_HEAD)
    for row in rows:
        score, latency = str(row.score or ""), "" if row.latency_ms is None else f"{row.latency_ms:.0f} ms"
        table.add_row(
            row.name, row.version, ", ".join(row.aliases), row.method, row.source, row.seed, score, latency, row.reason
        )
    show(table)


@app.command()
def serve(
    policy: Annotated[
        str, typer.Argument(help="A dataset or registered model, with an alias if not champion.", metavar="NAME[@ALIAS]")
    ],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 5001,
    token_file: Annotated[
        Path | None,
        typer.Option(help="Serve only requests with the token in this file. [default: serve all]", show_default=False),
    ] = None,
) -> None:
    """Serve a policy over HTTP: observations in, actions or whole plans out. docs/serving.md describes requests and responses.

    Example: `tap serve hopper-medium-replay`, or the policy that was not promoted: `tap serve hopper-medium-replay@challenger`
    """
    from pipelines.serving.serve import serve as serve_policy
    from tap.settings import Runtime
    from tap.tracking.registry import model_name

    name, _, alias = policy.partition("@")
    serve_policy(model_name(name), alias or "champion", host, port, token_file, Runtime().tracking_uri)


@app.command()
def export(
    policy: Annotated[
        str,
        typer.Argument(
            help="A dataset or registered model, with an alias or the number of a version if not champion.",
            metavar="NAME[@ALIAS]",
            show_default=False,
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.", metavar="DIR", show_default=False)],
) -> None:
    """Write a policy as a folder that runs without this project: for Python without torch, and for C++.

    The folder has model.onnx with run.py, which needs onnxruntime and numpy; model.pt2 with cpp/act.cpp, which needs libtorch;
    policy.json with what the policy is; and a README. Normalisation, search and clipping to the actions' bounds are inside.

    Both models are compared with the policy at 256 states of its data. The folder appears only if they act alike: at least
    99.9 % of codes are the same where rounding does not decide, and actions within 1e-4.

    Needs the extra `export` and g++, and at `cpu` scale a minute or two. docs/export.md describes the files and their use.

    Example: `tap export hopper-medium-replay@champion robot`, then `python robot/run.py`
    """
    from pipelines.exporting.export import export as export_policy
    from tap.settings import Runtime
    from tap.tracking.registry import model_name

    name, _, alias = policy.partition("@")
    checked = export_policy(model_name(name), alias or "champion", folder, Runtime().tracking_uri)
    print(f"{folder}: {checked}")


@app.command()
def sweep(
    dataset: Annotated[list[str] | None, typer.Option(help="Only this dataset; may be repeated. [default: all listed]")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only this seed; may be repeated. [default: all listed]")] = None,
    pool: Annotated[Literal["cpu", "gpu"], typer.Option(help="The work pool whose workers execute the runs.")] = "cpu",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per run, if its worker has any.")] = 1,
    promote: Annotated[bool, typer.Option(help="Make the best policies champions if they beat the current ones.")] = True,
    remote: Remote = None,
) -> None:
    """Do what `tap run` does on workers: each dataset and seed of params.yaml as a separate run, all at this commit.

    Waits for the runs, shows their progress, and restores their results here. Ctrl-C cancels them all; the next sweep continues
    from what is finished. Needs PREFECT_API_URL, and MLFLOW_TRACKING_URI to collect all runs in one store.

    Example: `tap sweep --dataset hopper-medium-replay --remote s3://bucket/tap`
    """
    from pipelines.orchestration import sweep as sweeping

    sweeping.run(dataset or None, seed or None, pool, gpus, promote, remote)


@app.command()
def worker(
    pool: Annotated[
        str,
        typer.Argument(help="The work pool: gpu or cpu to train, control for sweeps that are started on Prefect's page."),
    ] = "cpu",
    remote: Remote = None,
    clone: Annotated[
        Path | None,
        typer.Option(help="The worker's clone, created if missing. [default: .workers/POOL]", show_default=False),
    ] = None,
    git: Annotated[
        str | None, typer.Option(help="The source of commits. [default: this project's origin]", show_default=False)
    ] = None,
    runs_per_gpu: Annotated[int, typer.Option(min=1, help="Runs that may use one GPU at the same time.")] = 1,
) -> None:
    """Create a clone, and execute the runs of sweeps in it, one at a time, until Ctrl-C.

    Needs PREFECT_API_URL, and MLFLOW_TRACKING_URI to collect all runs in one store.

    Example: `tap worker gpu --remote s3://bucket/tap`
    """
    from pipelines.orchestration import worker as working

    sys.exit(working.start(pool, clone or Path(".workers") / pool, git, remote, runs_per_gpu))


@app.command()
def reap(
    after: Annotated[float, typer.Option(min=60, help="Seconds without a heartbeat after which a run counts as lost.")] = 90,
) -> None:
    """Return the runs of lost workers to their pool. A sweep does the same while it waits.

    Example: `tap reap --after 300`
    """
    from pipelines.orchestration import reap as reaping
    from pipelines.orchestration.worker import require_server

    require_server()
    lines = reaping.reap.fn(after)
    print("\n".join(lines) if lines else "no run is lost")


@app.command()
def sync() -> None:
    """Deliver the runs that MLflow missed because it was down, or because they were killed.

    They are kept in the folder .tracking (TAP_OUTBOX). Delivering a run twice creates no duplicates.

    Example: `tap sync`
    """
    from tap.settings import Runtime
    from tap.tracking import run as tracking

    outcomes = []
    for delivered in tracking.sync(Runtime()):
        print(f"{delivered.run}: {delivered.outcome}", f"({delivered.reason})" if delivered.reason else "", flush=True)
        outcomes.append(delivered.outcome)
    if not outcomes:
        print("all runs are delivered")
    if failed := outcomes.count("failed"):
        raise ValueError(f"{failed} of {len(outcomes)} runs could not be delivered, for the reasons above")


@app.command()
def ui() -> None:
    """Serve MLflow's and Prefect's pages, until Ctrl-C.

    MLflow shows experiments and models, Prefect the runs of the pipeline.

    MLFLOW_PORT and PREFECT_SERVER_API_PORT set other ports than 5000 and 4200.

    Example: `tap ui`
    """
    from pipelines.address import require_free
    from tap.settings import Runtime

    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # halves its start-up time
    tracking_uri, commands = Runtime().tracking_uri, [["prefect", "--no-prompt", "server", "start"]]
    addresses = [("PREFECT_SERVER_API", "4200")]
    if tracking_uri.startswith("http"):
        print(f"MLflow: {tracking_uri}")
    else:
        addresses.append(("MLFLOW", "5000"))
        commands.append(["mlflow", "ui", "--workers", "1", "--backend-store-uri", tracking_uri])
    for prefix, port in addresses:
        host, port = os.environ.get(f"{prefix}_HOST") or "127.0.0.1", os.environ.get(f"{prefix}_PORT") or port
        require_free(host, port, f"{prefix}_HOST and {prefix}_PORT")
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        servers = [stack.enter_context(process.running([sys.executable, "-m", *command])) for command in commands]
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
        raise ValueError("a server exited; see its output above")


if __name__ == "__main__":
    app()
