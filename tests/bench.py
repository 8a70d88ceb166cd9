"""`make bench`: the singular values of a product of thin factors, ways side by side in one run.

Writes data/results/bench.csv, its figure, and the README's table. Every time is a median and of
one thread, but for the forward pass, which has all cores; what counts are the ratios.
"""

import os
import platform
import subprocess
import sys
import tempfile
from functools import reduce
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib import ticker
from torch import Tensor
from torch.utils.benchmark import Timer

import helpers

HEADS, GROUP = 32, 4
CHUNK = 1024
LONG_CONTEXT = 8192
RESULTS = Path("data", "results", "bench.csv")
FIGURE = "bench_singular_values"


# ---- Ways to the singular values [..., d] of left @ right.mT, both [..., T, d] -------------------


def dense(left: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.svdvals(left @ right.mT)[..., : left.shape[-1]]


def dense_float64(left: Tensor, right: Tensor) -> Tensor:
    return dense(left.double(), right.double())


def factored_matrix(left: Tensor, right: Tensor) -> Tensor:
    from transformer_lens.FactoredMatrix import FactoredMatrix  # in make bench's environment only

    return FactoredMatrix(left, right.mT).S


def qr(left: Tensor, right: Tensor) -> Tensor:
    return helpers._qr_singular_values(left.double(), right.double())


WAYS = {
    "dense float64": dense_float64,
    "dense float32": dense,
    "FactoredMatrix": factored_matrix,
    "QR": qr,
    "ours": helpers.product_singular_values,
}


# ---- Time and error of each way -----------------------------------------------------------------


def milliseconds(function, *arguments, threads: int = 1) -> float:
    names = {f"x{index}": argument for index, argument in enumerate(arguments)}
    timer = Timer(f"f({', '.join(names)})", globals={"f": function, **names}, num_threads=threads)
    return 1e3 * timer.blocked_autorange(min_run_time=1).median


def factors(tokens: int, head_dim: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """Float32, as a model gives them: queries [key_heads, group, T, d], keys [key_heads, 1, T, d].

    The singular values of each factor fall as k^-0.6, those of their product then about as those of
    a head of the default model that reads a text: r90 is 13 for d = 64.
    """
    generator = torch.Generator().manual_seed(0)
    spread = torch.arange(1, head_dim + 1) ** -0.6

    def factor(*heads: int) -> Tensor:
        mix = torch.linalg.qr(torch.randn(*heads, head_dim, head_dim, generator=generator)).Q
        return torch.randn(*heads, tokens, head_dim, generator=generator) * spread @ mix

    return factor(key_heads, HEADS // key_heads), factor(key_heads, 1)


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(line.split(": ")[1] for line in lines if line.startswith("model name"))


def gemm_rate() -> float:
    """Floating-point operations a millisecond of a float64 matrix product, one thread."""
    size = 1024
    square = torch.randn(size, size, dtype=torch.float64)
    return 2 * size**3 / milliseconds(torch.mm, square, square)


def compare(tokens: int, head_dim: int, key_heads: int, checked: int) -> pd.DataFrame:
    """A row for each way: milliseconds a head, and errors against dense float64 in some heads."""
    left, right = factors(tokens, head_dim, key_heads)
    one_of = slice(None, None, HEADS // checked)
    some = [part.expand_as(left).flatten(0, 1)[one_of] for part in (left, right)]
    rows, true = [], None
    for way, function in WAYS.items():
        if function in (dense, dense_float64):  # a head at a time, or it would need the memory
            time = milliseconds(function, left[0, 0], right[0, 0])
            found = torch.stack([function(a, b) for a, b in zip(*some, strict=True)])
        else:
            time = milliseconds(function, left, right) / HEADS
            found = function(left, right).flatten(0, 1)[one_of]
        true = found if function is dense_float64 else true  # the first of the ways
        error = ((found - true).abs().amax(-1) / true[:, 0]).max().item()
        wrong = (helpers.threshold_rank(found) != helpers.threshold_rank(true)).sum().item()
        rows.append({"method": way, "ms": time, "sigma_error": error, "wrong_r90": wrong})
    # Two Gram matrices a head, 2Td² operations each; those of the keys once for every group.
    operations = 2 * tokens * head_dim**2 * (1 + key_heads / HEADS)
    rows.append({"method": "floor", "ms": operations / gemm_rate()})
    size = {"tokens": tokens, "head_dim": head_dim, "query_heads": HEADS, "key_heads": key_heads}
    table = pd.DataFrame(rows).assign(part="size", **size, heads_checked=checked)
    print(table[["method", "ms", "sigma_error", "wrong_r90"]].to_string(), flush=True)
    return table


# ---- Long contexts ------------------------------------------------------------------------------


def direct(tokens: int) -> float:
    """Milliseconds a head of `logit_singular_values` on all tokens at once."""
    queries, keys = torch.randn(HEADS, tokens, 64), torch.randn(HEADS // GROUP, tokens, 64)
    return milliseconds(helpers.logit_singular_values, queries, keys, 0.125) / HEADS


def accumulated(tokens: int) -> float:
    """The same with the Gram matrices of chunks added up, as if each chunk were another."""
    queries, keys = torch.randn(HEADS, CHUNK, 64), torch.randn(HEADS // GROUP, CHUNK, 64)

    def field() -> Tensor:
        chunks = (helpers.field_grams(queries, keys) for _ in range(tokens // CHUNK))
        return helpers.grams_singular_values(reduce(helpers.merge_grams, chunks), 0.125)

    return milliseconds(field) / HEADS


def forward(tokens: int) -> None:
    """The model reads a text, and nothing is recorded."""
    source = helpers.load_model("smollm2-135m")
    token_ids = helpers.token_window(source, helpers.load_text("king-james"), tokens)
    with torch.inference_mode():
        source.model(token_ids[None], use_cache=False)


def idle(_: int) -> float:
    """What the interpreter and the libraries take."""
    return 0.0


# The wrapper's own memory does not count: only that of the largest process below it.
PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
)


def run(*command) -> tuple[str, float]:
    """What a command prints, and its peak memory in MB."""
    command = [sys.executable, "-c", PEAK, sys.executable, *map(str, command)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    *printed, peak = done.stdout.strip().splitlines()
    return "\n".join(printed), float(peak)


def growth() -> pd.DataFrame:
    """Time and memory of both ways from 4,096 tokens to 65,536: medians of three processes."""

    def medians(name: str, tokens: int) -> pd.Series:
        runs = [run(__file__, name, tokens) for _ in range(3)]
        return pd.DataFrame(runs, columns=["ms", "memory_mb"]).astype(float).median()

    _, base = medians("idle", 0)
    rows = []
    for function in (direct, accumulated):
        for tokens in (4096, 8192, 16384, 32768, 65536):
            ms, peak = medians(function.__name__, tokens).tolist()
            facts = {"method": function.__name__, "tokens": tokens, "memory_mb": peak - base}
            rows.append({**facts, "ms": ms})
            print(rows[-1], flush=True)
    size = {"head_dim": 64, "query_heads": HEADS, "key_heads": HEADS // GROUP}
    return pd.DataFrame(rows).assign(part="growth", **size)


def notebook_memory() -> pd.DataFrame:
    """Peak memory of notebook 04 on one long text beside that of the forward pass alone."""
    notebook = helpers.ROOT / "notebooks" / "04_logit_spectra.ipynb"
    with tempfile.TemporaryDirectory() as folder:
        parameters = f"{{context: {LONG_CONTEXT}, texts: [king-james], output_dir: '{folder}'}}"
        options = ["-k", "python3", "--no-progress-bar", "--log-level", "ERROR", "-y", parameters]
        peaks = {
            "forward pass": run(__file__, "forward", LONG_CONTEXT)[1],
            "notebook 04": run("-m", "papermill", notebook, f"{folder}/out.ipynb", *options)[1],
        }
    print(peaks, flush=True)
    rows = [{"method": name, "memory_mb": peak} for name, peak in peaks.items()]
    return pd.DataFrame(rows).assign(part="model", tokens=LONG_CONTEXT)


def share_of_forward_pass() -> pd.DataFrame:
    """Milliseconds of the default model's forward pass, and of one whose every head is analysed."""
    source = helpers.load_model("smollm2-135m")
    token_ids = helpers.token_window(source, helpers.load_text("alice"), 1024)
    model, threads = source.model, torch.get_num_threads()

    @torch.inference_mode()
    def stock() -> None:
        model(token_ids[None], use_cache=False)

    def analysed() -> None:
        def visit(layer, queries, keys, scale):
            helpers.logit_singular_values(queries, keys, scale)

        helpers.record_attention(model, token_ids, visit)

    names = {"forward pass": stock, "with every head analysed": analysed}
    # In turn, so that both see the machine's good and bad moments.
    times = [
        {name: milliseconds(function, threads=threads) for name, function in names.items()}
        for _ in range(9)
    ]
    heads = model.config.num_hidden_layers * model.config.num_attention_heads
    rows = [{"method": name, "ms": time} for name, time in pd.DataFrame(times).median().items()]
    print(rows, flush=True)
    return pd.DataFrame(rows).assign(part="model", tokens=1024, query_heads=heads)


# ---- What it says -------------------------------------------------------------------------------


def sizes(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """One row for each size of the factors, one column for each way."""
    index = ["tokens", "head_dim", "key_heads"]
    rows = table[table.part == "size"].astype(dict.fromkeys(index, int))
    wide = rows.pivot(index=index, columns="method", values=value)
    return wide[[*WAYS, "floor"]].sort_index(ascending=[True, True, False])


def long_contexts(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """One row for each number of tokens, columns direct and accumulated."""
    return table[table.part == "growth"].pivot(index="tokens", columns="method", values=value)


def measures(table: pd.DataFrame) -> pd.DataFrame:
    """What this benchmark is for: each measure, its bound, its value, and whether it is met."""
    times = sizes(table, "ms")
    floors = times["ours"] / times["floor"]
    gains = times.div(times["ours"], axis=0)
    dense_gain = gains["dense float64"].xs(64, level="head_dim")
    long_times, memory = long_contexts(table, "ms"), long_contexts(table, "memory_mb")
    first, last = long_times.index[[0, -1]]
    growth = long_times.loc[last] / last / (long_times.loc[first] / first)
    model = table[table.part == "model"].set_index(["method", "tokens"])
    analysed = model.ms["with every head analysed", 1024] / model.ms["forward pass", 1024] - 1
    notebook = model.memory_mb.xs(LONG_CONTEXT, level="tokens")
    rows = [
        ("ours / floor, largest", floors.max(), "≤", 3),
        ("ours / floor at T = 4096, largest", floors[4096].max(), "≤", 2),
        ("dense float64 / ours, T = 1024, d = 64, smallest", dense_gain[1024].min(), "≥", 400),
        ("dense float64 / ours, T = 4096, d = 64, smallest", dense_gain[4096].min(), "≥", 2500),
        ("FactoredMatrix / ours, smallest", gains["FactoredMatrix"].min(), "≥", 4),
        ("error of ours, in σ₁, largest", sizes(table, "sigma_error")["ours"].max(), "≤", 1e-10),
        ("heads where the r90 of ours is wrong", sizes(table, "wrong_r90")["ours"].sum(), "≤", 0),
        ("time that all heads of the default model add to its forward pass", analysed, "≤", 0.1),
        (f"time a token, T = {last} / {first}, direct", growth["direct"], "≤", 1.25),
        (f"time a token, T = {last} / {first}, accumulated", growth["accumulated"], "≤", 1.25),
        (f"memory at T = {last} less {first}, accumulated, MB",
         memory["accumulated"][last] - memory["accumulated"][first], "≤", 10),
        (f"notebook 04 at T = {LONG_CONTEXT} above the forward pass, MB",
         notebook["notebook 04"] - notebook["forward pass"], "≤", 1000),
    ]  # fmt: skip
    result = pd.DataFrame(rows, columns=["measure", "value", "sign", "bound"])
    low, high = (result.value.le(result.bound), result.value.ge(result.bound))
    return result.assign(met=low.where(result.sign == "≤", high))


def plain(number: float) -> str:
    """Three digits, and no exponent where none is needed."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def readme_tables(table: pd.DataFrame) -> dict[str, str]:
    """The README's `benchmark` (milliseconds a head) and `measures` in Markdown."""
    times = sizes(table, "ms").map(plain).reset_index()
    times = times.rename(columns={"tokens": "T", "head_dim": "d", "key_heads": "key heads"})
    rows = measures(table)
    shown = pd.DataFrame({"measure": rows.measure, "value": rows.value.map(plain)})
    shown["bound"] = rows.sign + " " + rows.bound.map(plain)
    shown["met"] = rows.met.map({True: "yes", False: "**no**"})
    return helpers.as_markdown(benchmark=times, measures=shown)


def draw(table: pd.DataFrame) -> plt.Figure:
    """Left: milliseconds a head of each way. Middle and right: time and memory of long contexts."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained", width_ratios=[4, 3, 3])
    own_keys = sizes(table, "ms").xs(HEADS, level="key_heads")
    names = [f"T = {tokens:,}\nd = {head_dim}" for tokens, head_dim in own_keys.index]
    markers = {
        "linestyle": "",
        "fillstyle": "none",
        "xlabel": "",
        "xlim": (-0.5, len(names) - 0.5),
        "ylim": (0.2, 3e6),
    }
    own_keys.reset_index(drop=True).plot(ax=axes[0], logy=True, style=[*"sDv^o", "k_"], **markers)
    axes[0].set_xticks(range(len(names)), names)
    axes[0].minorticks_off()
    axes[0].set(title="Ways to the singular values", ylabel="time (milliseconds a head)")
    axes[0].legend(loc="upper left", ncols=2, fontsize="small")
    panels = {"time (milliseconds a head)": "ms", "memory, with queries and keys (MB)": "memory_mb"}
    for ax, (label, value) in zip(axes[1:], panels.items(), strict=True):
        wide = long_contexts(table, value)
        wide.plot(
            ax=ax, loglog=True, style=["o-", "s--"], fillstyle="none", color=["black", "0.45"]
        )
        ax.set_xticks(wide.index, [f"{tokens // 1024}k" for tokens in wide.index])
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.set(xlabel="tokens T (k = 1,024)", ylabel=label)
        ax.legend(title=None, fontsize="small")
    axes[1].set_title("Long contexts: time")
    axes[2].set_title("Long contexts: memory")
    return figure


def measure() -> None:
    """Run everything, and save the table."""
    # Memory first: a process counts what its parent held when it was started.
    parts = [growth(), notebook_memory(), share_of_forward_pass()]
    for tokens, checked in ((1024, HEADS), (4096, 2)):
        for head_dim in (64, 128):
            for key_heads in (HEADS, HEADS // GROUP):
                parts.append(compare(tokens, head_dim, key_heads, checked))
    columns = ["part", "method", "tokens", "head_dim", "query_heads", "key_heads", "ms"]
    columns += ["memory_mb", "sigma_error", "wrong_r90", "heads_checked"]
    table = pd.concat(parts)[columns].convert_dtypes()
    machine = {"processor": processor(), "cores": os.cpu_count()}
    helpers.save_table(table, helpers.ROOT / RESULTS, machine)


def publish() -> None:
    """From the saved table: the figure, the README's tables, the measures on the screen."""
    table = helpers.load_table(helpers.ROOT / RESULTS)
    helpers.figure_style()
    helpers.save_figure(draw(table), FIGURE, table, helpers.ROOT)
    helpers.update_readme(helpers.ROOT, readme_tables(table))
    print(measures(table).to_string(index=False))


if __name__ == "__main__":
    if sys.argv[1:]:
        alone = {part.__name__: part for part in (idle, direct, accumulated, forward)}
        print(alone[sys.argv[1]](int(sys.argv[2])))
    else:
        measure()
        publish()
