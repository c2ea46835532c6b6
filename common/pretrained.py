"""Published weights of Karlo and Kandinsky: from diffusers' folders or Karlo's files, and back.

    python -m common.pretrained import kakaobrain/karlo-v1-alpha --out runs/karlo
    python -m common.pretrained import kandinsky-community/kandinsky-2-2-prior/prior --out runs/k22
    python -m common.pretrained export --run_dir runs/mine --out my-prior

`import` takes a folder, a file, or a repository of the Hugging Face hub. It writes ordinary run
folders with a model.pt. `export` writes what diffusers loads, or, of adapters, what peft loads.
"""

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from common import checkpoint, clip, config, lora
from common.config import UserError, need

# Names of modules: ours, diffusers', Karlo's own. A layer of ours that joins several of theirs has
# them in order.
DIFFUSERS, KARLO = 0, 1
PRIOR = {
    "positions.weight": ("positional_embedding", "positional_embedding"),
    "query.weight": ("prd_embedding", "prd_emb"),
    "clip_mean": ("clip_mean", "clip_mean"),
    "clip_std": ("clip_std", "clip_std"),
    "time_in.layers.0": ("time_embedding.linear_1", "time_embed.0"),
    "time_in.layers.2": ("time_embedding.linear_2", "time_embed.2"),
    "image_in": ("proj_in", "clip_img_proj"),
    "text_in": ("embedding_proj", "text_emb_proj"),
    "encoding_in": ("encoder_hidden_states_proj", "text_enc_proj"),
    "transformer.norm": ("norm_out", "final_ln"),
    "out": ("proj_to_clip_embeddings", "out_proj"),
}
PRIOR_BLOCK = {
    "attention_norm": ("norm1", "ln_1"),
    "attention.query": ("attn1.to_q", "attn.c_qkv.0"),
    "attention.key_value": ("attn1.to_k attn1.to_v", "attn.c_qkv.1 attn.c_qkv.2"),
    "attention.out": ("attn1.to_out.0", "attn.c_proj"),
    "ff_norm": ("norm3", "ln_2"),
    "ff.up": ("ff.net.0.proj", "mlp.c_fc"),
    "ff.down": ("ff.net.2", "mlp.c_proj"),
}
UNET = {
    "stem": ("conv_in", "input_blocks.0.0"),
    "time_in.layers.0": ("time_embedding.linear_1", "time_embed.0"),
    "time_in.layers.2": ("time_embedding.linear_2", "time_embed.2"),
    "out.0": ("conv_norm_out", "out.0"),
    "out.2": ("conv_out", "out.2"),
    "null_image": ("text_proj.learned_classifier_free_guidance_embeddings", "cf_param"),
    "image_in": ("text_proj.clip_image_embeddings_project_to_time_embeddings", "clip_emb"),
    "image_tokens_in": ("text_proj.clip_extra_context_tokens_proj", "clip_tok_proj"),
    "text_in": ("text_proj.embedding_proj", "text_feat_proj"),
    "encoding_in": ("text_proj.encoder_hidden_states_proj", "text_seq_proj.0"),
    "encoding_norm": ("text_proj.text_encoder_hidden_states_norm", "text_seq_proj.1"),
}
RESIDUAL = {
    "norm1": ("norm1", "in_layers.0"),
    "conv1": ("conv1", "in_layers.2"),
    "modulation": ("time_emb_proj", "emb_layers.1"),
    "norm2": ("norm2", "out_layers.0"),
    "conv2": ("conv2", "out_layers.3"),
    "skip": ("conv_shortcut", "skip_connection"),
}
ATTENTION = {
    "attention_norm": ("group_norm", "norm"),
    "attention.query": ("to_q", "qkv.0"),
    "attention.key_value": ("to_k to_v", "qkv.1 qkv.2"),
    "token_key_value": ("add_k_proj add_v_proj", "encoder_kv.0 encoder_kv.1"),
    "attention.out": ("to_out.0", "proj_out"),
}
LEADING_ONE = (
    "positional_embedding",
    "prd_embedding",
    "clip_mean",
    "clip_std",
)  # their first dimension is 1

