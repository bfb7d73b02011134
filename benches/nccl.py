#!/usr/bin/env python3
"""Several NCCL ranks on one GPU: that every layout is the run that threads make, that limits hold, that runs restart.

    NCCL_MULTI_RANK_GPU_ENABLE=1 ESPALIER_NCCL=/path/to/libnccl.so.2 python3 benches/nccl.py
    python3 benches/nccl.py --only pipeline --ranks 2

NCCL 2.30 and later joins several ranks on one GPU where it is asked to by that variable; the Python packages
nvidia-nccl-cu12 and -cu13 have it. Ranks share the GPU by time slices: this shows what is right, not what is fast. The
binary is target/release/espalier unless ESPALIER says otherwise; the conformance suite of `comm` is run too where
ESPALIER_COMM_TESTS names its test program (`cargo test -p espalier-comm --test comm --no-run`). Standard library only.
Prints a table, and ends with 1 where a row is wrong. Without a GPU or such a NCCL it says so and ends well.
"""
import argparse, json, os, random, re, shutil, signal, socket, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BINARY = os.environ.get("ESPALIER", os.path.join(ROOT, "target/release/espalier"))
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

GPT = """seed = 3
[model]
name = "gpt"
layers = 4
heads = 4
width = 64
context = 32
tied = {tied}
[data]
kind = "arithmetic"
count = 600
[train]
steps = 4
batch = 8
micro_batches = 4
eval_every = 4
eval_samples = 16
[optimizer]
name = "adamw"
[checkpoint]
every = 2
[parallel]
timeout_s = 60
[device]
kind = "cuda"
"""
IMAGES = """seed = 3
[model]
name = "custom"
layers = [
    {{ type = "conv", output = 16, kernel = 3, padding = 1, bias = false }},
    {{ type = "batch_norm" }}, {{ type = "relu" }}, {{ type = "max_pool", kernel = 2 }},
    {{ type = "conv", output = 32, kernel = 3, padding = 1, bias = false }},
    {{ type = "batch_norm" }}, {{ type = "relu" }}, {{ type = "max_pool", kernel = 2 }},
    {{ type = "conv", output = 32, kernel = 3, padding = 1 }}, {{ type = "relu" }},
    {tail}
]
[data]
kind = "shapes"
count = 300
[train]
steps = 4
batch = 16
eval_every = 4
eval_samples = 16
[parallel]
timeout_s = 60
[device]
kind = "cuda"
tf32 = false
"""
TILES = IMAGES.format(tail='{ type = "global_avg_pool" }, { type = "linear" },')
DEALT = IMAGES.format(tail='{ type = "flatten" }, { type = "linear", output = 128 }, { type = "relu" }, { type = "linear" },').replace('    { type = "batch_norm" }, { type = "relu" }, ', '    { type = "relu" }, ')
TIED, LOOSE = GPT.format(tied="true"), GPT.format(tied="false")

