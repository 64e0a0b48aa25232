"""Collects the training text (this interpreter's standard library) and tokenises it once.

`python data.py --out DIR --vocab 320` writes the tokenizer's files, `train.npy` and `heldout.npy`
(uint16 token streams, every document followed by [EOS], none preceded by [BOS]), the same documents
as `train.jsonl` and `heldout.jsonl`, which `jaxspec train-draft` reads, and `corpus.json`.
A plain prompt is fed to the model without [BOS] too, and training windows begin anywhere.
"""

import argparse
import hashlib
import json
import platform
import sysconfig
from pathlib import Path

import numpy as np
import tokenizer

# Generated tables, grammar-test inputs and text in other encodings: not what code looks like.
SKIPPED_DIRS = {"site-packages", "encodings", "pydoc_data", "encoded_modules", "__pycache__"}
SKIPPED_PREFIXES = ("lib2to3/tests/data/", "test/tokenizedata/", "turtledemo/")
MAX_DIGIT_SHARE = 0.10
MAX_NON_ASCII_SHARE = 0.01


def documents() -> dict[str, str]:
    """Returns relative path -> text of every source file used, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found, seen = {}, set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_DIRS & set(path.parts) or name.startswith(SKIPPED_PREFIXES):
            continue
        raw = path.read_bytes()
        digits = sum(raw.count(bytes([c])) for c in b"0123456789")
        non_ascii = sum(c > 127 for c in raw)
        if len(raw) < 200 or raw in seen:
            continue
        if digits > MAX_DIGIT_SHARE * len(raw) or non_ascii > MAX_NON_ASCII_SHARE * len(raw):
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            continue  # a test input in another encoding
        seen.add(raw)
        found[name] = text.replace("\r\n", "\n")
    return found


def is_heldout(name: str) -> bool:
    """Whether a file is never trained on: about 5 %, by a hash of its path."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def split() -> tuple[dict[str, str], dict[str, str]]:
    """Returns the training and the held-out documents."""
    docs = documents()
    train = {name: text for name, text in docs.items() if not is_heldout(name)}
    return train, {name: text for name, text in docs.items() if is_heldout(name)}


def main() -> None:
    """Writes the tokenizer and both token streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=320)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split()
    ranks = tokenizer.train_bpe(list(train.values()), args.vocab - tokenizer.NUM_SPECIAL)
    tokenizer.write(ranks, args.out)
    enc = tokenizer.encoding(ranks)
    eos = tokenizer.special_tokens(len(ranks))["[EOS]"]
    report = {"python": platform.python_version(), "vocab_size": args.vocab}
    for part, docs in (("train", train), ("heldout", heldout)):
        ids = [id_ for text in docs.values() for id_ in [*enc.encode_ordinary(text), eos]]
        np.save(args.out / f"{part}.npy", np.asarray(ids, np.uint16))
        lines = [json.dumps({"text": text}) for text in docs.values()]
        (args.out / f"{part}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        characters = sum(map(len, docs.values())) + len(docs)  # an [EOS] counts as one character
        report[part] = {"files": len(docs), "characters": characters, "tokens": len(ids)}
        report[part]["characters_per_token"] = characters / len(ids)
    (args.out / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
