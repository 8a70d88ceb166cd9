# The runs: one rule per notebook. A rule's only declared output is the executed copy under build/:
# tables and figures are written, each atomically, by the notebook itself, and Snakemake would
# delete the committed ones before a run if they were declared here.
import fcntl
import logging
import re
import signal
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path


configfile: f"{workflow.basedir}/config.yaml"


# ---- What to run -------------------------------------------------------------------------------

ROOT = Path(workflow.basedir)
KEYS = ["models", "texts", "context", "stability_context", "output", "build"]


def listed(key):
    """The names under `key`; a string may hold several (MODELS="a b"). Notebooks run in their own
    folder, so the name of an existing file or folder becomes its full path."""
    names = config[key] or []
    names = names.split() if isinstance(names, str) else map(str, names)
    return [str(Path(name).resolve()) if Path(name).exists() else name for name in names]


if unknown := config.keys() - set(KEYS):
    sys.exit(f"config.yaml has no key {min(unknown)!r}; its keys are {', '.join(KEYS)}")
TEXTS = listed("texts")
MODELS = {re.sub(r"[^\w.-]+", "_", name).strip("_"): name for name in listed("models")}
if not TEXTS or not MODELS:
    sys.exit("config.yaml: name at least one model and one text")
OUTPUT = str(Path(config["output"]).resolve()) if config["output"] else ""
# papermill changes the working folder of this process while a notebook runs, so: no relative path
BUILD = Path(config["build"]).resolve()
EXECUTED = f"{BUILD}/notebooks"
SHARED = [ROOT / "helpers.py", *sorted(ROOT.glob("data/*.toml"))]
ONCE = ["01_theory", "02_two_token_control", "05_gap_statistics"]
PER_MODEL = ["03_weight_spectra", "04_logit_spectra", "06_stability_bound"]


# ---- How to run it -----------------------------------------------------------------------------


class NotebookFailed(Exception):
    """Its message has been printed."""


def worth_printing(record):
    """Snakemake's account of a failed notebook would bury the notebook's own message."""
    noise = "NotebookFailed|^Error in rule|Exiting because a job|At least one job did not complete"
    return record.levelno > logging.INFO and not re.search(noise, str(record.msg))


if not (workflow.output_settings.dryrun or workflow.output_settings.verbose):
    logger.addFilter(worth_printing)

# Ctrl-C ends the run at once instead of after the notebook; a kernel ends with its parent.
signal.signal(signal.SIGINT, signal.SIG_DFL)

if workflow.is_main_process and not workflow.output_settings.dryrun:
    # The system drops this lock with the process that holds it, however that ends. Snakemake's
    # own lock (off by --nolock) would outlive a killed run and block the next.
    BUILD.mkdir(parents=True, exist_ok=True)
    LOCK = open(BUILD / ".lock", "w")
    try:
        fcntl.flock(LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"Waiting for another run in {BUILD} to end ...", file=sys.stderr)
        fcntl.flock(LOCK, fcntl.LOCK_EX)


def execute(notebook, output, parameters):
    """Run `notebook` into build/running/, where a failed one stays, then move it to `output`."""
    import papermill

    running = BUILD / "running" / Path(output).relative_to(EXECUTED)
    running.parent.mkdir(parents=True, exist_ok=True)
    print(Path(output).relative_to(EXECUTED).with_suffix(""), file=sys.stderr)
    try:
        # papermill only warns of an unknown parameter, and goes on with the default
        known = papermill.inspect_notebook(notebook)
        for name in parameters.keys() - known.keys():
            raise ValueError(f"{notebook} has no parameter {name!r}; it has {', '.join(known)}")
        papermill.execute_notebook(
            notebook,
            running,
            parameters,
            kernel_name="python3",
            cwd=ROOT / "notebooks",
            extra_arguments=["--log-level=CRITICAL"],  # the kernel's talk of its own sockets
        )
    except papermill.PapermillExecutionError as error:
        print(f"\nThe failed notebook: {running}", file=sys.stderr)
        print(f"{error.ename}: {error.evalue}", file=sys.stderr)
        raise NotebookFailed from None
    except Exception as error:  # no such parameter, a kernel killed for want of memory, ...
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        raise NotebookFailed from None
    running.replace(output)


def print_verdicts(claims):
    """The claims as a table 100 columns wide."""
    widths = [15, 38, 12, 18, 13]
    rows = [["claim", "statement (reading)", "paper", "measured", "verdict"]]
    for row in claims.itertuples():
        claim = f"{row.id} {row.model}"
        rows.append([claim, f"{row.statement} ({row.reading})", row.paper, row.measured, row.verdict])
    for row in rows:
        cells = [textwrap.wrap(str(cell), width) for cell, width in zip(row, widths)]
        for line in zip_longest(*cells, fillvalue=""):
            print(" ".join(f"{part:{width}}" for part, width in zip(line, widths)).rstrip())
        print()


# ---- The rules ---------------------------------------------------------------------------------


