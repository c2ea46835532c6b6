"""Helpers for all datasets: find files, read texts and captions, check samples."""

import hashlib
import os
import unicodedata
from pathlib import Path

from common import config, order
from common.config import UserError


class Unusable(UserError):
    """The reason why a sample cannot be used. Training continues with the next sample."""


# Folders with one of these files were written by this project.
OUTPUT_MARKS = {"auto_resume.json", ".output"}


def mark_output(folder):
    """Create a folder if needed, and mark it as output, so that `files_below` skips it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, ".output").touch()


def files_below(folder):
    """Sorted paths of the files below a folder. Links are followed; each folder is read once.

    Hidden folders are skipped. So are runs and other output of this project, with a note, because
    they are not data, and may change. Only `folder` itself may be such output.
    """
    entered = set()
    outputs = []
    files = []
    for parent, folders, names in os.walk(folder, onerror=fail_if_refused, followlinks=True):
        real = os.path.realpath(parent)
        if entered and OUTPUT_MARKS.intersection(names):
            outputs.append(parent)
            entered.add(real)
        if real in entered:
            folders.clear()  # so that os.walk does not descend
            continue
        entered.add(real)
        # Skip hidden folders. Sort the others, so that of several links to one folder, the same one
        # is followed on all file systems.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(parent, name) for name in names]
    if outputs:
        config.note(f"{len(outputs)} folders of runs or samples are skipped: {min(outputs)}, …")
    broken = [file for file in files if not file.exists()]
    if broken:
        config.note(f"{len(broken)} broken links are skipped: {min(broken)}, …")
    return sorted(filter(Path.is_file, files))


def fail_if_refused(error):
    """Make os.walk fail at a folder without read permission, instead of skipping its samples."""
    if isinstance(error, PermissionError):
        raise error


def decode_text(content, name):
    """Decode `content` (bytes) as UTF-8; UserError if it is not UTF-8."""
    with config.explained(f"{name}: not UTF-8 text; save it as UTF-8"):
        text = content.decode("utf-8-sig")
        if "\0" in text:  # UTF-16, for example
            raise ValueError("contains zero bytes")
        return text


def nfc(text):
    """Normalize a text or file name to NFC. macOS splits accents from letters in file names."""
    return unicodedata.normalize("NFC", text)


def caption_in(record):
    """The "caption" of a dict or, as in Hugging Face datasets, its "text". KeyError if neither."""
    for name in ("caption", "text"):
        if name in record:
            return record[name]
    raise KeyError(f"no caption or text, but {', '.join(record)}")


def clean_caption(value):
    """Convert a caption as stored in a file to a text without surrounding spaces.

    A list of texts gives the first of them. None and an empty list give "". TypeError if `value` is
    anything else.
    """
    if isinstance(value, list):
        value = value[0] if value else None
    text = "" if value is None else value
    if not isinstance(text, str):
        raise TypeError(f"{value!r:.100} is neither a text nor a list of texts")
    return text.strip()


def check_samples(dataset, limit=128):
    """Check up to 256 evenly spaced samples: (number unusable, number checked, first faults).

    UserError if more than `limit`, or all, are unusable. Prints a note if there are duplicates.
    """
    indices = order.evenly_spaced(len(dataset), 256)
    faults = []
    contents = set()
    for index in indices:
        if fault := dataset.fault(index):
            faults.append(fault)
        else:
            contents.add(dataset.content_hash(index))
    if equal := len(indices) - len(faults) - len(contents):
        config.note(
            f"{dataset.path}: {equal} of {len(indices)} checked files are duplicates, so training "
            "and test may share some"
        )
    if len(faults) > min(limit, len(indices) - 1):
        raise UserError(
            f"{dataset.path}: {len(faults)} of {len(indices)} samples cannot be used: "
            f"{faults[0]}; fix or remove them"
        )
    return len(faults), len(indices), faults[:5]


def digest_of(files):
    """A digest (16 hex digits) of the names and sizes of `files`, and the start of up to 100."""
    sizes = [(file.name, file.stat().st_size) for file in files]
    digest = hashlib.sha256(repr(sizes).encode())
    for number in order.evenly_spaced(len(files), 100):
        with open(files[number], "rb") as file:
            digest.update(file.read(2**16))
    return digest.hexdigest()[:16]


def stamps(files):
    """[(path, size in bytes, modification time in nanoseconds)] of `files`."""
    found = []
    for file in files:
        status = file.stat()
        found.append((str(file), status.st_size, status.st_mtime_ns))
    return found


def texts_of(text, path):
    """The lines of the file `path` or, without a path, [text].

    Blank texts are left out. UserError if all are blank, unless both arguments are "".
    """
    texts = [text]
    if path:
        texts = decode_text(Path(path).read_bytes(), path).splitlines()
    texts = list(filter(None, map(str.strip, texts)))
    if (text or path) and not texts:
        raise UserError(f"{path or '--text'}: no text in it")
    return texts
