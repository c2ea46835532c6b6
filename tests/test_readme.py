"""The README's commands and recipes, run in their order, with small settings appended to each command.

A torchrun command runs on as many processes as stand there. What needs a network is not run: pip, and the
CLIP of the presets, in the place of which is the small one.
"""
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import sys
import tarfile
import types
from pathlib import Path

import helpers
import numpy as np
import pytest
from conftest import ROOT

from common import clip, data, media, synthetic

TEXT = (ROOT / "README.md").read_text()
ITEMS = re.findall(r"^    (?:pip .* && )?((?:python|torchrun) (?!-m pytest)[^\n]*)|^```python\n(.*?)^```", TEXT,
                   re.MULTILINE | re.DOTALL)
TRAIN = dict(batch_size=8, chunk_size=0, steps=4, warmup_steps=1, log_every=2, eval_every=0, eval_samples=8)
SMALL = {
    "train_prior": dict(TRAIN, width=16, depth=1, heads=1, eval_timesteps=2),
    "train_prior sample": dict(steps=2),
    "train_decoder": dict(TRAIN, width=8, cond_width=8, head_width=8, eval_steps=1),
    "train_decoder sample": dict(steps=2),
    "train_decoder evaluate": dict(steps=2, eval_samples=8),
    "train_audio": dict(TRAIN, channels=2, codec_width=16, codebook_size=16, discriminator_channels=1, stft_window=256,
                        quantize_after=2, discriminator_after=3, width=16, depth=1, heads=1),
    "train_audio sample": {},
    "common.pretrained import": dict(clip="runs/clip"),
    "common.pretrained export": {},
    "common.clip train": dict(image_size=16, text_width=32, steps=3, batch_size=8),
    "common.clip embed": {},
}


PRESETS = {
    "dalle2": dict(text_encodings="none", validation=0.1, test=0.1),
    "dalle2-64": dict(clip="runs/clip", image_size=16, mults="1,2", attention_levels=1, blocks=1, validation=0.1,
                      test=0.1),
}


def with_small_data(patch):
    """Let built-in data have a few rows, and their CLIP be trained in no time."""
    def builtin_data(runs, device, make=clip.builtin_data):
        with pytest.MonkeyPatch.context() as within:
            within.setattr(clip, "train", lambda cfg, device, train=clip.train: train(
                dataclasses.replace(cfg, steps=4, batch_size=16), device))
            return make(runs, device)
    patch.setattr(clip, "BUILTIN_ROWS", 120)
    patch.setattr(clip, "builtin_data", builtin_data)
    patch.setattr("train_audio.BUILTIN_ROWS", 60)


def main():
    """The script that the environment names, on small data: what a forked rank runs."""
    with pytest.MonkeyPatch.context() as patch:
        with_small_data(patch)
        importlib.import_module(os.environ["README_SCRIPT"]).main()


