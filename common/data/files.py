"""What all sources of samples share: finding files, reading texts, captions, unusable samples."""

import hashlib
import os
import unicodedata
from pathlib import Path

from common import config, order
from common.config import UserError


class Unusable(UserError):
    """A sample that cannot be used, with the reason. Training goes on with the next one."""


# A folder with one of these files has what this project made.
OUTPUT_MARKS = {"auto_resume.json", ".output"}


def mark_output(folder):
    """Mark a folder, which is made if it is not there, as output: `files_below` leaves it out."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, ".output").touch()


def files_below(folder):
    """Sorted paths of the files below a folder. Links to folders are entered, each folder once.

    Runs and other outputs of this project are left out, with a note: their samples are no data, and
    they change. `folder` itself may be one.
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
            folders.clear()  # os.walk goes no deeper
            continue
        entered.add(real)
        # Not hidden ones. Which of two links is entered must not depend on the file system.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(parent, name) for name in names]
    if outputs:
        config.note(f"{len(outputs)} folders of runs or samples are left out: {min(outputs)}, …")
    broken = [file for file in files if not file.exists()]
    if broken:
        config.note(f"{len(broken)} links lead nowhere, and are left out: {min(broken)}, …")
    return sorted(filter(Path.is_file, files))


def fail_if_refused(error):
    """Let os.walk end where a folder may not be read: its samples would be missing silently."""
    if isinstance(error, PermissionError):
        raise error


def decode_text(content, name):
    """The text of `content` (bytes), which is UTF-8; UserError."""
    with config.explained(f"{name}: not text in UTF-8; save it as UTF-8"):
        text = content.decode("utf-8-sig")
        if "\0" in text:  # UTF-16
            raise ValueError("it has zero bytes")
        return text


def nfc(text):
    """A text or a file's name with each accent in its letter: macOS writes it after the letter."""
    return unicodedata.normalize("NFC", text)


def caption_in(record):
    """The value of "caption" in a dict, or of "text", as the package datasets has it; KeyError."""
    for name in ("caption", "text"):
        if name in record:
            return record[name]
    raise KeyError(f"no caption or text, but {', '.join(record)}")


def clean_caption(value):
    """The caption of a sample: a text, or the first of a list of texts. TypeError of another value.

    None and an empty list are "".
    """
    if isinstance(value, list):
        value = value[0] if value else None
    text = "" if value is None else value
    if not isinstance(text, str):
        raise TypeError(f"{value!r:.100} is not a text, nor a list of texts")
    return text.strip()


def check_samples(dataset, limit=128):
    """(unusable, looked at, first faults) of 256 evenly spaced samples, by `dataset.fault`.

    UserError if more than `limit`, or all, are unusable. A note counts those whose
    `dataset.content_hash` comes again.
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
            f"{dataset.path}: {equal} of {len(indices)} files looked at are equal to others, so "
            "training and test may share some"
        )
    if len(faults) > min(limit, len(indices) - 1):
        raise UserError(
            f"{dataset.path}: {len(faults)} of {len(indices)} samples cannot be used: "
            f"{faults[0]}; mend or remove them"
        )
    return len(faults), len(indices), faults[:5]


def digest_of(files):
    """16 digits that change with the names or sizes of `files`, or the start of 100 of them."""
    sizes = [(file.name, file.stat().st_size) for file in files]
    digest = hashlib.sha256(repr(sizes).encode())
    for number in order.evenly_spaced(len(files), 100):
        with open(files[number], "rb") as file:
            digest.update(file.read(2**16))
    return digest.hexdigest()[:16]


def stamps(files):
    """(path, size, time of the last change) of each of `files`."""
    found = []
    for file in files:
        status = file.stat()
        found.append((str(file), status.st_size, status.st_mtime_ns))
    return found


def texts_of(text, path):
    """The text, or the lines of the file `path`, that are not blank; UserError of an empty file."""
    texts = [text]
    if path:
        texts = decode_text(Path(path).read_bytes(), path).splitlines()
    texts = list(filter(None, map(str.strip, texts)))
    if (text or path) and not texts:
        raise UserError(f"{path or '--text'}: no text in it")
    return texts