PARTS = {
    "prior": "prior/model.pt",
    "decoder": "base/model.pt",
    "super_res_first": "upsample/model.pt",
    "super_res_last": "upsample/last_step.pt",
}  # folders of a pipeline, and what they become
CLIPS = {768: "open_clip:ViT-L-14/openai", 1280: "open_clip:ViT-bigG-14/laion2b_s39b_b160k"}
FINE_TUNING = {"optimizer": "adamw", "lr": 1e-5}  # what --init_from takes, as the model is large
# What of a config.json has no setting here, because it is of one form.
ONE_FORM = {
    "PriorTransformer": {
        "additional_embeddings": 4,
        "added_emb_type": "prd",
        "norm_in_type": None,
        "embedding_proj_norm_type": None,
        "time_embed_act_fn": "silu",
    },
    "UNet2DConditionModel": {
        "in_channels": 3,
        "norm_num_groups": 32,
        "norm_eps": 1e-5,
        "act_fn": "silu",
        "class_embed_type": "identity",
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "only_cross_attention": False,
        "cross_attention_norm": None,
        "resnet_skip_time_act": False,
        "freq_shift": 0,
        "flip_sin_to_cos": True,
        "center_input_sample": False,
        "mid_block_scale_factor": 1,
        "time_embedding_type": "positional",
    },
    "UNet2DModel": {
        "in_channels": 6,
        "out_channels": 3,
        "norm_num_groups": 32,
        "norm_eps": 1e-5,
        "act_fn": "silu",
        "add_attention": False,
        "freq_shift": 0,
        "flip_sin_to_cos": True,
        "center_input_sample": False,
        "mid_block_scale_factor": 1,
        "time_embedding_type": "positional",
    },
}


# Names


def unet_blocks(unet):
    """Yield (our block, (diffusers' residual block, Karlo's), (diffusers' attention, Karlo's)).

    Ours stand in ADM's order, and so in Karlo's.
    """
    level = block = 0
    for i, layer in enumerate(unet.downs):
        residual = f"down_blocks.{level}.resnets.{block}"
        attention = f"down_blocks.{level}.attentions.{block}"
        block += 1
        if isinstance(layer.resample, nn.AvgPool2d):
            residual = f"down_blocks.{level}.downsamplers.0"
            level += 1
            block = 0
        karlo = f"input_blocks.{i + 1}"
        yield f"downs.{i}", (residual, f"{karlo}.0"), (attention, f"{karlo}.1")
    second = 2 if unet.middle[0].attends else 1
    attention = "mid_block.attentions.0", "middle_block.1"
    yield "middle.0", ("mid_block.resnets.0", "middle_block.0"), attention
    yield "middle.1", ("mid_block.resnets.1", f"middle_block.{second}"), attention
    level = block = 0
    number = -1  # in Karlo's list, where a block that doubles shares an entry with the one before
    for i, layer in enumerate(unet.ups):
        residual = f"up_blocks.{level}.resnets.{block}"
        attention = f"up_blocks.{level}.attentions.{block}"
        block += 1
        number += 1
        place = 0
        if isinstance(layer.resample, nn.Upsample):
            residual = f"up_blocks.{level}.upsamplers.0"
            level += 1
            block = 0
            number -= 1
            place = 2 if unet.ups[i - 1].attends else 1
        karlo = f"output_blocks.{number}"
        yield f"ups.{i}", (residual, f"{karlo}.{place}"), (attention, f"{karlo}.1")