rule results:
    # all of them: Snakemake leaves a missing one missing while those that need it are there
    input:
        expand(f"{EXECUTED}/{{name}}.ipynb", name=ONCE),
        expand(f"{EXECUTED}/{{model}}/{{name}}.ipynb", model=MODELS, name=PER_MODEL),
    run:
        import helpers

        print_verdicts(helpers.claim_table(Path(OUTPUT or helpers.ROOT)))


rule readme:
    input:
        rules.results.input,
    run:
        import helpers
        import pandas

        timings = [
            {"notebook": path.stem, "seconds": pandas.read_csv(path, sep="\t").s.sum()}
            for path in sorted((BUILD / "benchmarks").rglob("*.tsv"))
        ]
        seconds = pandas.DataFrame(timings).groupby("notebook", as_index=False).sum().round(0)
        facts = {"models": list(MODELS.values()), "texts": TEXTS, "context": config["context"]}
        helpers.save_table(seconds, helpers.ROOT / "data/results/runtimes.csv", facts)
        helpers.update_readme(helpers.ROOT, helpers.readme_tables(helpers.ROOT))


# `make second`: another model beside the default one, in a folder of their own; of its results, the
# repository keeps the verdicts.
rule second:
    input:
        rules.results.input,
    run:
        import helpers

        name = helpers.results_name(list(MODELS.values())[-1])
        claims = helpers.claim_table(Path(OUTPUT))
        columns = ["id", "model", "measured", "verdict"]
        facts = {"models": list(MODELS.values()), "texts": TEXTS, "context": config["context"]}
        path = helpers.ROOT / "data/results/second_model.csv"
        helpers.save_table(claims.loc[claims.model == name, columns], path, facts)
        helpers.update_readme(helpers.ROOT, helpers.readme_tables(helpers.ROOT))


rule theory:
    input:
        notebook=ROOT / "notebooks/01_theory.ipynb",
        shared=SHARED,
    output:
        f"{EXECUTED}/01_theory.ipynb",
    # its example is a head of the notebook's own default model, which others may not have
    params:
        output_dir=OUTPUT,
    benchmark:
        f"{BUILD}/benchmarks/01_theory.tsv"
    run:
        execute(input.notebook, output[0], dict(params.items()))


rule two_token_control:
    input:
        notebook=ROOT / "notebooks/02_two_token_control.ipynb",
        shared=SHARED,
        reference=ROOT / "data/attention-rank-bottlenecks.json",
    output:
        f"{EXECUTED}/02_two_token_control.ipynb",
    params:
        output_dir=OUTPUT,
    benchmark:
        f"{BUILD}/benchmarks/02_two_token_control.tsv"
    run:
        execute(input.notebook, output[0], dict(params.items()))


rule weight_spectra:
    input:
        notebook=ROOT / "notebooks/03_weight_spectra.ipynb",
        shared=SHARED,
    output:
        f"{EXECUTED}/{{model}}/03_weight_spectra.ipynb",
    params:
        model=lambda wildcards: MODELS[wildcards.model],
        output_dir=OUTPUT,
    benchmark:
        f"{BUILD}/benchmarks/{{model}}/03_weight_spectra.tsv"
    run:
        execute(input.notebook, output[0], dict(params.items()))


rule logit_spectra:
    input:
        notebook=ROOT / "notebooks/04_logit_spectra.ipynb",
        shared=SHARED,
    output:
        f"{EXECUTED}/{{model}}/04_logit_spectra.ipynb",
    params:
        model=lambda wildcards: MODELS[wildcards.model],
        texts=TEXTS,
        context=config["context"],
        output_dir=OUTPUT,
    benchmark:
        f"{BUILD}/benchmarks/{{model}}/04_logit_spectra.tsv"
    run:
        execute(input.notebook, output[0], dict(params.items()))


rule gap_statistics:
    input:
        expand(f"{EXECUTED}/{{model}}/03_weight_spectra.ipynb", model=MODELS),
        expand(f"{EXECUTED}/{{model}}/04_logit_spectra.ipynb", model=MODELS),
        notebook=ROOT / "notebooks/05_gap_statistics.ipynb",
        shared=SHARED,
    output:
        f"{EXECUTED}/05_gap_statistics.ipynb",
    params:
        models=list(MODELS.values()),
        texts=TEXTS,
        context=config["context"],
        output_dir=OUTPUT,
    benchmark:
        f"{BUILD}/benchmarks/05_gap_statistics.tsv"
    run:
        execute(input.notebook, output[0], dict(params.items()))


rule stability_bound:
    input:
        notebook=ROOT / "notebooks/06_stability_bound.ipynb",
        shared=SHARED,
    output:
        f"{EXECUTED}/{{model}}/06_stability_bound.ipynb",
    params:
        model=lambda wildcards: MODELS[wildcards.model],
        text=TEXTS[0],
        context=config["stability_context"],
        output_dir=OUTPUT,
    benchmark:
        f"{BUILD}/benchmarks/{{model}}/06_stability_bound.tsv"
    run:
        execute(input.notebook, output[0], dict(params.items()))
