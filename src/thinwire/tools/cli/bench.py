"""`thinwire bench`: run a benchmark, print its table, write its record."""

import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import torch
import typer

from thinwire.codecs import codec
from thinwire.errors import CodecError
from thinwire.qat.lsq import BITS
from thinwire.tools.bench import (
    codec as codec_bench,
    collectives as collectives_bench,
    kernels as kernels_bench,
    link as links,
    qat as qat_bench,
    replicas as replicas_bench,
    tasks,
    train as train_bench,
)
from thinwire.tools.bench.data import DISTRIBUTIONS
from thinwire.tools.bench.qat import METHODS
from thinwire.tools.bench.record import BenchError, Record, as_csv, dumps, write
from thinwire.tools.cli import flags, screen
from thinwire.tools.cli.flags import Device
from thinwire.tools.report import tables

app = typer.Typer(
    cls=screen.Commands,
    help="Measure codecs, kernels, collectives and training. A record holds every number with its conditions.",
    epilog="\b\nExample:\n  thinwire bench codec --quick\n  thinwire bench train --json train.json --csv train.csv",
    no_args_is_help=True,
    rich_markup_mode=None,
)
MOST = 1 << 60  # elements; torch cannot count more of them
LINK = "A shaped link for every rank, such as 1gbit, 20mbit+50ms or 20mbit+50ms+1%; needs root."
KERNEL_NUMEL = "Elements; default 25 million, GPU 2**27; quick, or the reference, 2**20."
FLOATS = "Floats; default 25 million, 8 million below 1gbit, quick 2**18; nccl 1000 to 64 million."
VERBS = f"Among {', '.join(collectives_bench.VERBS)}; default all_reduce, nccl ddp_step too."
_BOTH = [",".join(codecs) for codecs in (collectives_bench.CODECS, collectives_bench.NCCL_CODECS)]
CALL_CODECS = "Codecs, auto, plain; default {}, nccl {}.".format(*_BOTH)
TASK = "digits, gpt, wide and bytes for losses, mlp for times."
PARALLEL = "Gradients of ddp; of fsdp2, and weights; outer gradients of diloco; default ddp, bytes simulated."
OPTIMIZER = "Default adam, for mlp sgd, for bytes adamw, which has muon besides."
SEEDS = "Runs of each codec; default 5, gpt and wide 3, bytes and quick 2, mlp 1."
MINUTES = "Begin no simulated run that would end later."

TaskName = StrEnum("TaskName", ["digits", "gpt", "mlp", "wide", "bytes"])
Size = StrEnum("Size", ["250k", "3m", "30m", "124m"])
TrainOptimizer = StrEnum("TrainOptimizer", ["adam", "sgd", "adamw", "muon"])
Parallel = StrEnum("Parallel", ["ddp", "fsdp2", "diloco", "simulated"])
Backend = StrEnum("Backend", ["gloo", "nccl"])
Words = list[str] | None  # of a flag that may be repeated, and hold several with commas


def _text(text: str, metavar: str = "A,B") -> Any:
    return typer.Option(metavar=metavar, help=text)


def _count(text: str, least: int = 1, most: int | None = None) -> Any:
    return typer.Option(min=least, max=most, metavar="N", help=text)


Codecs = Annotated[Words, _text("Codecs such as int8,int4:block=32,mode=affine; may be repeated.")]
LinkRate = Annotated[str | None, _text(LINK, "RATE")]
Json = Annotated[str | None, _text('Write the record there; "-" is standard output, with no table.', "FILE")]
Csv = Annotated[str | None, _text('Write rows and conditions as CSV; "-" is standard output, with no table.', "FILE")]
DeviceOption = Annotated[Device, typer.Option(help="Where the tensors are.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes and few rounds: seconds, and rougher numbers.")]


@app.command("codec")
def codec_command(
    codecs: Codecs = None,
    distributions: Annotated[Words, _text(f"Among {', '.join(DISTRIBUTIONS)}; default all.")] = None,
    numel: Annotated[int | None, _count("Elements; default 2**22, quick 2**18.", most=MOST)] = None,
    json: Json = None,
    csv: Csv = None,
    quick: Quick = False,
    whole: screen.All = False,
) -> None:
    """Bits on the wire and what they lose (NMSE), on six distributions.

    dB is the distance to the rate-distortion bound of a Gaussian at all bits of the wire, headers and scales included.
    The gradient is that of a small network on scikit-learn's digits and has its own length.

    \b
    Example:
      thinwire bench codec --codecs int8,int4:block=32,lloyd4 --distributions gaussian,hetero --json codec.json
    """
    chosen = flags.codecs(codecs, codec_bench.CODECS)
    names = flags.words(distributions, DISTRIBUTIONS, "--distributions") or list(DISTRIBUTIONS)
    size = numel or (codec_bench.QUICK_NUMEL if quick else codec_bench.NUMEL)
    _deliver(partial(codec_bench.run, chosen, names, size), json, csv)