def published_names(model, style):
    """{our parameter: the published ones that it is made of}, in the style DIFFUSERS or KARLO."""
    modules = {}

    def add(table, ours="", theirs=""):
        for name, published in table.items():
            modules[ours + name] = [theirs + part for part in published[style].split()]

    if kind_of(model) == "prior":
        add(PRIOR)
        prefix = ("transformer_blocks", "transformer.resblocks")[style]
        for i in range(model.cfg.depth):
            add(PRIOR_BLOCK, f"transformer.blocks.{i}.", f"{prefix}.{i}.")
    else:
        add(UNET)
        for ours, residual, attention in unet_blocks(model):
            add(RESIDUAL, f"{ours}.", f"{residual[style]}.")
            add(ATTENTION, f"{ours}.", f"{attention[style]}.")
    names = {}
    for name in model.state_dict():
        module, _, kind = name.rpartition(".")
        if name in modules:
            names[name] = modules[name]
        elif module in modules:
            names[name] = [f"{theirs}.{kind}" for theirs in modules[module]]
    return names


def kind_of(model):
    return "prior" if hasattr(model, "transformer") else "decoder"


def split_heads(tensors, head_width):
    """Karlo's own `tensors` with queries, keys and values apart. There they lie by heads."""
    apart = {}
    for name, value in tensors.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(("qkv", "encoder_kv")):
            apart[name] = value
            continue
        parts = 2 if module.endswith("encoder_kv") else 3
        by_head = value.unflatten(0, (-1, parts, head_width))  # (heads, 2 or 3, d, …)
        for i in range(parts):
            apart[f"{module}.{i}.{kind}"] = by_head[:, i].flatten(0, 1)
    return apart


# From theirs to ours


def convert(model, tensors, style, path):
    """Our {name: tensor} of the published `tensors`; UserError unless every one fits.

    `model` may be on the device "meta".
    """
    rest = dict(tensors)
    if style == KARLO:
        rest = {re.sub(r"^model\w*\.", "", name): value for name, value in rest.items()}
        cfg = model.cfg
        rest = split_heads(
            rest, cfg.width // cfg.heads if kind_of(model) == "prior" else cfg.head_width
        )
    weights = {}
    expected = model.state_dict()
    for name, published in published_names(model, style).items():
        missing = [part for part in published if part not in rest]
        if missing:
            raise UserError(
                f"{path}: {missing[0]} is missing; expected the weights of a {kind_of(model)}"
            )
        value = torch.cat([rest.pop(part) for part in published]).float()
        if name.startswith("image_tokens_in."):  # theirs has the tokens innermost
            value = value.unflatten(0, (-1, 4)).transpose(0, 1)
        shape = expected[name].shape
        if value.numel() != shape.numel():
            raise UserError(
                f"{path}: {published[0]} is {tuple(value.shape)}; expected {tuple(shape)}"
            )
        weights[name] = value.reshape(shape)
    if rest:
        raise UserError(f"{path}: {len(rest)} weights are unknown: {', '.join(sorted(rest)[:5])}")
    return weights


