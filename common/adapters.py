"""Runs that train LoRA adapters on a frozen base, and the use of their files.

A fork that trains whole models alone deletes this file, its lines in the scripts and in resume.py,
and models/lora.py.
"""

from pathlib import Path

from common import amp, checkpoint, config, dist
from common.config import UserError
from common.models import lora


def start(model, cfg, sha256):
    """Give `model` the (averaged) weights of --init_from, and adapters of rank --lora_rank.

    With --precision bf16 or fp16 the frozen base is stored in that, as autocast would cast it. A
    step of a prior of 106 M weights then takes 16 to 26 % less memory on a CPU.
    Returns (adapters, {"rank", "base", "base_sha256", "source"}, the entry "lora" of the run's
    files). source: what the base was imported from, if it was, else its path. sha256: of the file.
    Collective. UserError if the file is of another model, or of adapters.
    """
    path = cfg.init_from

    def load_base():
        contents = checkpoint.model_contents(checkpoint.load(path, mmap=True))
        if "lora" in contents:
            raise UserError(f"{path}: LoRA adapters, not a model; give their base")
        checkpoint.load_weights(model, contents["model"], path)
        return contents.get("source")

    source = dist.on_all(load_base)
    base = str(Path(path).absolute())
    info = {
        "rank": cfg.lora_rank,
        "base": base,
        "base_sha256": sha256,
        "source": source or base,
    }
    lora.cast_matrices(model, amp.DTYPES[cfg.precision])
    return lora.inject(model, cfg.lora_rank), info


def merged(contents, path, scale=1.0):
    """The contents of a model's file, from those of the file `path`, of adapters on a base.

    All entries are those of the adapters, without "lora"; "model" has the weights of the base with
    `scale` times the adapters added. Those of a whole model are as they are.
    """
    if "lora" not in contents:
        if scale != 1:
            raise UserError(f"--lora_scale: {path} has no adapters; leave it out")
        return contents
    base = contents["lora"]["base"]
    weights = checkpoint.model_contents(checkpoint.load(base))["model"]
    if checkpoint.checksum(base) != contents["lora"]["base_sha256"]:
        config.note(f"{path} was trained on {base}, which has changed since")
    with config.explained(f"{path}: adapters of another model than {base}"):
        weights = lora.add(weights, contents["model"], scale)
    contents = contents | {"model": weights}
    del contents["lora"]
    return contents