@app.command("kernels")
def kernels_command(
    device: DeviceOption,
    codecs: Codecs = None,
    numel: Annotated[Words, _text(KERNEL_NUMEL, "N,M")] = None,
    ops: Annotated[Words, _text(f"Among {', '.join(kernels_bench.ASKED)}; default all but the last.")] = None,
    dtypes: Annotated[Words, _text(f"Among {', '.join(kernels_bench.DTYPES)}; default the first two.")] = None,
    threads: Annotated[Words, _text("CPU threads, each measured; default 1 and all.", "N,M")] = None,
    parts: Annotated[Words, _text(f"Among {', '.join(kernels_bench.PARTS)}; default codecs, on a GPU all.")] = None,
    json: Json = None,
    csv: Csv = None,
    quick: Quick = False,
    whole: screen.All = False,
) -> None:
    """What the kernels cost beside a plain copy and torch eager.

    All are timed by turns in one run; medians are compared. ×copy is the kernel's time over that of copying a tensor
    of the same size and dtype; share is that of a copy of as many bytes as the kernel cannot avoid, over the kernel's;
    ×eager is torch eager's time over the kernel's (above 1: the kernel is faster), on at most 2**21 elements (GPU:
    2**24). decode_sum and recode read the wires of 4 ranks, on a GPU of 8. On the CPU bfloat16 is measured for int8 and
    lloyd4 only; with --numel a GPU measures the first part only, with --codecs or --ops the first two.

    \b
    Parts:
      codecs   every codec and op at one size
      sizes    a few codecs on tensors of 1 MB to 1 GB
      replay   encode, recode and decode of a small message, as one CUDA graph
      rivals   torch.compile of the reference, and the functions of torch's quantisation hooks

    \b
    Example:
      thinwire bench kernels --device cpu --codecs int8,lloyd4 --threads 1
      thinwire bench kernels --device cuda --parts sizes,replay --json kernels.json
    """
    flags.check_device(device)
    run = partial(
        kernels_bench.run,
        device.value,
        codecs=flags.codecs(codecs, ()),
        numels=flags.counts(numel, "--numel") or (),
        ops=flags.words(ops, kernels_bench.ASKED, "--ops") or (),
        dtypes=flags.words(dtypes, kernels_bench.DTYPES, "--dtypes") or (),
        threads=flags.counts(threads, "--threads") or (),
        parts=flags.words(parts, kernels_bench.PARTS, "--parts") or (),
        quick=quick,
    )
    _deliver(run, json, csv)