def settings_of(about, path):
    """(script's module, our settings) for the contents `about` of a config.json."""
    import train_decoder
    import train_prior

    name = about.get("_class_name")
    if name not in ONE_FORM:
        raise UserError(f"{path}: _class_name is {name!r}; expected one of {', '.join(ONE_FORM)}")
    for field, expected in ONE_FORM[name].items():
        if about.get(field, expected) != expected:
            raise UserError(
                f"{path}: {field} is {about[field]!r}; only {expected!r} is of the form here"
            )
    if name == "PriorTransformer":
        encoded = about.get("encoder_hid_proj_type", "linear") is not None
        heads = about.get("num_attention_heads", 32)
        return train_prior, dict(
            width=heads * about.get("attention_head_dim", 64),
            heads=heads,
            depth=about.get("num_layers", 20),
            text_encodings="clip" if encoded else "none",
            max_text_len=about.get("num_embeddings", 77) or 77,
            dropout=about.get("dropout", 0.0),
            raw_embeddings=True,
            guidance_scale=4.0,
            eval_timesteps=(25,),
        )
    widths = about["block_out_channels"]
    size = about["sample_size"]
    if any(width % widths[0] for width in widths) or widths[0] < 128:
        raise UserError(
            f"{path}: block_out_channels {widths}; expected multiples of the first, 128 or more"
        )
    settings = dict(
        image_size=size,
        width=widths[0],
        mults=tuple(width // widths[0] for width in widths),
        blocks=about.get("layers_per_block", 2),
        scale_shift=about.get("resnet_time_scale_shift") == "scale_shift",
        attention_levels=tuple(
            i for i, kind in enumerate(about["down_block_types"]) if "CrossAttn" in kind
        ),
        objective="epsilon",
        timestep_density="uniform",
        eta=1.0,
    )
    if name == "UNet2DModel":
        return train_decoder, dict(
            settings,
            stage="upsample",
            low_res_size=size // 4,
            random_crop=size // 4,
            image_condition=False,
            eval_steps=7,
        )
    return train_decoder, dict(
        settings,
        stage="base",
        head_width=about["attention_head_dim"],
        cond_width=about["cross_attention_dim"],
        text_encodings="clip",
        raw_embeddings=True,
        learned_variance=about["out_channels"] == 6,
        guidance_scale=8.0,
        eval_steps=25,
    )


def read(path):
    """What a .safetensors file has, or one that torch saved; plain values and tensors alone."""
    safetensors = None
    if path.suffix == ".safetensors":
        safetensors = need("safetensors.torch", str(path), "safetensors")
    try:
        if safetensors:
            return safetensors.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a dozen types
        raise UserError(
            f"{path}: damaged, or not of tensors alone ({type(error).__name__}); fetch it again"
        ) from error


def tensors_in(path):
    """{name: tensor} of a .safetensors file, or of one that torch saved.

    Without what torch.compile and DistributedDataParallel put before names.
    """
    tensors = read(path)
    tensors = tensors.get("state_dict", tensors)
    return {re.sub(r"^((_orig_mod|module)\.)+", "", name): value for name, value in tensors.items()}


def read_folder(folder):
    """(contents of config.json, tensors) of a folder of diffusers."""
    for name in ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"):
        if (folder / name).is_file() and (folder / "config.json").is_file():
            return config.read_json(folder / "config.json"), tensors_in(folder / name)
    raise UserError(
        f"{folder}: expected config.json and diffusion_pytorch_model.safetensors or .bin"
    )


def write_model(script, settings, tensors, style, widths, source, out, spec):
    """Write the model.pt `out` of published `tensors`, for which `settings` were found.

    Nothing is overwritten.
    """
    if out.exists():
        raise UserError(f"{out}: is there already; give another --out")
    spec = spec or CLIPS.get(widths[0], "")
    if Path(spec).exists():
        spec = str(Path(spec).resolve())
    settings = dict(settings, run_dir=str(out.parent), clip=spec or "auto")
    settings |= {"precision": "fp32", "chunk_size": 16, **FINE_TUNING}  # the first two: of evaluation
    cfg = script.Config(**settings)
    with torch.device("meta"):
        model = (script.Prior if script.__name__ == "train_prior" else script.UNet)(cfg, *widths)
    weights = convert(model, tensors, style, source)
    fingerprint = None
    if hasattr(model, "null_text"):  # "no text" is the CLIP's encoding of ""
        encoder = clip.load(spec, "cpu")
        clip.check_widths(encoder, f"--clip {spec} for {source}", *widths)
        fingerprint = encoder.fingerprint()
        null = encoder.text_condition([""], cfg.max_text_len)
        weights |= {f"null_text.{name}": null[name] for name, _ in model.null_text.named_buffers()}
    state = {
        "kind": kind_of(model),
        "model": weights,
        "config": config.as_json(cfg),
        "widths": list(widths),
        "step": 0,
        "clip": spec or None,
        "clip_fingerprint": fingerprint,
        "cwd": os.getcwd(),
        "metadata": {"source": str(source)},
        "versions": checkpoint.versions(script.__file__),
    }
    checkpoint.check_weights(model, state, source)
    checkpoint.save(state, out)
    checkpoint.write_json(config.as_json(cfg), out.parent / "config.json")
    count = sum(
        value.numel() for name, value in weights.items() if not name.startswith("null_text")
    )
    print(f"wrote {out}: {count:,} parameters of a {kind_of(model)}")


@dataclass(frozen=True)
class ImportConfig(config.Settings):
    source: str = ""  # folder or file, or OWNER/REPOSITORY[/FOLDER] of the Hugging Face hub
    out: str = ""  # run folder to write; of a whole pipeline, the folder of its run folders
    clip: str = ""  # CLIP of its embeddings, by default ViT-L/14 or ViT-bigG/14, by their width


def fetch(source):
    """The local folder or file of `source`, downloaded if it is not here."""
    if Path(source).exists():
        return Path(source)
    if not re.fullmatch(r"[\w.-]+/[\w./-]+", source):
        raise UserError(
            f"--source {source}: no such file or folder, nor OWNER/REPOSITORY of the hub"
        )
    hub = need("huggingface_hub", f"import {source}")
    owner, name, *inside = source.split("/")
    repository = f"{owner}/{name}"
    folders = ["/".join(inside)] if inside else [*PARTS]
    text_proj = "/".join([*inside[:-1], "text_proj"])
    try:
        files = hub.list_repo_files(repository)
        twice = [file for file in files if file.replace(".bin", ".safetensors") in files]
        folder = hub.snapshot_download(
            repository,
            allow_patterns=[f"{part}/*" for part in (*folders, text_proj)],
            ignore_patterns=["*.fp16.*", *(file for file in twice if file.endswith(".bin"))],
        )
    except Exception as error:  # of many types: no network, no such repository, no permission
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{source}: {type(error).__name__}: {reason}") from error
    return Path(folder, *inside)


def import_folder(folder, out, spec):
    """Write the model.pt `out` of a folder of diffusers; a decoder's text_proj lies beside it."""
    about, tensors = read_folder(folder)
    script, settings = settings_of(about, folder / "config.json")
    widths = (0, 0)
    if settings.get("text_encodings"):
        width = about.get("embedding_dim", 768)
        if about["_class_name"] == "UNet2DConditionModel":
            projection, more = read_folder(folder.parent / "text_proj")
            width = projection.get("clip_embeddings_dim", 768)
            tensors |= {f"text_proj.{name}": value for name, value in more.items()}
        widths = (width, width if settings["text_encodings"] == "clip" else 0)
    write_model(script, settings, tensors, DIFFUSERS, widths, folder, out, spec)


def import_file(path, out, spec):
    """Write the model.pt of a file of Karlo's own: a prior, a decoder, or an upsampler.

    The mean and deviation of a prior's embeddings are in ViT-L-14_stats.th beside it.
    """
    import train_decoder
    import train_prior

    tensors = tensors_in(path)

    def width_of(layer):
        for name, value in tensors.items():
            if name.endswith(f"{layer}.weight"):
                return value.shape[1]
        raise UserError(
            f"{path}: no {layer}.weight in it; expected a prior, decoder or upsampler of Karlo's "
            "own, or a folder with config.json"
        )

    if any(name.endswith("prd_emb") for name in tensors):
        stats = path.with_name("ViT-L-14_stats.th")
        if not stats.is_file():
            raise UserError(
                f"{path}: needs {stats.name} beside it, which has its CLIP's mean and deviation"
            )
        tensors["clip_mean"], tensors["clip_std"] = read(stats)
        settings = train_prior.PRESETS["karlo"]
        write_model(
            train_prior,
            settings,
            tensors,
            KARLO,
            [width_of("clip_img_proj")] * 2,
            path,
            out / "model.pt",
            spec,
        )
        return
    first = {
        name: value for name, value in tensors.items() if name.startswith("model_first_steps.")
    }
    last = {name: value for name, value in tensors.items() if name.startswith("model_last_step.")}
    if first and last:
        settings = train_decoder.PRESETS["karlo-256"]
        write_model(train_decoder, settings, first, KARLO, (0, 0), path, out / "model.pt", spec)
        write_model(train_decoder, settings, last, KARLO, (0, 0), path, out / "last_step.pt", spec)
        return
    settings = train_decoder.PRESETS["karlo-64"]
    write_model(
        train_decoder,
        settings,
        tensors,
        KARLO,
        [width_of("clip_emb")] * 2,
        path,
        out / "model.pt",
        spec,
    )


def import_command(args):
    if not (args.source and args.out):
        raise UserError("expected: import FOLDER|FILE|OWNER/REPOSITORY --out FOLDER")
    path, out = fetch(args.source), Path(args.out)
    if path.is_file():
        import_file(path, out, args.clip)
        return
    if (path / "config.json").is_file():
        import_folder(path, out / "model.pt", args.clip)
        return
    parts = [part for part in PARTS if (path / part).is_dir()]
    if not parts:
        raise UserError(f"{path}: neither config.json nor one of the folders {', '.join(PARTS)}")
    for part in parts:
        import_folder(path / part, out / PARTS[part], args.clip)


# From ours to theirs


@dataclass(frozen=True)
class ExportConfig(config.Settings):
    run_dir: str = "runs/prior"  # run folder of a prior, a stage of the decoder, or their adapters
    model: str = "model.pt"  # file of the run
    out: str = ""  # folder to write


def published(model, weights):
    """{their name: tensor} of our `weights` for diffusers."""
    tensors = {}
    for name, theirs in published_names(model, DIFFUSERS).items():
        value = weights[name]
        if name.startswith("image_tokens_in."):
            value = value.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)
        for part, piece in zip(theirs, value.chunk(len(theirs))):
            tensors[part] = (piece[None] if part in LEADING_ONE else piece).contiguous()
    return tensors