class Picture(np.ndarray):
    """As much of Pillow's image as the recipe for a data set of Hugging Face needs."""

    def convert(self, mode):
        return self

    def save(self, path):
        media.write_png(path, np.asarray(self))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """(the folder of a user with files of their own, the names that recipes find); built-in data have a few rows."""
    folder, (pictures, records) = tmp_path_factory.mktemp("home"), synthetic.shapes(range(60))
    captions, embeddings = [record["caption"] for record in records], np.random.default_rng(0).normal(size=(60, 64))
    for name, picture in zip(("a", "b", "hole", "small"), (*pictures[:3], pictures[3][::2, ::2])):
        media.write_png(folder / f"{name}.png", picture)
    (folder / "captions.txt").write_text("a small red star\nsomething blue\n")
    (folder / "images").mkdir()
    helpers.write_voices(folder / "recordings", range(60))
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars/00000.tar", "w") as tar:
        for number, (picture, caption) in enumerate(zip(pictures, captions)):
            media.write_png(folder / "picture.png", picture)
            (folder / "caption.txt").write_text(caption)
            tar.add(folder / "picture.png", f"{number:09d}.png")
            tar.add(folder / "caption.txt", f"{number:09d}.txt")
    if importlib.util.find_spec("diffusers"):  # the published models, at small sizes, where their names say
        helpers.write_pipeline(folder / "kandinsky-community/kandinsky-2-2-prior", 64, 24)
        helpers.write_pipeline(folder / "kakaobrain/karlo-v1-alpha", 64, 24)
    if importlib.util.find_spec("transformers"):
        import transformers
        transformers.MimiModel(transformers.MimiConfig(
            sampling_rate=24000, num_filters=2, hidden_size=16, num_quantizers=8, codebook_size=16, codebook_dim=8,
            vector_quantization_hidden_dimension=8, upsampling_ratios=[8, 6, 5], upsample_groups=16,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
        )).save_pretrained(folder / "kyutai/mimi")
    data.write_shards(folder / "mine", 3 * embeddings, 3 * embeddings, records)  # not of unit length
    (folder / "mine/clip.json").write_text(json.dumps({"clip": str(folder / "runs/clip")}))
    datasets = types.ModuleType("datasets")  # the package, which is not needed for tests
    datasets.load_dataset = lambda kind, data_dir, split: [
        {"image": picture.view(Picture), "text": text} for picture, text in zip(pictures, captions)]

    with pytest.MonkeyPatch.context() as patch:
        with_small_data(patch)
        patch.setitem(sys.modules, "datasets", datasets)
        yield folder, dict(image_embeddings=embeddings, text_embeddings=embeddings, captions=captions)


@pytest.mark.parametrize("command, recipe", ITEMS, ids=[(command or recipe)[:70] for command, recipe in ITEMS])
def test_readme(command, recipe, home, monkeypatch):
    folder, names = home
    monkeypatch.chdir(folder)
    if recipe:
        exec(recipe, names)
        return
    words = [word for word in shlex.split(command, comments=True)[1:] if word != "-m"]
    words = ["runs/clip" if word.startswith("open_clip:") else word for word in words]
    ranks = 0
    if words[0].startswith("--nproc_per_node="):
        ranks = int(words.pop(0).partition("=")[2])
    name = words.pop(0).removesuffix(".py")
    if any("k22" in word or "karlo" in word for word in words):
        pytest.importorskip("diffusers", reason="no diffusers, which makes the published models")
    if any("mimi" in word for word in words):
        pytest.importorskip("transformers", reason="no transformers, which makes the published codec")
    small = SMALL[" ".join([name, *words[:1]]) if words and not words[0].startswith("-") else name]
    if "--preset" in words:
        small = small | PRESETS[words[words.index("--preset") + 1]]
    if "--init_from" in words:  # the file has the model's settings
        made = importlib.import_module(name).MODEL
        small = {setting: value for setting, value in small.items() if setting not in made}
    if "--soundstream" in words:
        import train_audio
        small = {setting: value for setting, value in small.items() if setting not in train_audio.CODEC}
    if not name.endswith("pretrained"):
        small = small | {"device": "cpu"}
    words += helpers.flags(**small)
    if ranks:
        monkeypatch.setenv("README_SCRIPT", name)
        out = helpers.run("test_readme", *words, ranks=ranks)
        assert f"{ranks} rank(s) on cpu" in out or "is finished" in out
    else:
        run = helpers.run_module if name.startswith("common.") else helpers.run
        run(name, *words)


def test_what_the_recipes_make_is_there(home):
    folder, names = home
    assert names["embeddings"].shape == (4, 64) and names["pictures"].shape == (4, 3, 16, 16)
    for name in ("emb/img_emb/img_emb_0.npy", "images/000059.txt", "grid.png", "folder/0001_0005.png", "out.wav",
                 "runs/decoder_images/upsample/model.pt", "runs/mine/fine/model.pt", "runs/prior_images/model.pt"):
        assert Path(folder, name).is_file(), name