@app.command("collectives")
def collectives_command(
    world: Annotated[Words, _text("Numbers of ranks, each measured; default 2,4.", "N,M")] = None,
    link: LinkRate = None,
    nodes: Annotated[int | None, _count("With --link: ranks share so many links.", least=2)] = None,
    backend: Annotated[Backend, typer.Option(help="gloo on the CPU, or nccl on GPUs.")] = Backend.gloo,
    hosts: Annotated[Words, _text("With nccl: hosts that it takes the ranks for; default 1.", "N,M")] = None,
    numel: Annotated[Words, _text(FLOATS, "N,M")] = None,
    verbs: Annotated[Words, _text(VERBS)] = None,
    codecs: Annotated[Words, _text(CALL_CODECS)] = None,
    rounds: Annotated[int | None, _count("Default: 5 or more, as time allows.")] = None,
    json: Json = None,
    csv: Csv = None,
    quick: Quick = False,
    whole: screen.All = False,
) -> None:
    """What a collective takes beside torch's own in fp32 and bf16.

    All are run by turns in one run, by ranks of one thread each on this machine; a round takes as long as its
    slowest rank, and medians are compared. ×plain and ×bf16 are torch's time over thinwire's (above 1: thinwire is
    faster). bytes are what a rank sends; limit is the share of the link's rate that the payload reaches; CPU is the
    processor time of a rank. The codec auto is int8 where it pays, plain is thinwire's uncompressed path.

    With --link every rank has a network namespace of its own, and its bytes are counted at the interface. With --nodes
    the ranks of a node share one, as on machines of several GPUs; bytes are then what a node sends to others. Codecs
    may then be pairs, inside a node and across: int8/lloyd4.

    With --backend nccl sums are averages, every codec is run in both algorithms, and host ms is the time until a
    call returns (steady ms: of calls in a row). GPU ms, of kernels and copies, and launches are counted by torch's
    profiler in calls that are not timed. More ranks than GPUs share them: that needs NCCL 2.30 or newer, and MPS,
    without which ranks take turns of milliseconds. With --hosts NCCL takes equally many ranks each for machines of
    their own and sends over TCP between them. The link is memory on a shared GPU, cards where each rank has one,
    and tcp. The verb ddp_step is a whole step of DDP on a network of 1.1 million parameters; codecs below four bits
    have classic feedback, and EF21. The verb fsdp_step is one of FSDP2 on a network of 25 million, with weights in
    int8; bf16 there is parameters and reduction.

    \b
    Example:
      thinwire bench collectives --backend nccl --world 2,4 --hosts 1,2,4 --json nccl.json
      thinwire bench collectives --world 2 --numel 1024,65536,4194304 --codecs auto
      sudo thinwire bench collectives --world 4 --nodes 2 --link 100mbit --codecs lloyd4,bf16/lloyd4
    """
    worlds = flags.counts(world, "--world") or list(collectives_bench.WORLDS)
    if not 2 <= min(worlds) <= max(worlds) <= links.MOST_HOSTS:
        raise typer.BadParameter(f"a world has 2 to {links.MOST_HOSTS} ranks", param_hint="--world")
    sizes = flags.counts(numel, "--numel")
    if backend is Backend.nccl:
        ours = {"--link": link, "--nodes": nodes}
        _refuse(ours, "is for gloo's ranks: with --backend nccl take --hosts")
        spread = flags.counts(hosts, "--hosts") or [1]
        some = flags.words(verbs, (*collectives_bench.VERBS, *collectives_bench.STEPS), "--verbs")
        names = _names(codecs or list(collectives_bench.NCCL_CODECS))
        on_nccl = partial(collectives_bench.run_on_nccl, worlds, spread, sizes, codecs=names)
        run = partial(on_nccl, verbs=some or collectives_bench.NCCL_VERBS, rounds=rounds, quick=quick)
    else:
        _refuse({"--hosts": hosts}, "is for NCCL's ranks: without --backend nccl take --link and --nodes")
        some = flags.words(verbs, collectives_bench.VERBS, "--verbs") or ["all_reduce"]
        names = _names(codecs or list(collectives_bench.CODECS))
        shaped = flags.shaped(link)
        gloo = partial(collectives_bench.run, worlds, shaped, sizes, some, names, rounds, quick)
        run = partial(gloo, nodes=nodes)
    _deliver(run, json, csv)


