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
KEYS = ["models", "texts", "context", "stability_context", "windows", "lengths"]
KEYS += ["output", "build"]


def listed(key):
    """The names under `key`; a string may hold several (MODELS="a b"). Notebooks run in their own
    folder, so the name of an existing file or folder becomes its full path."""
    names = config[key] or []
    names = str(names).split() if isinstance(names, str | int) else map(str, names)
    return [str(Path(name).resolve()) if Path(name).exists() else name for name in names]


if unknown := config.keys() - set(KEYS):
    sys.exit(f"config.yaml has no key {min(unknown)!r}; its keys are {', '.join(KEYS)}")
TEXTS = listed("texts")
MODELS = {re.sub(r"[^\w.-]+", "_", name).strip("_"): name for name in listed("models")}
if not TEXTS or not MODELS:
    sys.exit("config.yaml: name at least one model and one text")
if len(MODELS) < len(set(listed("models"))):
    sys.exit(f"config.yaml: two models would share a folder: {', '.join(listed('models'))}")
try:
    LENGTHS = [int(tokens) for tokens in listed("lengths")]
except ValueError:
    sys.exit(f"config.yaml: lengths must be whole numbers, found {config['lengths']!r}")
OUTPUT = str(Path(config["output"]).resolve()) if config["output"] else ""
# papermill changes the working folder of this process while a notebook runs, so: no relative path
BUILD = Path(config["build"]).resolve()
EXECUTED = f"{BUILD}/notebooks"
SHARED = [ROOT / "helpers.py", *sorted(ROOT.glob("data/*.toml"))]
ONCE = ["01_theory", "02_two_token_control", "05_gap_statistics"]
PER_MODEL = ["03_weight_spectra", "04_logit_spectra", "06_stability_bound", "07_controls"]
PER_MODEL += ["08_function"]
WINDOW = {"texts": TEXTS, "context": config["context"]}
PARAMETERS = {
    "01_theory": {},  # its example is a head of its own default model, which others may not have
    "02_two_token_control": {},
    "03_weight_spectra": {},
    "04_logit_spectra": WINDOW,
    "05_gap_statistics": {"models": list(MODELS.values()), **WINDOW},
    "06_stability_bound": {"text": TEXTS[0], "context": config["stability_context"]},
    "07_controls": {
        "text": TEXTS[0],
        "other_text": TEXTS[-1] if len(TEXTS) > 1 else "",
        "context": config["context"],
        "windows": config["windows"],
        "contexts": LENGTHS,
    },
    "08_function": {
        "calibration_text": TEXTS[0],
        "texts": sorted({*TEXTS[1:2], *TEXTS[-1:]}, key=TEXTS.index),
        "context": config["context"],
    },
}
READS = {
    "02_two_token_control": [ROOT / "data/attention-rank-bottlenecks.json"],
    "05_gap_statistics": [
        f"{EXECUTED}/{model}/{name}.ipynb"
        for model in MODELS
        for name in ("03_weight_spectra", "04_logit_spectra")
    ],
}


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
    # Before anything runs: what no notebook could use.
    import helpers

    try:
        for name in MODELS.values():
            helpers.model_kind(name)
        for name in TEXTS:
            helpers.text_kind(name)
        helpers.named_results("models", list(MODELS.values()))
        helpers.named_results("texts", TEXTS)
        least = {"context": 4, "stability_context": 2, "windows": 2}
        for name in least:
            helpers.require_whole(name, config[name], least[name])
    except ValueError as error:
        sys.exit(f"{error}")
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
    except OSError as error:
        reason = error.strerror or error
        advice = "free space there, or set another build folder"
        print(f"\ncannot write into {BUILD} ({reason}): {advice}", file=sys.stderr)
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


def publish(table, file):
    """Save a table about this run, and put the README's tables in order."""
    import helpers

    facts = {"models": list(MODELS.values()), **WINDOW}
    helpers.save_table(table, helpers.ROOT / "data/results" / file, facts)
    helpers.update_readme(helpers.ROOT, helpers.readme_tables(helpers.ROOT))


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
        publish(seconds, "runtimes.csv")


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
        publish(claims.loc[claims.model == name, columns], "second_model.csv")


# A notebook of all models, or one of each. What it is made of (its parameters, its sources, what
# else it reads) decides whether it runs again.
def given(name, model=None):
    return {**({"model": MODELS[model]} if model else {}), **PARAMETERS[name], "output_dir": OUTPUT}


rule once:
    input:
        lambda wildcards: READS.get(wildcards.name, []),
        notebook=ROOT / "notebooks/{name}.ipynb",
        shared=SHARED,
    output:
        f"{EXECUTED}/{{name}}.ipynb",
    wildcard_constraints:
        name="|".join(ONCE),
    params:
        given=lambda wildcards: given(wildcards.name),
    benchmark:
        f"{BUILD}/benchmarks/{{name}}.tsv"
    run:
        execute(input.notebook, output[0], params.given)


rule per_model:
    input:
        notebook=ROOT / "notebooks/{name}.ipynb",
        shared=SHARED,
    output:
        f"{EXECUTED}/{{model}}/{{name}}.ipynb",
    wildcard_constraints:
        name="|".join(PER_MODEL),
    params:
        given=lambda wildcards: given(wildcards.name, wildcards.model),
    benchmark:
        f"{BUILD}/benchmarks/{{model}}/{{name}}.tsv"
    run:
        execute(input.notebook, output[0], params.given)