SNIP = ["prune.method=snip", "prune.sparsity=0.9"]
# Alike many weights of every layer: the plan knows all bytes before anything runs.
RANDOM = ["prune.method=random", "prune.scope=layer", "prune.sparsity=0.9"]
BF16 = ["train.precision=bf16"]
ONE = ["train.micro_batches=1"]
# Micro-batches and backward passes in an order that no schedule of ours has.
ORDER = """name mixed
micro-batches 4
batches 1
updates flush
pipeline 0 1
F2 a2>1 F0 a0>1 F3 a3>1 g2<1 B2 F1 a1>1 g3<1 B3 g0<1 B0 g1<1 B1 reduce step
a2<0 F2 B2 g2>0 a0<0 F0 a3<0 F3 B3 g3>0 B0 g0>0 a1<0 F1 B1 g1>0 reduce step
"""
# name, run file, settings, ranks
LAYOUTS = [
    ("data", TIED, ["parallel.data=2", *ONE], 2),
    ("data, snip, bf16", TIED, ["parallel.data=2", "train.micro_batches=2", *SNIP, *BF16], 2),
    ("data, zero 1", TIED, ["parallel.data=2", "parallel.zero=1", *ONE], 2),
    ("data, zero 2, snip, bf16", TIED, ["parallel.data=2", "parallel.zero=2", "train.micro_batches=2", *SNIP, *BF16], 2),
    ("data, zero 3", TIED, ["parallel.data=2", "parallel.zero=3", *ONE], 2),
    ("data, zero 3, random, bf16", TIED, ["parallel.data=2", "parallel.zero=3", "train.micro_batches=2", *RANDOM, *BF16], 2),
    ("data, zero 3, snip, bf16, writes", TIED, ["parallel.data=2", "parallel.zero=3", "train.micro_batches=2", 'sample.prompt="12+34="', "sample.tokens=8", *SNIP, *BF16], 2),
    ("data, zero 3, rigl, recomputed", TIED, ["parallel.data=2", "parallel.zero=3", "prune.method=rigl", "prune.sparsity=0.8", "prune.every=2", "train.recompute=block", *ONE], 2),
    ("data, local SGD", TIED, ["parallel.data=2", "parallel.average_every=2", *ONE], 2),
    ("tensor, sequence", TIED, ["parallel.tensor=2", "parallel.sequence=true", *ONE], 2),
    ("tensor, rigl, bf16", TIED, ["parallel.tensor=2", "prune.method=rigl", "prune.sparsity=0.8", "prune.every=2", *ONE, *BF16], 2),
    *[(f"pipeline, {name}", LOOSE, ["parallel.pipeline=2", f"parallel.schedule={name}"], 2)
      for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "chimera", "chimera-doubling", "axonn", "pipedream", "2bw")],
    ("pipeline, a schedule file", LOOSE, ["parallel.pipeline=2", "parallel.schedule_file=order.txt"], 2),
    ("pipeline, tied, snip, bf16, writes", TIED, ["parallel.pipeline=2", 'sample.prompt="12+34="', "sample.tokens=8", *SNIP, *BF16], 2),
    ("pipeline, gradual, zb-h1", TIED, ["parallel.pipeline=2", "parallel.schedule=zb-h1", "prune.method=gradual", "prune.end=3", "prune.every=1"], 2),
    ("pipeline, wanda, bf16", TIED, ["parallel.pipeline=2", "prune.method=wanda", "prune.sparsity=0.7", *BF16], 2),
    ("tensor, wanda", TIED, ["parallel.tensor=2", "prune.method=wanda", "prune.sparsity=0.7", *ONE], 2),
    ("spatial", TILES, ["parallel.spatial=2"], 2),
    ("spatial, bf16, snip", TILES, ["parallel.spatial=2", *SNIP, *BF16], 2),
    ("integrated, tensor", DEALT, ["parallel.tensor=2", 'parallel.integrated=["layers.9"]'], 2),
    ("integrated, auto", DEALT, ["parallel.tensor=2", "parallel.integrated=auto"], 2),
    ("data 4, f32", TIED, ["parallel.data=4", *ONE], 4),
    ("data 4, zero 2, snip, bf16", TIED, ["parallel.data=4", "parallel.zero=2", *ONE, *SNIP, *BF16], 4),
    ("data 2 x pipeline 2, zero 1", TIED, ["parallel.data=2", "parallel.pipeline=2", "parallel.zero=1", "train.micro_batches=2"], 4),
    ("data 4, zero 3", TIED, ["parallel.data=4", "parallel.zero=3", *ONE], 4),
    ("data 4, zero 3, random, bf16", TIED, ["parallel.data=4", "parallel.zero=3", *ONE, *RANDOM, *BF16], 4),
    ("data 2 x pipeline 2, zero 3", TIED, ["parallel.data=2", "parallel.pipeline=2", "parallel.zero=3", "train.micro_batches=2"], 4),
    ("data 2 x tensor 2, zero 3", TIED, ["parallel.data=2", "parallel.tensor=2", "parallel.sequence=true", "parallel.zero=3", *ONE], 4),
    ("pipeline 4, chimera", LOOSE, ["parallel.pipeline=4", "parallel.schedule=chimera"], 4),
    ("pipeline 4, interleaved of 1 layer", LOOSE, ["parallel.pipeline=4", "parallel.schedule=interleaved", "model.layers=8"], 4),
    ("pipeline 2 x tensor 2, 1f1b", TIED, ["parallel.pipeline=2", "parallel.tensor=2"], 4),
    ("data 2 x tensor 2, zero 1", TIED, ["parallel.data=2", "parallel.tensor=2", "parallel.zero=1", *ONE], 4),
    ("spatial 2 x 2", TILES, ["parallel.spatial=[2,2]"], 4),
    ("data 4, local SGD", TIED, ["parallel.data=4", "parallel.average_every=2", *ONE], 4),
]