@app.command("train")
def train_command(
    task: Annotated[TaskName, typer.Option(help=TASK)] = TaskName.digits,
    parallel: Annotated[Parallel | None, typer.Option(help=PARALLEL)] = None,
    world: Annotated[int | None, _count("Ranks; default 4, simulated 8.", least=2, most=links.MOST_HOSTS)] = None,
    codecs: Annotated[Words, _text("Codecs, and the other names below; default by task.")] = None,
    optimizer: Annotated[TrainOptimizer | None, typer.Option(help=OPTIMIZER)] = None,
    seeds: Annotated[int | None, _count(SEEDS)] = None,
    link: LinkRate = None,
    steps: Annotated[int | None, _count("Of a run; default by task.")] = None,
    batch: Annotated[int | None, _count("Rows of a rank's batch; default by task.")] = None,
    every: Annotated[Words, _text("Of diloco: steps between two rounds; default 10,30.", "N,N")] = None,
    device: Annotated[Device | None, typer.Option(help="Of simulated replicas; default cpu.")] = None,
    size: Annotated[Size | None, typer.Option(help="Weights of the network of bytes; default 30m.")] = None,
    resume: Annotated[str | None, _text("Keep simulated runs in that file, and run what it lacks.", "FILE")] = None,
    minutes: Annotated[float | None, typer.Option(metavar="M", help=MINUTES)] = None,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile for simulated replicas.")] = False,
    json: Json = None,
    csv: Csv = None,
    quick: Quick = False,
    whole: screen.All = False,
) -> None:
    """What compressed gradients, and weights, do to the loss, and to the time of a step.

    Every codec trains from the same seeds on the same batches as uncompressed fp32 (none), which is always run. log
    ratio is ln(loss / fp32's), the mean over seeds; the title says what another seed does to fp32. val. gap is the
    validation loss less fp32's, in nats.

    Codecs may name their error feedback: lloyd2@none, @classic, @ef21; and with @none+moments that gradients travel in
    Adam's units. There are also auto, auto:2.5, the
    controls sign and int2, which ought to fail, and torch's own hooks: bf16, powersgd1, powersgd2, powersgd4.

    With --parallel fsdp2 every block is sharded, and a name says how gradients and weights travel: lloyd4 (weights as
    they are), lloyd4/int8 (gradients, then weights), lloyd4/lloyd4@replica (weights as differences to a copy on every
    rank). Weights of less than 8 bits without @replica are controls. torch's own are bf16, which gathers and sums in
    bf16 and computes in fp32, and mixed, FSDP2's MixedPrecisionPolicy in bf16, which computes in it too. Losses are
    those of the weights as they are gathered.

    With --parallel diloco ranks train alone and average how far they have moved, every 10 and every 30 steps. A codec
    is compared with outer gradients in fp32 (none) of as many steps between rounds; DDP in fp32 takes as many steps
    beside them. Time and bytes of a round are dealt out over the steps between two.

    With --parallel simulated the replicas of one network live in this process, on a CPU or one GPU, and their gradients
    go through the same codecs, feedback and kernels; a GPU computes in bf16. Runs may be split over several calls with
    --resume and --minutes: the record has the codecs of which all seeds are done.

    \b
    Tasks:
      digits   a small network on scikit-learn's digits, every rank with labels of its own
      gpt      a small transformer on the characters of Python's help pages
      mlp      25 million weights: what a step takes, and how far that is from compute plus bytes over the link's rate
      wide     a million weights on digits of all labels: what sites reach over a slow link
      bytes    a transformer of 250k to 124m weights on the sources of Python and torch; simulated

    Times are medians of steps taken by turns, by gloo ranks of one thread each on this machine.

    \b
    Example:
      thinwire bench train --task gpt --codecs int8,lloyd2@none,lloyd2@ef21 --json gpt.json
      sudo thinwire bench train --task mlp --link 1gbit --codecs int8,lloyd4,auto,powersgd1
      sudo thinwire bench train --parallel fsdp2 --task mlp --link 1gbit --batch 2 --codecs lloyd4/int8,mixed
      thinwire bench train --parallel diloco --task gpt --optimizer muon --every 30 --codecs lloyd4,lloyd2
      sudo thinwire bench train --parallel diloco --task wide --every 30 --codecs int4 --link 20mbit+50ms
      thinwire bench train --task bytes --size 30m --device cuda --resume runs.jsonl --minutes 8 --json bytes.json
    """
    named = flags.specs(codecs) or None
    kind = optimizer.value if optimizer else None
    if parallel is not Parallel.diloco:
        _refuse({"--every": every}, "is for --parallel diloco")
    apart = flags.counts(every, "--every")
    usual = Parallel.simulated if task is TaskName.bytes else Parallel.ddp
    chosen = parallel or usual
    if task is TaskName.bytes and chosen is not usual:
        raise typer.BadParameter(
            "bytes is trained by simulated replicas: leave --parallel out", param_hint="--parallel"
        )
    if chosen is Parallel.simulated:
        _refuse({"--link": link}, "simulated replicas have no link")
        _refuse({"--size": size if task is not TaskName.bytes else None}, "goes with --task bytes")
        flags.check_device(device)
        flags.writable(resume, "--resume")
        with screen.usage_errors(None, BenchError, CodecError):
            found = tasks.find(task.value, size, quick=quick, seeds=seeds, steps=steps, rows=batch)
            where = torch.device(device.value if device else "cpu")
            plan = replicas_bench.plan_of(found, named, kind, world or replicas_bench.WORLD, where, compiled=compile)
        _deliver(partial(replicas_bench.run, plan, resume, minutes), json, csv)
        return
    only = {"--device": device, "--size": size, "--resume": resume, "--minutes": minutes, "--compile": compile or None}
    _refuse(only, "goes with --parallel simulated")
    with screen.usage_errors("--codecs", CodecError):
        train_bench.lineup(task.value, named, chosen.value, apart)
    ranks = world or train_bench.WORLD
    run = partial(train_bench.run, task.value, ranks, named, kind, seeds, flags.shaped(link), steps, quick)
    _deliver(partial(run, parallel=chosen.value, batch=batch, every=apart), json, csv)


