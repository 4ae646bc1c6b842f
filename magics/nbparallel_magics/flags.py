"""The flags of every magic, with help and an example."""

from __future__ import annotations

import argparse

from nbparallel_magics import arguments
from nbparallel_magics.arguments import MagicParser, RankSpec

_RANKS = "only on these ranks: 0,2-3 or ::2 or -1 (the last); @a for those of the host a"


def _run_flags(parser: MagicParser, *, leading_ranks: bool = False) -> MagicParser:
    """Add the flags of magics that run code, cells and lines, on some ranks."""
    add = parser.add_argument
    if leading_ranks:  # the ranks are a word of the line, which the parser turns into this flag
        add("--ranks", type=RankSpec.parse, help=argparse.SUPPRESS)
    else:
        add(
            "-n",
            type=arguments.count,
            metavar="N",
            help="number of ranks, from now on: some are added, or the last ones end if they hold no "
            "variables; without it as many as there are, at first one for each CPU; at most 8 ranks "
            "for each CPU",
        )
        add("-r", "--ranks", type=RankSpec.parse, metavar="SPEC", help=_RANKS)
    add(
        "-o",
        "--out",
        type=arguments.name,
        metavar="NAME",
        help="put each rank's last value into NAME: NAME[2] is rank 2's, NAME.gather() joins arrays or lists",
    )
    add(
        "--timeout",
        type=arguments.seconds,
        metavar="S",
        help="interrupt the cell after S seconds; %%parallel_tb then shows where it was",
    )
    add(
        "--draw",
        type=arguments.names,
        metavar="NAMES",
        help="show below the cell what these names hold on each rank, before and after it: x,y",
    )
    add("--quiet", action="store_true", help="show no output and no values, only errors")
    add(
        "--async",
        dest="background",
        action="store_true",
        help="return immediately with a handle, which has wait(), result(), cancel() and state; "
        "%%parallel_result waits for the cell, and then -o has its values",
    )
    add(
        "--queue",
        action="store_true",
        help="while --async cells run: wait for them, or with --async run after them, with the names as they "
        "are now",
    )
    add(
        "--check-races",
        action="store_true",
        help="name data races on shared arrays: what two ranks touched with nothing to order them; slower",
    )
    add("--profile", action="store_true", help="show below the cell how long each line took on each rank")
    return parser


def _cell_flags(parser: MagicParser) -> MagicParser:
    """Add the flags that only cells have; for lines `getattr(options, …, None)` stands for them."""
    add = parser.add_argument
    add(
        "--share",
        type=arguments.names,
        metavar="NAMES",
        help="arrays, tensors or modules that ranks may write, from now on: a,b",
    )
    add("--seed", type=arguments.seed, metavar="N", help="seed random, np.random, rng and torch, repeatably")
    add(
        "--output",
        choices=("rank", "stream"),
        help="rank: sorted by rank when the cell has ended; stream: as it comes",
    )
    add("--local", action="store_true", help="run the cell in the notebook too, first")
    add(
        "--on-error",
        choices=("stop", "continue"),
        default="stop",
        help="stop: the first error releases every rank; continue: only those that wait for the failed rank",
    )
    add(
        "--scaling",
        type=arguments.counts,
        metavar="N,N",
        help="run the cell on fresh ranks, so many in turns, three times each, and show the speed-up: 1,2,4",
    )
    return parser


CELL = _cell_flags(
    _run_flags(
        MagicParser(
            "%%parallel",
            "Run the cell on parallel ranks; the first such cell starts them.  Ranks keep their variables\n"
            "from cell to cell, see the notebook's names, and share its numpy arrays without a copy.\n"
            "Each rank has: rank, world_size, rng, send, recv, broadcast, all_reduce, gather, scatter and\n"
            "so on, dist (every operation), nbp (the package); %parallel_stop ends all ranks.\n"
            "On hosts of %parallel_cluster, what you write into an array is seen after %parallel_push.\n\n"
            "  dist.shard(x)          on a rank: its own part of an array or a list\n"
            "  %parallel x.mean()     one line on all ranks: the flags, then the code\n"
            "  %config NbParallel     what holds where a flag is not given (-n, --timeout, ...)",
            "%%parallel -n 4\ntotal = all_reduce(rank)\nprint(f'rank {rank} of {world_size}: {total}')",
        )
    )
)
LINE = _run_flags(
    MagicParser(
        "%parallel",
        "Run one line on all ranks (or on those of -r).  Flags come first; -- ends them.",
        "%parallel -r 0 x.mean()",
        words="[flags] CODE",
    )
)
RANK_CELL = _cell_flags(
    _run_flags(
        MagicParser(
            "%%rank",
            "Run the cell on some ranks: short for %%parallel -r R.",
            "%%rank 0\nprint(x)",
            words="R [flags]",
        ),
        leading_ranks=True,
    )
)
RANK_LINE = _run_flags(
    MagicParser(
        "%rank",
        "Run one line on some ranks: short for %parallel -r R.",
        "%rank -1 x.shape",
        words="R [flags] CODE",
    ),
    leading_ranks=True,
)
SHARE = MagicParser(
    "%share",
    "Move arrays of the notebook into shared memory now, and let ranks write them.  The names, and other\n"
    "names of the same memory, are bound to the shared arrays.  Tensors and modules of torch are moved in\n"
    "place, and stay the objects that they are.",
    "%share weights gradients",
    words="NAME [NAME ...]",
)
STRATEGY = MagicParser(
    "%sharing_strategy",
    "Show the sharing strategy, the others, and what each costs; or switch: %sharing_strategy NAME\n"
    "(mmap takes directory=PATH).  The notebook and all ranks use it for new arrays from the next cell on.\n"
    "Arrays that are shared already stay where they are.",
    "%sharing_strategy file_region\n%sharing_strategy mmap directory=/var/tmp\n%sharing_strategy --bench",
    words="[NAME [option=value]] | --bench [--seconds S]",
)
STRATEGY.add_argument(
    "--bench", action="store_true", help="measure every strategy on this machine, on a real rank"
)
STRATEGY.add_argument(
    "--seconds", type=arguments.seconds, metavar="S", help="about how long that may take (20)"
)


