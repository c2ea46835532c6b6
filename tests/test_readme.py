"""Run the commands and recipes of the README and the guides, in order.

Small settings are appended to each command. A torchrun command runs on as many processes as it
names. Nothing uses the network: pip is not run, and a small CLIP replaces the presets' CLIPs.
"""
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import tarfile

import helpers
import numpy as np
import pytest
from conftest import README

import train_audio
import train_decoder
from common.data import embed, embeddings, media

# Pairs (command, "") or ("", recipe). Recipes for a fork are left out; test_fork.py runs them.
ITEMS = re.findall(
    r"^    (?:pip .* && )?((?:python|torchrun) (?!-m pytest)[^\n]*)|^```python\n(.*?)^```",
    re.sub(r"\n## Recipes for a fork\n.*?\n# ", "\n# ", README, flags=re.DOTALL),
    re.MULTILINE | re.DOTALL,
)
SHORT = dict(warmup_steps=1, log_every=2, eval_every=0)
TRAIN = dict(SHORT, steps=4, batch_size=8, eval_samples=8)
TRANSFORMER = dict(width=16, depth=1, heads=1)
UNET = dict(TRAIN, width=8, eval_steps=1)
TOKENS = dict(TRAIN, **TRANSFORMER)
# Small settings of each stage. They form the preset "small", and shrink presets in the README.
STAGES = {
    train_decoder: {
        "all": {},
        "base": dict(UNET, cond_width=8, image_size=16),
        "upsample": dict(UNET, image_size=32, low_res_size=16, random_crop=16),
    },
    train_audio: {
        "all": SHORT,
        "soundstream": dict(
            TRAIN,
            channels=2,
            latent_dim=16,
            codebook_size=16,
            quantizer_start=2,
        ),
        "semantic": TOKENS,
        "coarse": TOKENS,
        "fine": TOKENS,
    },
}
# {pattern: settings for the commands that match it}.
SMALL = {
    "train_|data.embed": dict(device="cpu"),
    "(prior|decoder).py (sample|evaluate)": dict(steps=2),
    "train_decoder.py(?! sample)": dict(eval_samples=8),
    "train_(decoder|audio).py(?! sample| evaluate|.* --(preset|init_from))": dict(preset="small"),
    "train_prior.py(?! sample)|--init_from|--preset dalle2": TRAIN,
    "train_prior.py(?! sample)": dict(eval_timesteps=2),
    "train_prior.py(?! sample|.* --init_from)": TRANSFORMER,
    "train_decoder.py .*--(init_from|preset dalle2)": dict(eval_steps=1),
    # The presets' 4 and 8 workers per rank would add 32 and 64 processes.
    "--preset dalle2": dict(chunk_size=0, validation=0.1, test=0.1, workers=0),
    "--preset dalle2$": dict(text_encodings="false", text_source="shards"),
    "--preset dalle2-64": dict(
        clip="runs/clip",
        image_size=16,
        width=8,
        cond_width=8,
        channel_mult="1,2",
        attention_levels=1,
        num_res_blocks=1,
    ),
    "pretrained import": dict(clip="runs/clip"),
    "embed train": dict(image_size=16, text_width=32, steps=3, batch_size=8),
}


def with_small_data(patch):
    """Make the built-in data and the presets small, and train the CLIP for only a few steps."""
    train = embed.train

    def train_shortly(cfg, device):
        return train(dataclasses.replace(cfg, steps=4, batch_size=16), device)

    def builtin_data(*arguments, make=embed.builtin_data):
        with pytest.MonkeyPatch.context() as within:  # `embed train` itself is not shortened
            within.setattr(embed, "train", train_shortly)
            return make(*arguments)

    patch.setattr(embed, "BUILTIN_ROWS", 120)
    patch.setattr(embed, "builtin_data", builtin_data)
    patch.setattr(train_audio, "BUILTIN_ROWS", 60)
    for script, name in ((train_decoder, "pictures-cpu"), (train_audio, "speech-small")):
        small = STAGES[script]
        patch.setitem(script.PRESETS, "small", small)
        stages = script.PRESETS[name].items()
        stages = {stage: {**settings, **small[stage]} for stage, settings in stages}
        patch.setitem(script.PRESETS, name, stages)


