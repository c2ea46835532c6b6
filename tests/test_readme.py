"""The README's commands and recipes, run in their order.

Small settings are appended to each command. A torchrun command runs on as many processes as it
names. What needs a network is not run: pip, and the CLIP of the presets, whose place the small
one takes.
"""
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import tarfile
import typing

import helpers
import numpy as np
import pytest
from conftest import ROOT

import train_audio
import train_decoder
from common import config
from common.data import embed, embeddings, media

README = (ROOT / "README.md").read_text()
# (command, "") or ("", recipe) of all of them but the changes to a fork, which test_fork.py runs
ITEMS = re.findall(
    r"^    (?:pip .* && )?((?:python|torchrun) (?!-m pytest)[^\n]*)|^```python\n(.*?)^```",
    re.sub(r"\*\*To swap.*?\n## ", "", README, flags=re.DOTALL),
    re.MULTILINE | re.DOTALL,
)
SHORT = dict(steps=4, warmup_steps=1, log_every=2, eval_every=0)
TRAIN = dict(SHORT, device="cpu", batch_size=8, chunk_size=0, eval_samples=8)
SMALL = {
    "train_prior": dict(TRAIN, width=16, depth=1, heads=1, eval_timesteps=2),
    "train_prior sample": dict(device="cpu", steps=2),
    "train_decoder": dict(device="cpu", eval_samples=8),
    "train_decoder sample": dict(device="cpu", steps=2),
    "train_decoder evaluate": dict(device="cpu", steps=2, eval_samples=8),
    "train_audio": dict(device="cpu"),
    "train_audio sample": dict(device="cpu"),
    "common.interop.pretrained import": dict(clip="runs/clip"),
    "common.interop.pretrained export": {},
    "common.data.embed train": dict(
        device="cpu", image_size=16, text_width=32, steps=3, batch_size=8
    ),
    "common.data.embed embed": dict(device="cpu"),
}
UNET = dict(SHORT, batch_size=8, width=8, eval_steps=1)
TOKENS = dict(SHORT, batch_size=8, width=16, depth=1, heads=1, eval_samples=8)
# The defaults of each stage.
STAGES = {
    train_decoder: {"base": dict(UNET, cond_width=8), "upsample": UNET},
    train_audio: {
        "soundstream": dict(
            SHORT,
            batch_size=8,
            eval_samples=8,
            channels=2,
            latent_dim=16,
            codebook_size=16,
            quantizer_start=2,
            discriminator_start=3,
        ),
        "semantic": TOKENS,
        "coarse": TOKENS,
        "fine": TOKENS,
    },
}
# The presets' own 4 and 8 workers a rank would be 32 and 64 processes more.
PRESET = dict(TRAIN, validation=0.1, test=0.1, workers=0)
PRESETS = {
    "speech-small": {},  # see with_small_data
    "pictures-cpu": {},
    "dalle2": dict(PRESET, text_encodings="none"),
    "dalle2-64": dict(
        PRESET,
        clip="runs/clip",
        image_size=16,
        width=8,
        cond_width=8,
        channel_mult="1,2",
        attention_levels=1,
        num_res_blocks=1,
        eval_steps=1,
    ),
}


def with_defaults(cls, defaults):
    """The config class with other defaults."""
    kinds = typing.get_type_hints(cls, include_extras=True)
    fields = []
    for each in dataclasses.fields(cls):
        if each.name in defaults:
            field = dataclasses.field(default=defaults[each.name], metadata=each.metadata)
            fields.append((each.name, kinds[each.name], field))
    namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return dataclasses.make_dataclass(
        cls.__name__, fields, bases=(cls,), frozen=True, namespace=namespace
    )


def with_small_data(patch):
    """Let built-in data have a few rows, stages be small, and the CLIP be trained in no time."""
    train = embed.train

    def train_shortly(cfg, device):
        return train(dataclasses.replace(cfg, steps=4, batch_size=16), device)

    def builtin_data(*arguments, make=embed.builtin_data):
        with pytest.MonkeyPatch.context() as within:  # `embed train` takes the steps that it says
            within.setattr(embed, "train", train_shortly)
            return make(*arguments)

    patch.setattr(embed, "BUILTIN_ROWS", 120)
    patch.setattr(embed, "builtin_data", builtin_data)
    patch.setattr(train_audio, "BUILTIN_ROWS", 60)
    for script, stages in STAGES.items():
        for name, defaults in stages.items():
            cls = with_defaults(script.STAGES[name], defaults)
            patch.setattr(script, cls.__name__, cls)
            patch.setitem(script.STAGES, name, cls)
            patch.setitem(script.COMMANDS["train"][1], name, cls)
    for stage, settings in train_decoder.PICTURES_CPU.items():
        small = STAGES[train_decoder].get(stage, {})
        if stage == "base":
            small = dict(small, image_size=16)
        if stage == "upsample":
            small = dict(small, image_size=32, low_res_size=16, random_crop=16)
        patch.setitem(train_decoder.PICTURES_CPU, stage, {**settings, **small})
    for stage, settings in train_audio.SPEECH_SMALL.items():
        small = {**SHORT, **STAGES[train_audio].get(stage, {})}
        if stage == "all":
            del small["steps"]  # which each stage has
        patch.setitem(train_audio.SPEECH_SMALL, stage, {**settings, **small})