def free_port():
    """One that nobody listens on, below those that systems give to outgoing connections."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) != 0:
                return port


def clean():
    return {name: value for name, value in os.environ.items() if name not in LAUNCHED}


def arguments(file, settings, out, *more):
    sets = [word for setting in settings for word in ("--set", setting)]
    return [BINARY, "train", file, *sets, "--out", out, "--json", *more]


def summary(text):
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


class Processes:
    """The ranks of a run, each a process; with what they said and when they ended."""

    def __init__(self, command, ranks, only=None):
        port = str(free_port())
        self.begin, self.children, self.files = time.monotonic(), {}, {}
        for rank in range(ranks) if only is None else only:
            env = {**clean(), "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.files[rank] = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]
            self.children[rank] = subprocess.Popen(command, env=env, stdout=self.files[rank][0], stderr=self.files[rank][1])

    def wait(self, seconds, ranks=None):
        """Exit codes of these ranks, None for one that is still there; and when the last of them ended."""
        until, ranks = time.monotonic() + seconds, list(self.children if ranks is None else ranks)
        ended = 0.0
        for rank in ranks:
            try:
                self.children[rank].wait(max(0.01, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            ended = time.monotonic()
        codes = [self.children[rank].poll() for rank in ranks]
        return codes, ended

    def said(self, rank):
        texts = []
        for file in self.files[rank]:
            file.seek(0)
            texts.append(file.read())
        return texts

    def end(self):
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
                child.wait()


def by_threads(file, settings, out, *more):
    done = subprocess.run(arguments(file, settings, out, *more), env=clean(), capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"threads: {done.stderr.strip().splitlines()[-1:]}")
    return summary(done.stdout)


def by_nccl(file, settings, out, ranks, *more):
    run = Processes(arguments(file, settings, out, *more), ranks)
    codes, _ = run.wait(120)
    texts = {rank: run.said(rank) for rank in run.children}
    run.end()
    if codes != [0] * ranks:
        words = [texts[rank][1].strip().splitlines()[-1:] for rank in texts]
        raise RuntimeError(f"NCCL: exit codes {codes}, {words}")
    return summary(texts[0][0])


def same(a, b):
    """Where two runs differ."""
    wrong = [field for field in ("weights_hash", "loss", "validation", "kept") if a[field] != b[field]]
    return ", ".join(f"{field}: {a[field]} by threads, {b[field]} by NCCL" for field in wrong)


def bytes_of(file, settings, out, run):
    """Weights at rest and gradients of a rank, and what it sends in a step, of a run beside what is planned: what
    differs, and both in words. Of a method that scores weights only the run knows what each layer keeps."""
    planned = by_threads(file, settings, out, "--dry-run")
    most = max(planned["picture"]["rows"], key=lambda row: sum(kind["bytes"] for kind in row["sends"].values()))
    pairs = [(f"{name} of a rank", run["memory"][name]["measured"], run["memory"][name]["predicted"]) for name in ("weights", "gradients", "optimizer")]
    pairs.append(("sent in a step", sum(run["bytes_sent"].values()), sum(kind["bytes"] for kind in most["sends"].values())))
    words = ", ".join(f"{name} {measured:,} B (planned {predicted:,})" for name, measured, predicted in pairs)
    knows = not any(setting.startswith("prune.method=") and setting != "prune.method=random" for setting in settings)
    wrong = [name for name, measured, predicted in pairs if measured != predicted]
    return (f"{', '.join(wrong)}: {words}" if wrong and knows else None), words


def layouts(check, folder, chosen):
    for name, text, settings, ranks in LAYOUTS:
        if not chosen(name, ranks):
            continue
        file, order = os.path.join(folder, "run.toml"), os.path.join(folder, "order.txt")
        open(file, "w").write(text)
        open(order, "w").write(ORDER)
        settings = [setting.replace("order.txt", order) for setting in settings]

        def both():
            threads = by_threads(file, settings, os.path.join(folder, "threads"))
            begin = time.monotonic()
            nccl = by_nccl(file, settings, os.path.join(folder, "nccl"), ranks)
            words = f"{time.monotonic() - begin:.1f} s, loss {nccl['loss']:.6f}"
            wrong, planned = bytes_of(file, settings, os.path.join(folder, "planned"), nccl) if "zero 3" in name else (None, "")
            return same(threads, nccl) or wrong, f"{words}, {planned}" if planned else words

        check(f"{name} ({ranks} ranks)", both)
        for out in ("threads", "nccl"):
            shutil.rmtree(os.path.join(folder, out), ignore_errors=True)


CHAIN = [
    (["parallel.data=2", *ONE], 2), (["parallel.pipeline=2"], 2), (["parallel.tensor=2", *ONE], 2),
    (["parallel.data=2", "parallel.zero=2", *ONE], 2), (["parallel.pipeline=2", "parallel.schedule=zb-h1"], 2),
    (["parallel.data=4", "parallel.zero=3", *ONE], 4),
    (["parallel.data=2", "parallel.pipeline=2", "train.micro_batches=2"], 4),
]


def chain(check, folder):
    """One run that goes on from each layout on the next, its checkpoints written by one and read by the other."""
    file = os.path.join(folder, "run.toml")
    open(file, "w").write(TIED)

    def both():
        results = {}
        for how in ("threads", "nccl"):
            out = os.path.join(folder, f"chain-{how}")
            for leg, (settings, ranks) in enumerate(CHAIN):
                settings = [*settings, f"train.steps={2 * leg + 2}", "learning_rate.schedule=constant", *SNIP]
                more = ["--resume"] if leg else []
                results[how] = by_threads(file, settings, out, *more) if how == "threads" else by_nccl(file, settings, out, ranks, *more)
        return same(results["threads"], results["nccl"]) or None, f"{len(CHAIN)} layouts, 2 steps on each"

    check("a checkpoint goes through every layout", both)


def faults(check, folder):
    file = os.path.join(folder, "run.toml")
    open(file, "w").write(TIED)
    slow = ["train.steps=100000", "parallel.timeout_s=5", "checkpoint.every=0", "train.eval_every=0"]

    def gone(what, settings, seconds, words, send, within):
        def one():
            run = Processes(arguments(file, [*slow, *settings], os.path.join(folder, f"gone-{free_port()}")), 2)
            try:
                time.sleep(seconds)
                at = time.monotonic()
                if run.children[0].poll() is not None:
                    return f"ended before it was disturbed: {run.said(0)[1][-300:]}", ""
                send(run.children[1])
                codes, ended = run.wait(30, [0])
                if codes != [3]:
                    return f"exit code {codes[0]} of the rank that was left", ""
                said = run.said(0)[1].strip().splitlines()[-1]
                late = ended - at > within
                return (f"after {ended - at:.1f} s: {said}" if late or not re.search(words, said) else None), f"{ended - at:.1f} s: {said[:90]}"
            finally:
                run.children[1].send_signal(signal.SIGCONT) if run.children[1].poll() is None else None
                run.end()

        check(what, one)

    kill, stop = (lambda child: child.kill()), (lambda child: child.send_signal(signal.SIGSTOP))
    for axis, settings in (("data", ["parallel.data=2", *ONE]), ("pipeline", ["parallel.pipeline=2"]), ("tensor", ["parallel.tensor=2", *ONE])):
        gone(f"{axis}: a killed rank ends the other", settings, 9, r"rank 1 was lost", kill, 2.0)
        gone(f"{axis}: a stopped rank is named at the limit", settings, 9, r"waited 5\.\d s for rank 1 in ", stop, 6.5)
    for seconds in (0.4, 1.2, 2.0, 2.8):
        gone(f"a rank stopped {seconds} s after its start", ["parallel.pipeline=2"], seconds, r"rank 1", stop, 7.5)

    def alone():
        run = Processes(arguments(file, [*slow, "parallel.data=2", *ONE], os.path.join(folder, "alone")), 2, only=[0])
        codes, ended = run.wait(30)
        said = run.said(0)[1].strip().splitlines()[-1]
        run.end()
        wrong = codes != [3] or ended - run.begin > 8.5 or "for rank 1 at the rendezvous" not in said
        return (f"{codes}, {said}" if wrong else None), f"{ended - run.begin:.1f} s: {said[:90]}"

    check("a rank that never comes is named at the limit", alone)

    def failing():
        blocked = os.path.join(folder, "no-folder")
        open(blocked, "w").close()
        run = Processes(arguments(file, ["parallel.pipeline=2"], os.path.join(blocked, "run")), 2)
        codes, ended = run.wait(30)
        said = run.said(0)[1].strip().splitlines()[-1:]
        run.end()
        return (f"{codes}: {said}" if None in codes or 0 in codes else None), f"codes {codes}, {ended - run.begin:.1f} s"

    check("a rank that fails ends the other", failing)


def restarts(check, folder):
    file = os.path.join(folder, "run.toml")
    open(file, "w").write(TIED)
    settings = ["parallel.pipeline=2", "train.steps=60", "checkpoint.every=5", "parallel.timeout_s=20", "train.eval_every=0"]

    def children(pid):
        return [int(word) for word in open(f"/proc/{pid}/task/{pid}/children").read().split()]

    def one():
        whole = by_nccl(file, settings, os.path.join(folder, "whole"), 2)
        out = os.path.join(folder, "restarted")
        run = Processes(arguments(file, settings, out, "--max-restarts", "3"), 2)
        killed = 0
        for rank in (1, 0):
            newest = lambda: max((name for name in os.listdir(os.path.join(out, "checkpoints")) if name.startswith("step-")), default="") if os.path.isdir(os.path.join(out, "checkpoints")) else ""
            last, until = newest(), time.monotonic() + 60
            while newest() == last and time.monotonic() < until and run.children[0].poll() is None:
                time.sleep(0.02)
            for child in children(run.children[rank].pid):
                os.kill(child, signal.SIGKILL)
                killed += 1
        codes, _ = run.wait(150)
        texts = run.said(0)
        run.end()
        if codes != [0, 0] or killed != 2:
            return f"exit codes {codes}, {killed} killed, {texts[1].strip().splitlines()[-2:]}", ""
        return same(whole, summary(texts[0])) or None, f"{killed} ranks killed, {texts[1].count('restart ')} restarts of rank 0"

    check("--max-restarts: two killed ranks, the same weights", one)


def torchrun(check, folder):
    program = shutil.which("torchrun")
    if not program:
        print("skipped: torchrun is not on the path")
        return
    file = os.path.join(folder, "run.toml")
    open(file, "w").write(TIED)

    def one():
        settings = ["parallel.data=2", "parallel.pipeline=2", "train.micro_batches=2", *SNIP]
        threads = by_threads(file, settings, os.path.join(folder, "by-threads"))
        command = [program, "--no-python", "--nproc-per-node", "4", "--master-port", str(free_port())]
        done = subprocess.run([*command, *arguments(file, settings, os.path.join(folder, "by-torchrun"))],
                              env=clean(), capture_output=True, text=True, timeout=180)
        if done.returncode != 0:
            return f"exit code {done.returncode}: {done.stderr[-400:]}", ""
        return same(threads, summary(done.stdout)) or None, "4 ranks"

    check("torchrun starts the ranks", one)


def suite(check):
    program = os.environ.get("ESPALIER_COMM_TESTS")
    if not program:
        print("skipped: the conformance suite; ESPALIER_COMM_TESTS names no test program of `comm`")
        return

    def one():
        # A test that finds no NCCL is a failure here.
        needs = clean() | {"ESPALIER_REQUIRE": "cuda,nccl"}
        done = subprocess.run([program, "nccl::", "--test-threads", "1"], env=needs, capture_output=True, text=True, timeout=400)
        failed = re.findall(r"(?m)^test (\S+) \.\.\. FAILED", done.stdout)
        result = re.findall(r"test result: .*?;.*?;", done.stdout)
        wrong = failed or done.returncode != 0
        return (f"{failed} {done.stdout[-3000:]}" if wrong else None), " ".join(result)

    check("the conformance suite on 1, 2 and 4 ranks", one)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--ranks", type=int, help="layouts of so many ranks")
    parser.add_argument("--parts", default="suite,layouts,chain,faults,restarts,torchrun")
    chosen = parser.parse_args()
    if not os.access(BINARY, os.X_OK):
        sys.exit(f"{BINARY} is not there: cargo build --release, or name a binary in ESPALIER")
    doctor = subprocess.run([BINARY, "doctor", "--json"], capture_output=True, text=True, env=clean())
    machine = summary(doctor.stdout) or {}
    cuda, nccl = machine.get("cuda", {}), machine.get("nccl", {})
    if not cuda.get("found") or not nccl.get("found", True) or "why" in nccl:
        print(f"skipped: this needs a GPU and NCCL; CUDA: {cuda.get('why', 'found')}, NCCL: {nccl.get('why', 'found')}")
        return 0
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        print("skipped: NCCL_MULTI_RANK_GPU_ENABLE is not 1, so that ranks cannot share a GPU (NCCL 2.30 or newer)")
        return 0
    # Four ranks of one GPU must all find room on it at the same time.
    os.environ.setdefault("NCCL_MAX_CTAS", "4")
    # Each communicator has a stream: none should wait for another because the driver has put them into one queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    wrong = []

    def check(name, work):
        if chosen.only not in name:
            return
        begin = time.monotonic()
        try:
            problem, words = work()
        except Exception as error:  # a row that cannot be run is a wrong row
            problem, words = f"{type(error).__name__}: {error}", ""
        print(f"{'WRONG' if problem else 'ok':6}{name:52}{problem or words}  [{time.monotonic() - begin:.0f} s]", flush=True)
        if problem:
            wrong.append(name)

    parts = chosen.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        if "suite" in parts:
            suite(check)
        if "layouts" in parts:
            layouts(check, folder, lambda name, ranks: chosen.ranks in (None, ranks))
        for part, work in (("chain", chain), ("faults", faults), ("restarts", restarts), ("torchrun", torchrun)):
            if part in parts:
                work(check, folder)
    print(f"{len(wrong)} wrong" + (": " + "; ".join(wrong) if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
