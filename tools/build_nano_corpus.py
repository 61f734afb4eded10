"""Build v4-nano's training data: tokenizer, token ids, held-out text and a manifest of sources.

    python tools/build_nano_corpus.py --stdlib /usr/lib/python3.13 --wheels W --sdists S --docs D \
        --out .nano --spec-dir specs/v4-nano

W and S hold what `pip download` wrote; D has one folder a documentation package.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from nano.corpus import (
    HELD_OUT_EVERY_OF,
    Document,
    chats,
    deduplicate,
    read_archive,
    read_folder,
)
from nano.tokenizer import BOS, EOS, train_tokenizer
from tokenizers import Tokenizer

SEED = 0
HELD_OUT_BYTES = 200_000
# Licences of Debian's documentation packages (their copyright files).
_DOC_LICENCES = {
    "python3.11-doc": "PSF-2.0",
    "python-pytest-doc": "MIT",
    "python-sqlalchemy-doc": "MIT",
    "python-tornado-doc": "Apache-2.0",
    "sphinx-doc": "BSD-2-Clause",
}
_COPYLEFT = re.compile(r"\b(A?L?GPL|GNU|MPL|Mozilla|EUPL|CDDL)", re.IGNORECASE)


def licence_of(archive: Path) -> str:
    """The licence that an archive's own metadata states."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            name = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
            meta = z.read(name).decode()
    else:
        with tarfile.open(archive) as t:
            member = min(
                (m for m in t.getmembers() if m.name.endswith("PKG-INFO")),
                key=lambda m: len(m.name),
            )
            handle = t.extractfile(member)
            meta = handle.read().decode() if handle else ""
    head = meta.partition("\n\n")[0]
    for pattern in (
        r"^License-Expression: (.+)$",
        r"^Classifier: License :: (?:OSI Approved :: )?(.+)$",
        r"^License: (.{1,60})$",
    ):
        found = re.findall(pattern, head, re.MULTILINE)
        if found:
            return " AND ".join(sorted(set(found)))
    return "unknown"


def sources(args: argparse.Namespace) -> Iterator[tuple[str, str, Iterator[Document]]]:
    """(package and version, licence, documents), documentation first."""
    yield f"CPython {args.stdlib.name}", "PSF-2.0", read_folder("cpython", args.stdlib)
    for folder in sorted(args.docs.iterdir()):
        licence = _DOC_LICENCES.get(folder.name, "BSD-3-Clause")
        yield f"{folder.name} (Debian)", licence, read_folder(folder.name, folder)
    archives = sorted(args.sdists.glob("*.tar.gz")) + sorted(args.wheels.glob("*.whl"))
    for archive in archives:
        licence = licence_of(archive)
        if licence == "unknown" or _COPYLEFT.search(licence):
            print(f"skipped for its licence ({licence}): {archive.name}", file=sys.stderr)
            continue
        name, version = archive.name.removesuffix(".tar.gz").split("-")[:2]
        yield f"{name} {version}", licence, read_archive(name.lower(), archive)


def write_held_out(documents: list[Document], path: Path) -> None:
    """Whole documents of CPython and its documentation, each below a header line."""
    kept = [d for d in documents if d.package in HELD_OUT_EVERY_OF]
    kept.sort(key=lambda d: (d.package, d.path))
    random.Random(SEED).shuffle(kept)
    out, size = [], 0
    for i, doc in enumerate(kept):
        # Every sixth stays long enough for a whole context; the others are prompts.
        text = doc.text[: 9_000 if i % 6 == 0 else 2_000].rpartition("\n")[0] + "\n"
        if size + len(text) <= HELD_OUT_BYTES and len(text) >= 1_000:
            out.append(f"=== {doc.package}: {doc.path} ===\n{text}")
            size += len(text)
    path.write_text("".join(out))
    print(f"held-out file: {len(out)} documents, {size} characters")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Ids of all texts, each between BOS and EOS."""
    out: list[np.ndarray] = []
    for start in range(0, len(texts), 2000):
        for e in tokenizer.encode_batch_fast(texts[start : start + 2000]):
            out.append(np.array([BOS, *e.ids, EOS], dtype=np.uint16))
    return np.concatenate(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("stdlib", "wheels", "sdists", "docs", "out", "spec-dir"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tokenizer-bytes", type=int, default=30_000_000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.spec_dir.mkdir(parents=True, exist_ok=True)

    licences: dict[str, str] = {}
    versions: dict[str, str] = {}

    def stream() -> Iterator[Document]:
        for label, licence, documents in sources(args):
            licences[label] = licence
            for doc in documents:
                versions[doc.package] = label
                yield doc

    documents = list(deduplicate(stream()))
    manifest: dict[str, dict[str, int | str]] = defaultdict(dict)
    for doc in documents:
        row = manifest[versions[doc.package]]
        row["licence"] = licences[versions[doc.package]]
        row["files"] = int(row.get("files", 0)) + 1
        row["bytes"] = int(row.get("bytes", 0)) + len(doc.text.encode())
    train = [d for d in documents if not d.held_out]
    held_out = [d for d in documents if d.held_out]
    random.Random(SEED).shuffle(train)
    write_held_out(held_out, args.spec_dir / "heldout.txt")

    sample, size = [], 0
    for doc in train:
        if size < args.tokenizer_bytes:
            sample.append(doc.text)
            size += len(doc.text)
    tokenizer = train_tokenizer(sample)
    tokenizer.save(str(args.spec_dir / "tokenizer.json"))

    talk = list(chats(train, SEED))
    texts = [d.text for d in train] + talk
    random.Random(SEED).shuffle(texts)
    ids = encode(tokenizer, texts)
    held = encode(tokenizer, [d.text for d in held_out])
    for name, array in (("train", ids), ("heldout", held)):
        (args.out / f"{name}.u16.xz").write_bytes(lzma.compress(array.tobytes(), preset=4))
    summary = {
        "train_documents": len(train),
        "train_bytes": sum(len(d.text.encode()) for d in train),
        "train_tokens": len(ids),
        "chats": len(talk),
        "chat_bytes": sum(len(t.encode()) for t in talk),
        "heldout_documents": len(held_out),
        "heldout_bytes": sum(len(d.text.encode()) for d in held_out),
        "heldout_tokens": len(held),
        "sources": manifest,
    }
    (args.out / "manifest.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False))
    print({k: v for k, v in summary.items() if k != "sources"})


if __name__ == "__main__":
    main()