def main():
    """The script that the environment names, on small data: what a forked rank runs."""
    with pytest.MonkeyPatch.context() as patch:
        with_small_data(patch)
        importlib.import_module(os.environ["README_SCRIPT"]).main()


def write_published(folder):
    """The published models, small, where their names say; those whose packages are installed."""
    if importlib.util.find_spec("diffusers"):
        for name in ("kandinsky-community/kandinsky-2-2-prior", "kakaobrain/karlo-v1-alpha"):
            helpers.write_pipeline(folder / name, 64, 24)


def write_images(folder):
    """60 captioned images as plain files in FOLDER/images and in a tar in FOLDER/tars; both."""
    pictures, records = helpers.write_captioned(folder / "images", 60)
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars/00000.tar", "w") as tar:
        tar.add(folder / "images", "")
    return pictures, records


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """(a user's folder with files of each kind, the names that recipes find)."""
    folder = tmp_path_factory.mktemp("home")
    pictures, records = write_images(folder)
    captions = [record["caption"] for record in records]
    rows = np.random.default_rng(0).normal(size=(60, 64))

    for name, picture in zip(("a", "b", "hole"), pictures):
        (folder / f"{name}.png").write_bytes(media.png(picture))
    (folder / "small.png").write_bytes(media.png(pictures[3][::2, ::2]))
    helpers.write_voices(folder / "recordings", range(60))
    write_published(folder)
    longer = 3 * rows  # not of unit length
    embeddings.write_shards(folder / "mine", longer, longer, records)
    shutil.rmtree(folder / "mine/text_emb")  # they are not the CLIP's
    (folder / "mine/clip.json").write_text(json.dumps({"clip": str(folder / "runs/clip")}))

    names = dict(image_embeddings=rows, text_embeddings=rows, captions=captions)
    with pytest.MonkeyPatch.context() as patch:
        with_small_data(patch)
        yield folder, names


def small_settings(name, words):
    """{setting: value} that make the command NAME small."""
    command = name
    if words and not words[0].startswith("-"):
        command += f" {words[0]}"
    small = dict(SMALL[command])
    if "--preset" in words:
        small |= PRESETS[words[words.index("--preset") + 1]]
    script = importlib.import_module(name)
    if "--init_from" in words and hasattr(script, "Config"):  # the file has the model's settings
        for setting in config.settings_with(script.Config(), "model"):
            small.pop(setting, None)
    return small


@pytest.mark.parametrize("command, recipe", ITEMS, ids=[(a or b)[:70] for a, b in ITEMS])
def test_each_command_and_recipe_works_in_their_order(command, recipe, home, monkeypatch):
    folder, names = home
    monkeypatch.chdir(folder)
    if recipe:
        exec(recipe, names)
        return
    if re.search("k22|karlo", command):
        pytest.importorskip("diffusers", reason="no diffusers, which makes the published models")
    command = re.sub(r"open_clip:\S+", "runs/clip", command)
    launcher, *words = shlex.split(command, comments=True)
    ranks = 0
    if launcher == "torchrun":
        ranks = int(words.pop(0).removeprefix("--nproc_per_node="))
    elif words[0] == "-m":
        words.pop(0)
    name = words.pop(0).removesuffix(".py")
    words += helpers.flags(**small_settings(name, words))
    if not ranks:
        helpers.run(name, *words)
        return
    monkeypatch.setenv("README_SCRIPT", name)
    out = helpers.run("test_readme", *words, ranks=ranks)
    assert f"{ranks} rank(s) on cpu" in out or "is finished" in out


def test_what_the_recipes_make_is_there(home):
    folder, names = home
    assert names["embeddings"].shape == (4, 64)
    assert names["pictures"].shape == (4, 3, 16, 16)
    for name in (
        "emb/img_emb/img_emb_0.npy",
        "grid.png",
        "out.wav",
        "runs/decoder_images/upsample/model.pt",
        "runs/mine/coarse/model.pt",
        "runs/prior_images/model.pt",
    ):
        assert (folder / name).is_file(), name