def about_prior(cfg, widths, path):
    """The config.json of a prior."""
    if widths[1] not in (0, widths[0]):
        raise UserError(
            f"{path}: text encodings {widths[1]} wide; diffusers needs {widths[0]}, as the embeddings"
        )
    return {
        "_class_name": "PriorTransformer",
        "num_attention_heads": cfg.heads,
        "attention_head_dim": cfg.width // cfg.heads,
        "num_layers": cfg.depth,
        "embedding_dim": widths[0],
        "num_embeddings": cfg.max_text_len if widths[1] else 0,
        "additional_embeddings": 4,
        "dropout": cfg.dropout,
        "encoder_hid_proj_type": "linear" if widths[1] else None,
    }


def about_unet(cfg, widths, path):
    """The config.json of a U-Net."""
    heads = [cfg.width * cfg.mults[level] % cfg.head_width for level in cfg.attention_levels]
    if any(heads):
        raise UserError(f"{path}: head_width {cfg.head_width} does not divide a level's width")
    if cfg.width % 32 or cfg.width < 128:
        raise UserError(
            f"{path}: width {cfg.width}; diffusers' group norms need a multiple of 32, 128 or more"
        )
    simple = "ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D"
    attending = "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnUpBlock2D"
    levels = range(len(cfg.mults))
    kinds = [attending if level in cfg.attention_levels else simple for level in levels]
    about = {
        "sample_size": cfg.image_size,
        "in_channels": 6 if cfg.low_res_size else 3,
        "out_channels": 6 if cfg.learned_variance else 3,
        "layers_per_block": cfg.blocks,
        "block_out_channels": [cfg.width * mult for mult in cfg.mults],
        "down_block_types": [down for down, _ in kinds],
        "up_block_types": [up for _, up in reversed(kinds)],
        "resnet_time_scale_shift": "scale_shift" if cfg.scale_shift else "default",
    }
    if not any(widths) and not cfg.attention_levels and not cfg.low_res_noise:
        return {**about, "_class_name": "UNet2DModel", "add_attention": False}
    if not (
        all(widths) and cfg.image_condition and cfg.attention_levels and widths[0] == widths[1]
    ):
        raise UserError(
            f"{path}: diffusers has no class for it: expected Karlo's decoder, which attends to image "
            "and text, or its upsampler, which has neither, nor noise of a level that it is told"
        )
    return {
        **about,
        "_class_name": "UNet2DConditionModel",
        "cross_attention_dim": cfg.cond_width,
        "attention_head_dim": cfg.head_width,
        "class_embed_type": "identity",
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    }