@app.command("qat")
def qat_command(
    parts: Annotated[Words, _text(f"Among {', '.join(qat_bench.PARTS)}; default all.")] = None,
    methods: Annotated[Words, _text(f"To train, among {', '.join(METHODS)}; default all.")] = None,
    bits: Annotated[Words, _text("Of weights and activations alike; default 2,3,4,8, quick 2.", "N,M")] = None,
    seeds: Annotated[int | None, _count("Trainings of each method; default 5, quick 2.")] = None,
    device: DeviceOption = Device.cpu,
    numel: Annotated[int | None, _count("Of the speed part; default 2**22, GPU 2**25.", most=MOST)] = None,
    json: Json = None,
    csv: Csv = None,
    quick: Quick = False,
    whole: screen.All = False,
) -> None:
    """What fake quantisation costs, and what networks trained with it reach.

    \b
    Parts:
      speed   forward and backward, per tensor and per channel, in fp32 and bf16
      train   a network of three convolutions on scikit-learn's digits, trained in fp32, then on at few bits

    Speed: all are timed by turns in one run; medians are compared. ×floor is the time over that of reading and writing
    each tensor once, by plain copies; ×torch is the time of torch's own learnable op over ours (above 1: ours is
    faster). Bytes are allocated at the peak beyond the input, the output and the gradient of the output, per element.

    Training: all layers are quantised; every method has the same recipe, and the same batches from the same start.
    torch_learnable is torch's own module, learnable is ours by its names. Controls ought to fail: absmax_ste learns no
    scales, lsq_absmax_init starts where nothing is clipped, lsq_no_grad_scale lacks the paper's factor. lsq_floor_alone
    has thinwire's floor instead of the factor, lsq_no_floor lacks it. All five but absmax_ste are trained at the fewest
    bits only, unless asked for.

    \b
    Example:
      thinwire bench qat --parts train --methods lsq,torch_learnable --bits 2,4 --seeds 3
      thinwire bench qat --parts speed --device cuda --json qat.json
    """
    flags.check_device(device)
    pieces = flags.words(parts, qat_bench.PARTS, "--parts")
    chosen = flags.words(methods, METHODS, "--methods")
    widths = flags.counts(bits, "--bits")
    if not all(width in BITS for width in widths or ()):
        raise typer.BadParameter(f"quantisers have {BITS[0]} to {BITS[-1]} bits", param_hint="--bits")
    if pieces == ["speed"]:
        _refuse(
            {"--methods": methods, "--bits": bits, "--seeds": seeds}, "is of the part train, which --parts leaves out"
        )
    if pieces == ["train"]:
        _refuse({"--numel": numel}, "is of the part speed, which --parts leaves out")
    run = partial(qat_bench.run, device.value, pieces, chosen, widths, seeds, numel, quick)
    _deliver(run, json, csv)


def _refuse(given: Mapping[str, object], why: str) -> None:
    """No flag is accepted and then ignored."""
    for flag, value in given.items():
        if value is not None:
            raise typer.BadParameter(why, param_hint=flag)


def _names(given: list[str]) -> list[str]:
    """Codecs and pairs of them as they spell themselves, and the two names beside them."""
    pair = collectives_bench.PAIR
    specs = flags.specs(given)
    with screen.usage_errors("--codecs", CodecError):
        for place, spec in enumerate(specs):
            if spec not in (collectives_bench.AUTO, collectives_bench.PLAIN):
                specs[place] = pair.join(str(codec(part)) for part in spec.split(pair))
    return list(dict.fromkeys(specs))


@links.sigterm_as_ctrl_c()
def _deliver(measure: Callable[..., Record], json: str | None, csv: str | None) -> None:
    """Measure, write the record, print the table. After Ctrl-C the finished rows are kept, and the status is 130.

    What a row notes goes to standard error; where one has no time, or a file could not be written, the status is 1.
    """
    flags.writable(json, "--json")
    flags.writable(csv, "--csv")
    if json is not None and csv is not None and os.path.realpath(json) == os.path.realpath(csv):
        raise typer.BadParameter(f"--json writes to {json} already; name another file", param_hint="--csv")
    with screen.plain_errors(), screen.usage_errors(None, BenchError):
        record, status = screen.measured(measure)
    files = {path: partial(write, record, path, form) for path, form in ((json, dumps), (csv, as_csv)) if path}
    written = screen.write_all(files)  # before the table, whose reader may go away
    if "-" not in (json, csv):
        tables.show(record, screen.console())
    for row in record.rows:
        if row.get("note"):
            what = " ".join(str(row[name]) for name in ("op", "codec", "dtype") if name in row)
            typer.echo(f"{what}, {row['numel']} elements: {row['note']}", err=True)
    failed = any(row.get("note") and row.get("ms_p50") is None for row in record.rows)
    raise typer.Exit(status or int(failed) if written else 1)