def main():
    """Run the script named by README_SCRIPT, on small data, in a forked rank."""
    with pytest.MonkeyPatch.context() as patch:
        with_small_data(patch)
        importlib.import_module(os.environ["README_SCRIPT"]).main()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """(a user's folder with files of each kind, {name: value} of variables in recipes)."""
    folder = tmp_path_factory.mktemp("home")
    pictures, records = helpers.write_captioned(folder / "images", 60)
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars/00000.tar", "w") as tar:
        tar.add(folder / "images", "")
    for name, picture in zip(("a", "b", "hole"), pictures):
        (folder / f"{name}.png").write_bytes(media.png(picture))
    for name in ("recordings", "VCTK-Corpus-0.92"):
        helpers.write_voices(folder / name, range(60))
    (folder / "LJSpeech-1.1/wavs").mkdir(parents=True)
    row = "LJ1|in 1455, so|in fourteen fifty-five, so\n"
    (folder / "LJSpeech-1.1/metadata.csv").write_text(row)
    if importlib.util.find_spec("diffusers"):  # small stand-ins for the published models
        for name in ("kandinsky-community/kandinsky-2-2-prior", "kakaobrain/karlo-v1-alpha"):
            helpers.write_pipeline(folder / name)

    rows = np.random.default_rng(0).normal(size=(60, 64))
    embeddings.write_shards(folder / "emb", rows, rows, records)
    embeddings.write_shards(folder / "mine", 3 * rows, 3 * rows, records)  # not of unit length
    shutil.rmtree(folder / "mine/text_emb")  # not made by this CLIP
    (folder / "mine/clip.json").write_text(json.dumps({"clip": str(folder / "runs/clip")}))
    captions = [record["caption"] for record in records]
    names = dict(image_embeddings=rows, text_embeddings=rows, captions=captions)
    with pytest.MonkeyPatch.context() as patch:
        with_small_data(patch)
        yield folder, names


@pytest.mark.parametrize("command, recipe", ITEMS, ids=[(a or b)[:70] for a, b in ITEMS])
def test_each_command_and_recipe_works_in_their_order(command, recipe, home, monkeypatch):
    folder, names = home
    monkeypatch.chdir(folder)
    if recipe:
        exec(recipe, names)
        return
    if re.search("k22|karlo", command):
        pytest.importorskip("diffusers")  # needed for the stand-ins of the published models
    command = re.sub(r"open_clip:\S+", "runs/clip", command)
    command = command.replace('"seven"', '"a i"')  # the recordings contain only vowels
    launcher, *words = shlex.split(command, comments=True)
    small = {}
    for pattern, settings in SMALL.items():
        if re.search(pattern, " ".join(words)):
            small |= settings
    ranks = 0
    if launcher == "torchrun":
        ranks = int(words.pop(0).removeprefix("--nproc_per_node="))
    elif words[0] == "-m":
        words.pop(0)
    name = words.pop(0).removesuffix(".py")
    words += helpers.flags(**small)
    if not ranks:
        helpers.run(name, *words)
        return
    monkeypatch.setenv("README_SCRIPT", name)
    out = helpers.run("test_readme", *words, ranks=ranks)
    assert f"{ranks} rank(s) on cpu" in out or "rank(s)" not in out


def test_what_the_recipes_make_is_there(home):
    folder, names = home
    assert names["embeddings"].shape == (4, 64)
    assert names["pictures"].shape == (4, 3, 16, 16)
    for name in (
        "emb/img_emb/img_emb_0.npy",
        "LJSpeech-1.1/wavs/LJ1.txt",
        "grid.png",
        "out.wav",
        "runs/decoder_images/upsample/model.pt",
        "runs/mine/coarse/model.pt",
        "runs/prior_images/model.pt",
    ):
        assert (folder / name).is_file(), name