def write_folder(folder, about, tensors, name="diffusion_pytorch_model", note="config"):
    """Write a folder of diffusers or peft."""
    safetensors = need("safetensors.torch", "export", "safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{note}.json").write_text(json.dumps(about, indent=2) + "\n")
    safetensors.save_file(tensors, folder / f"{name}.safetensors")
    print(f"wrote {folder}: {sum(value.numel() for value in tensors.values()):,} parameters")


def export_command(args):
    import train_decoder
    import train_prior

    if not args.out:
        raise UserError("--out: expected a folder")
    path, out = Path(args.run_dir, args.model), Path(args.out)
    if any(out.glob("*")):
        raise UserError(f"{out}: is not empty; give another --out")
    contents = checkpoint.load(path)
    scripts = {"prior": (train_prior, "Prior"), "decoder": (train_decoder, "UNet")}
    if contents.get("kind") not in scripts:
        raise UserError(f"{path}: not a prior's or a decoder's")
    script, name = scripts[contents["kind"]]
    cfg, state = lora.read_model(contents["kind"], script.Config, path)
    with torch.device("meta"):
        model = getattr(script, name)(cfg, *state["widths"])
    if cfg.timesteps != 1000:
        raise UserError(
            f"{path}: {cfg.timesteps} timesteps; diffusers' classes embed those of 1000"
        )
    about = (about_prior if contents["kind"] == "prior" else about_unet)(cfg, state["widths"], path)
    print(f"note: it predicts {cfg.objective}, which diffusers' scheduler has to be told")
    if not cfg.raw_embeddings:
        print("note: embeddings are scaled to length √D here, which diffusers' pipelines do not do")
    if "lora" in contents:
        write_adapters(out, model, contents)
        return
    tensors = published(model, state["model"])
    if about["_class_name"] != "UNet2DConditionModel":
        write_folder(out, about, tensors)
        return
    text = {
        name.removeprefix("text_proj."): tensors.pop(name)
        for name in [*tensors]
        if name.startswith("text_proj.")
    }
    write_folder(out / "decoder", about, tensors)
    write_folder(
        out / "text_proj",
        {
            "_class_name": "UnCLIPTextProjModel",
            "clip_extra_context_tokens": 4,
            "clip_embeddings_dim": state["widths"][0],
            "time_embed_dim": 4 * cfg.width,
            "cross_attention_dim": cfg.cond_width,
        },
        text,
    )


