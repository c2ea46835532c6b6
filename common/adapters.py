"""Train LoRA adapters on a frozen base model, and merge them into it for inference.

A fork without LoRA can delete this file, its calls in the scripts and in resume.py, and
models/lora.py.
"""

from pathlib import Path

from common import amp, checkpoint, config, dist
from common.config import UserError
from common.models import lora


def start(model, cfg, sha256):
    """Load the averaged weights of --init_from into `model`, and add adapters of rank --lora_rank.

    With --precision bf16 or fp16, the frozen matrices are stored in that type, because autocast
    would cast them anyway. For a prior with 106 M weights, a step then takes 16% to 26% less memory
    on a CPU.

    sha256: hash of the --init_from file. Returns (adapters, {"rank", "base", "base_sha256",
    "source"}). The dict becomes the entry "lora" of the run's files. Its "source" is where the base
    was imported from, or else its path. Collective. UserError if the file contains a different
    model, or adapters.
    """
    path = cfg.init_from

    def load_base():
        contents = checkpoint.model_contents(checkpoint.load(path, mmap=True))
        if "lora" in contents:
            raise UserError(f"{path}: has only LoRA adapters; give their base model")
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
    """The `contents` of the model file `path`, with LoRA adapters merged into their base.

    "model" becomes the weights of the base plus `scale` times the adapters, and "lora" is removed.
    The contents of a model without adapters are returned unchanged.
    """
    if "lora" not in contents:
        if scale != 1:
            raise UserError(f"--lora_scale: {path} has no adapters; leave it out")
        return contents
    base = contents["lora"]["base"]
    weights = checkpoint.model_contents(checkpoint.load(base))["model"]
    if checkpoint.checksum(base) != contents["lora"]["base_sha256"]:
        config.note(f"{path} was trained on {base}, which has changed since")
    with config.explained(f"{path}: its adapters do not fit {base}"):
        weights = lora.add(weights, contents["model"], scale)
    contents = contents | {"model": weights}
    del contents["lora"]
    return contents
