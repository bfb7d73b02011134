#!/usr/bin/env python3
"""Faults on purpose, in small: processes that are killed, disks that fail, files that change, and input that is nonsense.

    tests/campaign.py                       all four, about 150 seconds; a new seed each time, which is printed
    tests/campaign.py flips --seed 7        one of them, as before
    tests/campaign.py kills:12 --seed 7     one trial again
    ESPALIER=/path/to/espalier              another program than target/debug/espalier

    kills    kill -9 at any moment, up to three times, then --resume: the bits of a run that nobody touched
    faults   one system call on the run folder fails (EIO, ENOSPC, ...) or kills: a sentence, and the same bits after --resume (needs strace)
    flips    a file of a run folder is changed: the result is as it was, an older checkpoint is used and named, or it is refused
    fuzz     run, cluster, schedule, tokenizer and data files that are almost right: an answer, or one sentence and exit 2, 3 or 4

A trial is a function of the seed and its number. Nothing of a machine is needed but Python; nothing is written but below a temporary
folder, and only processes that were started here are ended.
"""
import argparse
import concurrent.futures
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAM = os.environ.get("ESPALIER") or os.path.join(ROOT, "target/debug/espalier")
PATIENCE = 60  # seconds for an answer, on a machine that is busy

RUN = """seed = 3
[model]
{model}
[data]
{data}
[train]
steps = {steps}
batch = 8
log_every = 1
eval_every = 10
eval_samples = 16
{train}
[checkpoint]
every = 4
keep = 2
[device]
kind = "cpu"
threads = 1
{more}
"""
GPT = 'name = "gpt"\nlayers = 2\nheads = 2\nwidth = 8\ncontext = 16\n'
SUMS = 'kind = "arithmetic"\ncount = 300\n'
CNN = """name = "custom"
layers = [{ type = "conv", output = 4, kernel = 3, padding = 1, bias = false }, { type = "batch_norm" }, { type = "relu" },
  { type = "global_avg_pool" }, { type = "linear" }]
"""
SHAPES = 'kind = "shapes"\ncount = 100\nsize = 16\n'


def run_file(model=GPT, data=SUMS, steps=30, train="", more=""):
    return RUN.format(model=model, data=data, steps=steps, train=train, more=more)


LAYOUTS = {
    "dense": run_file(),
    "rigl in bf16": run_file(train='precision = "bf16"', more='[prune]\nmethod = "rigl"\nsparsity = 0.5\nevery = 7'),
    "pipeline": run_file(GPT + "tied = false\n", train="micro_batches = 4", more="[parallel]\npipeline = 2"),
    "zero-1": run_file(more="[parallel]\ndata = 2\nzero = 1"),
    "images": run_file(CNN, SHAPES, more='[prune]\nmethod = "snip"\nsparsity = 0.5\nsamples = 16'),
}


class Ended:
    """What became of a process."""

    def __init__(self, code, out, err, late):
        self.code, self.out, self.err, self.late = code, out, err, late

    def json(self):
        try:
            return json.loads(self.out.strip().splitlines()[-1])
        except (IndexError, ValueError):
            return None

    def wrong(self, codes):
        """Why it ended as no process may, whatever was asked of it."""
        if self.late:
            return "no answer in time"
        for word in ("panicked at", "RUST_BACKTRACE", "memory allocation of", "stack overflow"):
            if word in self.err:
                return f"says {word!r}"
        if self.code not in codes:
            return f"exit {self.code}"
        if self.code not in (0, 130) and sum(line.startswith("error:") for line in self.err.splitlines()) != 1:
            return f"exit {self.code} without one sentence"
        return None