def write_adapters(out, model, contents):
    """Write a run of adapters for peft.

    The halves of a fused key and value share A, and B is cut in two.
    """
    names = published_names(model, DIFFUSERS)
    adapters = checkpoint.averaged(contents)["model"]
    targets = []
    tensors = {}
    for layer in sorted({name[:-2] for name in adapters}):
        theirs = [
            name.removesuffix(".weight") for name in names[layer.replace("/", ".") + ".weight"]
        ]
        for target, b in zip(theirs, adapters[f"{layer}.B"].chunk(len(theirs))):
            targets.append(target)
            tensors[f"base_model.model.{target}.lora_A.weight"] = adapters[f"{layer}.A"].clone()
            tensors[f"base_model.model.{target}.lora_B.weight"] = b.contiguous()
    rank = contents["lora"]["rank"]
    about = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": targets,
        "bias": "none",
        "lora_dropout": 0.0,
        "task_type": None,
        "base_model_name_or_path": contents["lora"]["base"],
        "inference_mode": True,
    }
    write_folder(out, about, tensors, "adapter_model", "adapter_config")


def main():
    if sys.argv[1:2] == ["import"] and len(sys.argv) > 2 and not sys.argv[2].startswith("-"):
        sys.argv.insert(2, "--source")
    config.run(
        {"import": (import_command, ImportConfig), "export": (export_command, ExportConfig)},
        __doc__,
    )


if __name__ == "__main__":
    main()