def parse_strategy(line: str) -> tuple[argparse.Namespace, str]:
    """Return the flags of ``%sharing_strategy`` and the words after them; UsageError if they contradict."""
    options, words = STRATEGY.parse_head(line)
    if options.bench and words:
        STRATEGY.error(f"--bench measures all strategies, without {words!r}")
    if options.seconds and not options.bench:
        STRATEGY.error("--seconds belongs to --bench")
    return options, words


PUSH = MagicParser(
    "%parallel_push",
    "Send values of the notebook to all ranks now.  A cell does that by itself, but for one case: ranks on\n"
    "hosts of a cluster do not see what the notebook has written into an array since it was sent.",
    "x[0] = 1\n%parallel_push x",
    words="NAME [NAME ...]",
)
CLUSTER = MagicParser(
    "%parallel_cluster",
    "Have the ranks on the hosts of a Dask cluster from now on: NAME is a variable that holds its Client,\n"
    "or the cluster.  Without a name: show the hosts and their ranks.  %parallel_stop ends the ranks; the\n"
    "cluster stays, and the next cell runs on this machine unless the cluster is named again.",
    "from distributed import Client\nclient = Client('tcp://10.0.0.1:8786')\n%parallel_cluster client",
    words="[--ranks-per-host N] [--max-hosts N] [NAME]",
)
CLUSTER.add_argument(
    "--ranks-per-host",
    type=arguments.count,
    metavar="N",
    help="by default one for each thread of its workers",
)
CLUSTER.add_argument(
    "--max-hosts", type=arguments.count, metavar="N", help="how many hosts to use, at most 32"
)
STATUS = MagicParser(
    "%parallel_status",
    "Show the ranks and the shared memory that they use, and below them the processes that the notebook has\n"
    "started by nbparallel.multiprocessing.",
    "%parallel_status",
)
SEGMENTS = MagicParser(
    "%parallel_segments",
    "Show every piece of shared memory of the session: its strategy and size, the names that refer to it\n"
    "(views too; the notebook's, and those that ranks made), which processes use it, and which made it.\n\n"
    "  no name   the data of a copied object, an array in a list or an object, or what operations between\n"
    "            ranks work in\n"
    "  live      its maker uses it\n"
    "  released  only others use it; when they release it, its maker keeps it for the next arrays\n\n"
    "A second table has what processes of nbparallel.multiprocessing, and messages between them, use.",
    "%parallel_segments",
)
WHO = MagicParser(
    "%parallel_who",
    "Show the names of all ranks beside the notebook's, with type and shape.  No value travels, and a busy\n"
    "rank is not waited for.\n\n"
    "  shared                 the notebook's array: the same memory on every rank\n"
    "  copied                 the notebook's object, a copy on each rank\n"
    "  made on ranks          assigned by a cell that ran there; values may differ\n"
    "  differs between ranks  type, shape or origin is not the same everywhere",
    "%parallel_who",
)
DOCTOR = MagicParser(
    "%parallel_doctor",
    "Check this machine, and hosts in use: what prevents ranks or shared memory, and what to do about it.\n"
    "Inspects limits, the container, memory, CPUs, sharing strategies, versions; starts and changes nothing.",
    "%parallel_doctor",
)
STATUS.add_argument("--all", action="store_true", help="show every rank, not only the first eight")
SEGMENTS.add_argument("--all", action="store_true", help="show each segment, with id, strategy and phase")
WHO.add_argument("--all", action="store_true", help="list every name of a group")
DOCTOR.add_argument("--all", action="store_true", help="show each check")
RESTART = MagicParser(
    "%parallel_restart",
    "Restart all ranks, or those of -r; a restarted rank keeps its number and loses its variables.",
    "%parallel_restart -r 2",
)
RESTART.add_argument("-r", "--ranks", type=RankSpec.parse, metavar="SPEC", help="only these ranks")
STOP = MagicParser("%parallel_stop", "End the ranks and everything that belongs to them.", "%parallel_stop")
RESULT = MagicParser(
    "%parallel_result",
    "Wait for the last --async cell, show what it printed and its values (or put them into the name of its\n"
    "-o), or raise its error.  An interrupt while it waits interrupts that cell.  Of several cells NAME is\n"
    "the one whose handle you assigned: what --async returns, as `_` after the cell, or by %parallel.  The\n"
    "names of -o of all cells that have ended get their values.",
    "cell = %parallel --async train()\n%parallel_result cell",
    words="[NAME]",
)
OUTPUT = MagicParser(
    "%parallel_output",
    "Show again what the last cell on ranks has printed and displayed, up to 10 MiB: a page that was\n"
    "reloaded while the cell ran has lost it.  Of an --async cell that runs it is what has come so far.",
    "%parallel_output",
)
TRACEBACK = MagicParser(
    "%parallel_tb",
    "Show the full tracebacks of the last cell that failed on ranks; after a time-out or an interrupt,\n"
    "where each rank was.",
    "%parallel_tb -r 2",
)
TRACEBACK.add_argument("-r", "--ranks", type=RankSpec.parse, metavar="SPEC", help="only of these ranks")
DEBUG = MagicParser(
    "%debug",
    "After a cell that failed on ranks: open a debugger (pdb) in the frames of the rank that failed first,\n"
    "or of the rank of -r.  Its prompt names the rank; q ends it, and so does an interrupt.  Operations\n"
    "between ranks are refused there.  A rank keeps its frames until its next cell, if they hold at most\n"
    "256 MiB.  After other errors, and with code, this is IPython's own %debug.",
    "%debug\n%debug -r 2",
)
DEBUG.add_argument("-r", "--ranks", type=RankSpec.parse, metavar="R", help="the rank")
RACES = MagicParser(
    "%parallel_races",
    "Show again what --check-races has found in the last cell, and return it: its `races` are empty without\n"
    "a race.  It is an error if that cell was not checked.",
    "report = %parallel_races\nassert not report.races, report",
)
PROFILE = MagicParser(
    "%parallel_profile",
    "Show where the time of the last cell with --profile, or nbp.map(..., profile=True), has gone: for each\n"
    "line of the cell, and of functions that it calls, how long ranks computed, waited and moved data.",
    "%%parallel --profile\ntotal = all_reduce(work())\n\n%parallel_profile",
)
TIMELINE = MagicParser(
    "%parallel_timeline",
    "Show what each rank did when in the last cell: computing, waiting (and for which rank), moving data.\n"
    "With --save: write it as Chrome trace events, which ui.perfetto.dev opens.  With --from and --to: of\n"
    "these seconds alone, with their sums.",
    "%parallel_timeline\n%parallel_timeline --from 2 --to 4\n%parallel_timeline --save trace.json",
)
TIMELINE.add_argument(
    "--from", dest="begin", type=arguments.moment, metavar="S", help="begin with this second of the cell"
)
TIMELINE.add_argument(
    "--to", dest="end", type=arguments.seconds, metavar="S", help="end with this second of the cell"
)
TIMELINE.add_argument("--save", metavar="FILE", help="write the file instead; only a trace is overwritten")
SCALING = MagicParser(
    "%parallel_scaling",
    "Show again how much faster more ranks were (--scaling), and return it: counts, seconds, speedup,\n"
    "efficiency, and serial, the share of the work that is not divided (Amdahl's law).",
    "%parallel_scaling",
)
DRAW = MagicParser(
    "%parallel_draw",
    "Draw what variables hold on each rank now: the first numbers of arrays and lists, words for the rest.\n"
    "A number that only one rank has is in the colour of that rank.\n\n"
    "  %%parallel --draw x    before and after a cell: a number keeps the colour of the rank that had it\n"
    "                         before, and a new one is outlined",
    "%parallel_draw x, y",
    words="[-r SPEC] NAME [NAME ...]",
)
DRAW.add_argument("-r", "--ranks", type=RankSpec.parse, metavar="SPEC", help=_RANKS)


def parse_draw(line: str) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Return the flags of ``%parallel_draw`` and its names; UsageError if there is none."""
    options, words = DRAW.parse_head(line)
    if not words:
        DRAW.error("which variables? name them, as in %parallel_draw x, y")
    try:
        return options, arguments.names(words.replace(" ", ","))
    except argparse.ArgumentTypeError as error:
        DRAW.error(str(error))


PANEL = MagicParser(
    "%parallel_panel",
    "Show what the ranks do while they do it: which rank the others wait for, on which line, for how long;\n"
    "how much of the cell each rank computed, waited and moved data; and the shared memory.\n"
    "It is renewed with every cell and saved with the notebook.  %parallel_stop closes it too.",
    "%parallel_panel",
)
PANEL.add_argument("--close", action="store_true", help="close it; what it showed last stays")