def start(arguments, before=(), cwd=None):
    command = [*before, PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(*arguments, before=(), cwd=None):
    process, late = start(arguments, before, cwd), False
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        late = True
        process.kill()
        out, err = process.communicate()
    return Ended(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"), late)


def write(path, content):
    with open(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return path


def read(path):
    with open(path, "rb") as file:
        return file.read()


def files_below(folder):
    return sorted(os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names)


def metrics(folder):
    """The lines of a run by kind and step, without what differs from one run to the next; and what is wrong with them."""
    lines, wrong = {}, None
    for line in read(os.path.join(folder, "metrics.jsonl")).splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            wrong = "a line of metrics.jsonl is torn"
            continue
        key = ("validation" in value, "pruned" in value, "pruner" in value, value.get("step"))
        if key in lines:
            wrong = f"step {value.get('step')} is in metrics.jsonl twice"
        for name in ("time", "tokens_per_s", "images_per_s"):
            value.pop(name, None)
        if "pruned" in value:
            value["pruned"].pop("bytes", None)
        lines[key] = value
    return lines, wrong


class Whole:
    """A run that nobody touched, which others are compared with."""

    def __init__(self, work, name, text):
        self.file = write(os.path.join(work, f"{name}.toml"), text)
        self.folder = os.path.join(work, f"{name}-whole")
        begun = time.monotonic()
        ended = run("train", self.file, "--out", self.folder, "--json")
        self.seconds = time.monotonic() - begun
        if ended.code != 0:
            sys.exit(f"the run that others are compared with fails: {name}: {ended.err}")
        self.hash = ended.json()["weights_hash"]
        self.lines = metrics(self.folder)[0]
        self.last = sorted(os.listdir(os.path.join(self.folder, "checkpoints")))[-1]

    def differs(self, folder, ended, may_lack_lines=False):
        """In what a run that has come to its end is not as this one."""
        if ended.wrong((0,)):
            return f"{ended.wrong((0,))}: {ended.err[-200:]}"
        if ended.json()["weights_hash"] != self.hash:
            return "other weights"
        lines, wrong = metrics(folder)
        if wrong:
            return wrong
        if lines != self.lines and not (may_lack_lines and lines.items() <= self.lines.items()):
            return f"other metrics: {len(lines)} lines, {len(self.lines)} in the run that nobody touched"
        if self.last not in os.listdir(os.path.join(folder, "checkpoints")):
            return "the last checkpoint is missing"
        left = [name for name in files_below(folder) if "writing" in name or name.endswith((".tmp", ".part"))]
        return f"left behind: {left[:3]}" if left else None


def again(whole, folder):
    """Goes on with a run, or begins it where it had not come that far."""
    resume = ["--resume"] if os.path.exists(os.path.join(folder, "run.toml")) else []
    return run("train", whole.file, "--out", folder, "--json", *resume)


class Kills:
    def __init__(self, work):
        self.work = work
        self.runs = [Whole(work, name.replace(" ", "-"), text) for name, text in LAYOUTS.items()]

    def trial(self, number, draw):
        whole, folder = draw.choice(self.runs), os.path.join(self.work, f"kill-{number}")
        waits = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            resume = ["--resume"] if os.path.exists(os.path.join(folder, "run.toml")) else []
            process = start(["train", whole.file, "--out", folder, *resume])
            waits.append(round(draw.uniform(0, 0.05) if draw.random() < 0.2 else draw.uniform(0, whole.seconds), 4))
            time.sleep(waits[-1])
            process.kill()
            process.communicate()
        wrong = whole.differs(folder, again(whole, folder))
        return wrong and f"{os.path.basename(whole.file)}, killed after {waits} s: {wrong}"


CALLS = {
    "write": ["ENOSPC", "EIO", "EINTR", "KILL"],
    "fsync": ["EIO", "ENOSPC", "KILL"],
    "rename": ["EIO", "ENOSPC", "KILL"],
    "openat": ["EIO", "ENOSPC", "EMFILE", "EINTR", "KILL"],
    "mkdir": ["ENOSPC", "EIO", "KILL"],
    "unlinkat": ["EIO", "KILL"],
    "unlink": ["EIO", "KILL"],
    "ftruncate": ["EIO", "KILL"],
    "read": ["EIO", "EINTR"],
}


class Faults:
    def __init__(self, work):
        self.work = work
        self.whole = Whole(work, "faults", run_file(steps=12))
        # Which calls the run makes on which paths of its folder, so that faults hit these and not the loading of libraries.
        folder, log = os.path.join(work, "seen"), os.path.join(work, "seen.log")
        self.strace("train", self.whole.file, "--out", folder, log=log)
        quoted = re.findall(r'"(%s[^"]*)"' % re.escape(folder), read(log).decode(errors="replace"))
        self.paths = sorted({path[len(folder):] for path in quoted})
        shutil.rmtree(folder)
        self.strace("train", self.whole.file, "--out", folder, log=log, paths=self.paths_in(folder))
        seen = re.findall(r"^(\d+)\s+(\w+)\(", read(log).decode(errors="replace"), re.M)
        # A number counts the calls of one thread.
        self.most = {call: max((seen.count(one) for one in set(seen) if one[1] == call), default=0) for call in CALLS}

    def paths_in(self, folder):
        return [folder + path for path in self.paths]

    def strace(self, *arguments, log, paths=(), inject=None):
        before = ["strace", "-f", "-qq", "-o", log, "-e", "trace=" + ",".join(CALLS)]
        for path in paths:
            before += ["-P", path]
        return run(*arguments, before=before + (["-e", "inject=" + inject] if inject else []))

    def trial(self, number, draw):
        whole, folder = self.whole, os.path.join(self.work, f"fault-{number}")
        call = draw.choice([call for call in CALLS if self.most[call]])
        fault, when = draw.choice(CALLS[call]), draw.randrange(1, self.most[call] + 1)
        what = "signal=KILL" if fault == "KILL" else f"error={fault}"
        inject, log = f"{call}:{what}:when={when}", os.path.join(self.work, f"fault-{number}.log")
        ended = self.strace("train", whole.file, "--out", folder, "--json", log=log, paths=self.paths_in(folder), inject=inject)
        wrong = None if fault == "KILL" and not ended.late else ended.wrong((0, 2, 3))
        if not wrong and ended.code == 0 and ended.json() and ended.json()["weights_hash"] != whole.hash:
            wrong = "exit 0 with other weights"
        wrong = wrong or whole.differs(folder, again(whole, folder), may_lack_lines="metrics" in ended.err)
        return wrong and f"{inject}: {wrong}"


class Flips:
    """What is asked of a run folder after one of its files was changed."""

    def __init__(self, work):
        self.work = work
        text = write(os.path.join(work, "text.txt"), "".join(f"{a} + {b} = {a + b}\n" for a in range(20) for b in range(10)))
        data = f'kind = "text"\npath = "{text}"\n'
        self.whole = Whole(work, "flips", run_file(data=data, steps=12, more="[learning_rate]\nschedule = \"constant\""))
        self.files = [name for name in files_below(self.whole.folder) if name != ".lock"]
        self.asked = ["resume", "eval", "generate", "verify"]
        self.right = {what: self.answer(what, self.copy(f"right-{what}"))[1] for what in self.asked}
        # What is said where the newest checkpoint cannot be used, and another is.
        self.older = {}
        for what in self.asked:
            folder = self.copy(f"older-{what}")
            write(os.path.join(folder, "checkpoints", self.whole.last, "manifest.json"), "{}")
            self.older[what] = self.answer(what, folder)[1]

    def copy(self, name):
        return shutil.copytree(self.whole.folder, os.path.join(self.work, name))

    def answer(self, what, folder):
        ended = run(*{
            "resume": ["train", self.whole.file, "--out", folder, "--resume", "--json", "--set", "train.steps=16"],
            "eval": ["eval", folder, "--json"],
            "generate": ["generate", folder, "1 + 2", "--tokens", "6", "--json"],
            "verify": ["verify", folder, "--json"],
        }[what])
        value = ended.json() or {}
        essence = {"resume": ["weights_hash"], "eval": ["loss", "samples"], "generate": ["tokens"], "verify": ["newest_whole"]}
        return ended, [value.get(name) for name in essence[what]]

    def damage(self, content, draw):
        """A change, and what it is called; the content may be as it was."""
        changed, at = bytearray(content), draw.randrange(max(1, len(content)))
        how = draw.choice(["bit", "bit", "byte", "digit", "cut", "empty", "append"])
        digits = [place for place, byte in enumerate(content) if 48 <= byte < 58]
        if how == "bit" and content:
            changed[at] ^= 1 << draw.randrange(8)
        elif how == "byte" and content:
            changed[at] = draw.randrange(256)
        elif how == "digit" and digits:
            at = draw.choice(digits)
            changed[at] = 48 + (content[at] - 48 + draw.randrange(1, 10)) % 10
        elif how == "cut":
            del changed[at:]
        elif how == "empty":
            changed.clear()
        elif how == "append":
            changed += bytes(draw.randrange(256) for _ in range(8))
        return bytes(changed), f"{how} at {at}"

    def trial(self, number, draw):
        folder, name, what = self.copy(f"flip-{number}"), draw.choice(self.files), draw.choice(self.asked)
        path = os.path.join(folder, name)
        before = read(path)
        after, how = self.damage(before, draw)
        write(path, after)
        ended, answer = self.answer(what, folder)
        # A damaged checkpoint is what `verify` is to find: exit 2, with all of them listed and no sentence.
        wrong = None if what == "verify" and ended.code == 2 and ended.json() else ended.wrong((0, 2, 3))
        if not wrong and ended.code == 0 and answer != self.right[what]:
            is_said = re.search("damaged|warning|older", ended.err)
            wrong = None if answer == self.older[what] and is_said else f"another result, and exit 0: {answer} for {self.right[what]}"
        in_checkpoint = name.startswith("checkpoints")
        if not wrong and what == "verify" and in_checkpoint and ended.code == 0 and after != before:
            wrong = "not found by verify"
        shutil.rmtree(folder)
        return wrong and f"{what} after {how} of {name}: {wrong}: {ended.err[-200:]}"


WORDS = ["0", "-1", "1e308", "nan", "18446744073709551615", "9999999999", '""', '"x"', "[]", "{}", "true", "0.5", "[1, 2]", '"\\u0000"', '"../.."']


class Fuzz:
    def __init__(self, work):
        self.work = work
        text = write(os.path.join(work, "fuzz.txt"), "the quick brown fox 123 " * 40)
        vocabulary = {chr(33 + i): i for i in range(94)} | {"Ġ": 94, "th": 95}
        tokenizer = {"added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
                     "model": {"type": "BPE", "vocab": vocabulary, "merges": ["t h"]}}
        ids = b"".join((i % 50).to_bytes(2, "little") for i in range(400))
        images = bytes([0, 0, 8, 3, 0, 0, 0, 20, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(20 * 784)
        labels = bytes([0, 0, 8, 1, 0, 0, 0, 20]) + bytes(range(10)) * 2
        good = write(os.path.join(work, "good.toml"), LAYOUTS["dense"])
        cluster = read(os.path.join(ROOT, "clusters/summit.toml"))
        schedule = run("schedule", "1f1b", "--stages", "2", "--micro-batches", "4", "--actions").out.encode()
        tokens = run_file(GPT + "vocab = 64\n", 'kind = "tokens"\npath = "input"\n', steps=1)
        pairs = run_file('name = "mlp"\nhidden = [4]\n', 'kind = "idx"\nimages = "input"\nlabels = "labels"\n', steps=1)
        # What is changed, the files beside it, and what is asked.
        self.inputs = [(text_of.encode(), {}, ["train", "input", "--dry-run", "--json"]) for text_of in LAYOUTS.values()]
        self.inputs += [(LAYOUTS[name].encode(), {}, ["plan", "input", "--gpus", "4", "--json"]) for name in ("dense", "images")]
        self.inputs += [
            (LAYOUTS["images"].encode(), {}, ["explain", "input", "--ranks", "4", "--json"]),
            (cluster, {}, ["plan", good, "--cluster", "input", "--gpus", "8", "--json"]),
            (schedule, {}, ["schedule", "--file", "input", "--json"]),
            (json.dumps(tokenizer).encode(), {}, ["tokenize", text, "--tokenizer", "input", "-o", "ids.bin"]),
            (ids, {"run.toml": tokens}, ["train", "run.toml", "--out", "out", "--json"]),
            (images, {"run.toml": pairs, "labels": labels}, ["train", "run.toml", "--out", "out", "--json"]),
        ]

    def change(self, content, draw):
        lines = content.split(b"\n")
        at = draw.randrange(len(lines))
        how = draw.choice(["value", "value", "value", "drop", "twice", "swap", "byte", "cut", "number"])
        if how == "value" and b"=" in lines[at]:
            lines[at] = lines[at].split(b"=")[0] + b"= " + draw.choice(WORDS).encode()
        elif how == "drop":
            del lines[at]
        elif how == "twice":
            lines.insert(at, lines[at])
        elif how == "swap":
            other = draw.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif how == "cut":
            return content[:draw.randrange(len(content))]
        elif how == "number":
            numbers = list(re.finditer(rb"\d+", content))
            if numbers:
                match = draw.choice(numbers)
                return content[:match.start()] + draw.choice(WORDS).encode() + content[match.end():]
        else:
            place = draw.randrange(len(content))
            return content[:place] + bytes([draw.randrange(256)]) + content[place + 1:]
        return b"\n".join(lines)

    def trial(self, number, draw):
        content, beside, arguments = draw.choice(self.inputs)
        for _ in range(draw.choice([1, 1, 2, 3])):
            content = self.change(content, draw) or b"\n"
        folder = os.path.join(self.work, f"fuzz-{number}")
        os.mkdir(folder)
        for name, text in {"input": content, **beside}.items():
            write(os.path.join(folder, name), text)
        ended = run(*arguments, cwd=folder)
        wrong = ended.wrong((0, 2, 3, 4))
        return wrong and f"{arguments}, in {folder}: {wrong}: {ended.err[-300:]}"


PARTS = {"kills": (Kills, 50), "faults": (Faults, 45), "flips": (Flips, 30), "fuzz": (Fuzz, 25)}


def skip(what, why):
    print(f"skipped: {what}: {why}")
    if os.environ.get("ESPALIER_SKIPPED"):
        with open(os.environ["ESPALIER_SKIPPED"], "a") as list_of_skipped:
            list_of_skipped.write(f"{what}\t{why}\ttests/campaign.py\n")


def campaign(name, only, seed, seconds, work, workers):
    """Trials until the time is over; returns what did not hold."""
    if name == "faults" and subprocess.run("strace -qq -o /dev/null true", shell=True, stderr=subprocess.DEVNULL).returncode:
        skip("strace", "it is not there, or may not trace")
        return []
    folder = tempfile.mkdtemp(prefix=f"{name}-", dir=work)
    part = PARTS[name][0](folder)
    numbers, failures, lock, until = iter([only] if only is not None else range(10**9)), [], threading.Lock(), time.monotonic() + seconds
    tried = [0]

    def work_on():
        while True:
            with lock:
                number = next(numbers, None) if time.monotonic() < until or not tried[0] else None
                if number is None:
                    return
                tried[0] += 1
            wrong = part.trial(number, random.Random(f"{seed}-{name}-{number}"))
            if wrong:
                with lock:
                    failures.append(f"{name}:{number} {wrong}")
                    print(f"NOT HELD  {failures[-1]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for worker in [pool.submit(work_on) for _ in range(workers)]:
            worker.result()
    print(f"{name:8} {tried[0]:5} trials, {tried[0] - len(failures)} held", flush=True)
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="kills, faults, flips, fuzz, or one trial as in kills:12")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--seconds", type=float, default=150, help="for all four together")
    parser.add_argument("--keep", action="store_true", help="leave the temporary folder")
    arguments = parser.parse_args()
    if not os.access(PROGRAM, os.X_OK):
        sys.exit(f"{PROGRAM} is not there: build it with cargo build, or set ESPALIER")
    # Runs that a person starts from a shell are ended by it too.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    print(f"seed {arguments.seed}", flush=True)
    work, failures = tempfile.mkdtemp(prefix="espalier-campaign-"), []
    share = arguments.seconds / sum(seconds for _, seconds in PARTS.values())
    for part in arguments.parts or PARTS:
        name, _, number = part.partition(":")
        if name not in PARTS:
            parser.error(f"{name} is none of {', '.join(PARTS)}")
        only = int(number) if number else None
        failures += campaign(name, only, arguments.seed, share * PARTS[name][1], work, os.cpu_count() or 1)
    if failures or arguments.keep:
        print(f"what was tried is in {work}")
    else:
        shutil.rmtree(work)
    if failures:
        trials = " ".join(failure.split()[0] for failure in failures)
        sys.exit(f"{len(failures)} did not hold; again: tests/campaign.py {trials} --seed {arguments.seed}")


if __name__ == "__main__":
    main()
