"""Published weights of Karlo and Kandinsky: from diffusers' folders, and back.

    python -m common.interop.pretrained import kakaobrain/karlo-v1-alpha --out runs/karlo
    python -m common.interop.pretrained import OWNER/REPOSITORY/FOLDER --out runs/k22
    python -m common.interop.pretrained export --run_dir runs/mine --out my-prior

`import` takes a folder, or a repository of the Hugging Face hub. It writes ordinary run
folders with a model.pt. `export` writes what diffusers loads, or, of adapters, what peft loads.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import train_decoder
import train_prior
from common import checkpoint, config
from common.config import UserError, explained, need
from common.models import clip

CONFIGS = {
    "prior": train_prior.Config,
    "base": train_decoder.BaseConfig,
    "upsample": train_decoder.UpsampleConfig,
}

# Names of layers: ours, diffusers'. A layer of ours may join several of theirs.
PRIOR = """
positions.weight    positional_embedding
query.weight        prd_embedding
clip_mean           clip_mean
clip_std            clip_std
time_in.layers.0    time_embedding.linear_1
time_in.layers.2    time_embedding.linear_2
image_in            proj_in
text_in             embedding_proj
encoding_in         encoder_hidden_states_proj
transformer.norm    norm_out
out                 proj_to_clip_embeddings
"""
PRIOR_BLOCK = """
attention_norm         norm1
attention.query        attn1.to_q
attention.key_value    attn1.to_k+attn1.to_v
attention.out          attn1.to_out.0
ff_norm                norm3
ff.up                  ff.net.0.proj
ff.down                ff.net.2
"""
UNET = """
stem                conv_in
time_in.layers.0    time_embedding.linear_1
time_in.layers.2    time_embedding.linear_2
out.0               conv_norm_out
out.2               conv_out
null_image          text_proj.learned_classifier_free_guidance_embeddings
image_in            text_proj.clip_image_embeddings_project_to_time_embeddings
image_tokens_in     text_proj.clip_extra_context_tokens_proj
text_in             text_proj.embedding_proj
encoding_in         text_proj.encoder_hidden_states_proj
encoding_norm       text_proj.text_encoder_hidden_states_norm
"""
RESIDUAL = """
norm1                  norm1
conv1                  conv1
modulation             time_emb_proj
norm2                  norm2
conv2                  conv2
skip                   conv_shortcut
"""
ATTENTION = """
attention_norm         group_norm
attention.query        to_q
attention.key_value    to_k+to_v
token_key_value        add_k_proj+add_v_proj
attention.out          to_out.0
"""
# Of these tensors of diffusers, the first dimension is 1; ours do not have it.
LEADING_ONE = "positional_embedding", "prd_embedding", "clip_mean", "clip_std"

# Folders of a pipeline, and the files they become.
PARTS = {
    "prior": "prior/model.pt",
    "decoder": "base/model.pt",
    "super_res_first": "upsample/model.pt",
    "super_res_last": "upsample/last_step.pt",
}
SCHEDULERS = "../scheduler", "../prior_scheduler", "scheduler", "prior_scheduler"  # of a prior
WEIGHTS = (  # the first that is there, and of 16 bits only if there is no other
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model-*-of-?????.safetensors",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model-*-of-?????.bin",
    "diffusion_pytorch_model.fp16*.safetensors",
    "diffusion_pytorch_model.fp16*.bin",
)
CLIPS = {768: "open_clip:ViT-L-14/openai", 1280: "open_clip:ViT-bigG-14/laion2b_s39b_b160k"}

# Of Karlo and Kandinsky, besides the sizes in the files: objective and sampling.
EPSILON = {"objective": "epsilon", "timestep_density": "uniform", "eta": 1.0}
CONDITION = {"raw_embeddings": True, "text_encodings": "clip"}
SETTINGS = {
    "prior": {**CONDITION, "guidance_scale": 4.0, "eval_timesteps": (25,)},
    "base": {**CONDITION, **EPSILON, "guidance_scale": 8.0, "eval_steps": 25},
    "upsample": {**EPSILON, "eval_steps": 7},
}

# Fields of a config.json that have one value here and do not show in the weights, or that diffusers
# needs: other models have another form than ours.
UNET_FORM = {
    "norm_num_groups": 32,
    "norm_eps": 1e-5,
    "act_fn": "silu",
    "freq_shift": 0,
    "flip_sin_to_cos": True,
    "center_input_sample": False,
    "mid_block_scale_factor": 1,
}
FORMS = {
    "PriorTransformer": {"time_embed_act_fn": "silu"},
    "UNet2DConditionModel": {
        **UNET_FORM,
        "class_embed_type": "identity",
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "resnet_time_scale_shift": "scale_shift",
        "resnet_skip_time_act": False,
    },
    "UNet2DModel": {**UNET_FORM, "add_attention": False},
}


# Names


def layer_names(table, ours="", theirs=""):
    """{our layer: names of the published ones that it joins}, with prefixes, of a table above."""
    names = {}
    for line in table.strip().splitlines():
        name, published = line.split()
        names[ours + name] = [theirs + layer for layer in published.split("+")]
    return names


def block_names(unet):
    """Yield (our block, diffusers' residual block, diffusers' attention) of a U-Net.

    Ours are in ADM's order.
    """
    for side, direction in (("downs", "down"), ("ups", "up")):
        level = 0
        block = 0
        for i, layer in enumerate(getattr(unet, side)):
            residual = f"{direction}_blocks.{level}.resnets.{block}"
            attention = f"{direction}_blocks.{level}.attentions.{block}"
            block += 1
            if not isinstance(layer.resample, nn.Identity):
                residual = f"{direction}_blocks.{level}.{direction}samplers.0"
                level += 1
                block = 0
            yield f"{side}.{i}", residual, attention

    for i in range(2):
        yield f"middle.{i}", f"mid_block.resnets.{i}", "mid_block.attentions.0"


def published_names(model):
    """{our parameter: the published ones that it joins}."""
    if isinstance(model, train_prior.Prior):
        layers = layer_names(PRIOR)
        for i in range(model.cfg.depth):
            block = f"transformer.blocks.{i}."
            layers |= layer_names(PRIOR_BLOCK, block, f"transformer_blocks.{i}.")
    else:
        layers = layer_names(UNET)
        for block, residual, attention in block_names(model):
            layers |= layer_names(RESIDUAL, f"{block}.", f"{residual}.")
            layers |= layer_names(ATTENTION, f"{block}.", f"{attention}.")
    names = {}
    for name in model.state_dict():
        layer, _, kind = name.rpartition(".")  # kind: weight or bias
        if name in layers:
            names[name] = layers[name]
        elif layer in layers:
            names[name] = [f"{published}.{kind}" for published in layers[layer]]
    return names


def make(kind, cfg, widths):
    """The model of a config, on the device "meta": without memory."""
    with torch.device("meta"):
        if kind == "prior":
            return train_prior.Prior(cfg, *widths)
        return train_decoder.UNet(cfg, *widths)


# From theirs to ours


def convert(model, tensors, path):
    """Our {name: tensor} of the published `tensors`; UserError unless every one fits.

    Tensors that are taken leave the dict: joined ones are copies of gigabytes. `model` may be on
    the device "meta".
    """
    expected = model.state_dict()
    weights = {}
    for name, published in published_names(model).items():
        shape = tuple(expected[name].shape)
        with explained(f"{path}: {', '.join(published)}: missing, or not of the shape {shape}"):
            value = torch.cat([tensors.pop(layer) for layer in published]).float()
            if not value.isfinite().all():
                raise UserError(f"{path}: {', '.join(published)}: not finite")
            if name.startswith("image_tokens_in."):  # theirs has the tokens innermost
                value = value.unflatten(0, (-1, 4)).transpose(0, 1)
            weights[name] = value.reshape(shape)
    if tensors:
        names = ", ".join(sorted(tensors)[:5])
        raise UserError(f"{path}: {len(tensors)} weights are unknown: {names}")
    return weights


def settings_of(about, folder):
    """(kind of model, our settings) for the contents `about` of FOLDER/config.json."""
    name = about.get("_class_name")
    if name not in FORMS:
        raise UserError(f"{folder}: _class_name is {name!r}; expected one of {', '.join(FORMS)}")
    for field, expected in FORMS[name].items():
        if about.get(field, expected) != expected:
            raise UserError(
                f"{folder}: {field} is {about[field]!r}; only {expected!r} is of the form here"
            )
    if name == "PriorTransformer":
        heads = about["num_attention_heads"]
        settings = {
            "width": heads * about["attention_head_dim"],
            "heads": heads,
            "depth": about["num_layers"],
            "max_text_len": about["num_embeddings"],
        }
        for scheduler in SCHEDULERS:
            path = folder / scheduler / "scheduler_config.json"
            if path.is_file():
                bound = config.read_json(path).get("clip_sample_range")  # of UnCLIPScheduler
                if bound:
                    settings["x0_bound"] = bound
        return "prior", settings
    size = about["sample_size"]
    widths = about["block_out_channels"]
    settings = {
        "image_size": size,
        "width": widths[0],
        "channel_mult": tuple(channels // widths[0] for channels in widths),
        "num_res_blocks": about["layers_per_block"],
    }
    if name == "UNet2DModel":
        return "upsample", {
            **settings,
            "low_res_size": size // 4,
            "random_crop": size // 4,
            "scale_shift": about["resnet_time_scale_shift"] == "scale_shift",
        }
    kinds = about["down_block_types"]
    return "base", {
        **settings,
        "attention_levels": tuple(i for i, kind in enumerate(kinds) if "CrossAttn" in kind),
        "cond_width": about["cross_attention_dim"],
        "learned_variance": about["out_channels"] == 6,
    }


def read_folder(folder):
    """(contents of config.json, tensors) of a folder of diffusers. Weights may be in shards."""
    tensors = {}
    with explained(f"{folder}: expected config.json, {WEIGHTS[0]} or .bin, of tensors alone"):
        about = config.read_json(folder / "config.json")
        found = [sorted(folder.glob(name)) for name in WEIGHTS]
        for path in next(filter(None, found)):
            if path.suffix == ".bin":
                tensors |= torch.load(path, map_location="cpu", weights_only=True)
            else:
                tensors |= need("safetensors.torch", str(path), "safetensors").load_file(path)
    return about, tensors


def import_folder(folder, out, spec, source):
    """Write the model.pt `out` of a folder of diffusers; a decoder's text_proj lies beside it.

    spec: the CLIP, "" for the one of this width. source: what to call the folder. Nothing is
    overwritten.
    """
    if out.exists():
        contents = checkpoint.load(out, mmap=True)
        if contents.get("source") != source or spec not in ("", contents["clip"]):
            raise UserError(
                f"{out}: is there already, of another source or --clip; give another --out"
            )
        config.note(f"{out}: is there already, from {source}")
        return
    about, tensors = read_folder(folder)
    with checkpoint.damaged(folder / "config.json"):
        kind, settings = settings_of(about, folder)
        width = about.get("embedding_dim", 0)
    if kind == "base":
        projection, more = read_folder(folder.parent / "text_proj")
        width = projection["clip_embeddings_dim"]
        tensors |= {f"text_proj.{name}": value for name, value in more.items()}
    widths = [width, width]  # of embeddings and of text encodings

    spec = spec or CLIPS.get(width, "")
    cfg = CONFIGS[kind](
        **SETTINGS[kind],
        **settings,
        run_dir=str(out.parent),
        clip=spec or "auto",
    )
    model = make(kind, cfg, widths)
    weights = convert(model, tensors, folder)
    fingerprint = None
    if width:  # "no text" is the CLIP's encoding of ""
        clip_model = clip.load(spec, "cpu", text_only=True)
        clip.check_widths(clip_model, f"--clip {spec} for {folder}", *widths)
        fingerprint = clip_model.fingerprint()
        null = clip_model.text_condition([""], cfg.max_text_len)
        for name, _ in model.null_text.named_buffers():
            weights[f"null_text.{name}"] = null[name]
    contents = {
        "kind": kind,
        "model": weights,
        "config": config.as_json(cfg),
        "step": 0,
        "widths": widths,
        "clip": spec,
        "clip_fingerprint": fingerprint,
        "source": source,
        # Its last step of sampling is another U-Net's, which may be imported or not.
        "last_step": "last_step.pt" if folder.name == "super_res_first" else None,
    }
    checkpoint.save(contents, out)
    print(f"wrote {out}: a {kind} model; to train it further, give --optimizer adamw --lr 1e-5")


@dataclass(frozen=True)
class ImportConfig(config.Settings):
    """What to import"""

    source: str = config.field(
        "", "folder of diffusers, or OWNER/REPOSITORY[/FOLDER] of the Hugging Face hub"
    )
    out: str = config.field(
        "", "run folder to write; of a whole pipeline, the folder of its run folders"
    )
    clip: str = config.field(
        "", "CLIP of its embeddings, by default ViT-L/14 or ViT-bigG/14, by their width"
    )


def fetch(source):
    """The local folder of `source`, downloaded if it is not here."""
    path = Path(source)
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        raise UserError(f"{source}: a file; expected its folder, which also has config.json")
    hub = need("huggingface_hub", f"import {source}")
    with explained(f"{source}: no such folder, nor OWNER/REPOSITORY[/FOLDER] of the hub"):
        owner, name, *inside = source.split("/")
        folders = ["/".join(inside)] if inside else PARTS
        patterns = [f"{folder}/*" for folder in folders]
        # A model that is in no folder, and what parts need of folders beside them.
        patterns += ["config.json", *WEIGHTS, "*scheduler/*", "*text_proj/*"]
        for ignored in ("*.fp16*", None):  # weights of 16 bits only where there are no others
            folder = hub.snapshot_download(
                f"{owner}/{name}",
                allow_patterns=patterns,
                ignore_patterns=ignored,
            )
            models = [file.parent for file in Path(folder).rglob("config.json")]
            if all(any(model.glob("*model*")) for model in models):
                break
    return Path(folder, *inside)


def import_command(args):
    if not args.out:
        raise UserError("expected: import FOLDER|OWNER/REPOSITORY --out FOLDER")
    path = fetch(args.source)
    files = {".": "model.pt"}
    if not (path / "config.json").is_file():
        files = {part: file for part, file in PARTS.items() if (path / part).is_dir()}
    if not files:
        raise UserError(f"{path}: neither config.json nor one of the folders {', '.join(PARTS)}")
    source = path if Path(args.source).is_dir() else args.source
    for part, file in files.items():
        import_folder(path / part, Path(args.out, file), args.clip, str(Path(source, part)))


# From ours to theirs


@dataclass(frozen=True)
class ExportConfig(config.Settings):
    """What to export"""

    run_dir: str = config.field(
        "runs/prior", "run folder of a prior, a stage of the decoder, or their adapters"
    )
    out: str = config.field("", "folder to write")


def published(model, weights):
    """{their name: tensor} of our `weights` for diffusers."""
    tensors = {}
    for name, theirs in published_names(model).items():
        value = weights[name]
        if name.startswith("image_tokens_in."):
            value = value.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)
        if theirs[0] in LEADING_ONE:
            value = value[None]
        pieces = value.chunk(len(theirs))
        tensors |= {layer: piece.contiguous() for layer, piece in zip(theirs, pieces)}
    return tensors


def about_prior(cfg, widths):
    """The config.json of a prior. diffusers needs text encodings as wide as the embeddings."""
    return {
        "_class_name": "PriorTransformer",
        **FORMS["PriorTransformer"],
        "num_attention_heads": cfg.heads,
        "attention_head_dim": cfg.width // cfg.heads,
        "num_layers": cfg.depth,
        "embedding_dim": widths[0],
        "num_embeddings": cfg.max_text_len if widths[1] else 0,
        "dropout": cfg.dropout,
        "encoder_hid_proj_type": "linear" if widths[1] else None,
    }


def about_unet(cfg, widths, path):
    """The config.json of a U-Net: Karlo's decoder, or an upsampler without attention."""
    name = "UNet2DConditionModel" if any(widths) else "UNet2DModel"
    kinds = ["Resnet{}sampleBlock2D"] * len(cfg.channel_mult)
    for level in cfg.attention_levels:
        kinds[level] = "SimpleCrossAttn{}Block2D"
    attended = [cfg.width * cfg.channel_mult[level] for level in cfg.attention_levels]
    fits = (
        cfg.width >= 128
        and cfg.width % 32 == 0
        and not any(width % cfg.head_dim for width in attended)
        and widths[0] == widths[1]
        and bool(attended) == any(widths)
        and not (cfg.low_res_size and cfg.low_res_noise)
    )
    if not fits:
        raise UserError(
            f"{path}: diffusers has no class for it: expected Karlo's decoder, which attends to "
            "image and text, or its upsampler, which has neither, nor --low_res_noise; a --width "
            "that is a multiple of 32, 128 or more; levels with attention that are multiples of 64"
        )
    about = {
        "_class_name": name,
        **FORMS[name],
        "sample_size": cfg.image_size,
        "in_channels": 6 if cfg.low_res_size else 3,
        "out_channels": 6 if cfg.learned_variance else 3,
        "layers_per_block": cfg.num_res_blocks,
        "block_out_channels": [cfg.width * mult for mult in cfg.channel_mult],
        "down_block_types": [kind.format("Down") for kind in kinds],
        "up_block_types": [kind.format("Up") for kind in reversed(kinds)],
    }
    if attended:
        return about | {"cross_attention_dim": cfg.cond_width, "attention_head_dim": cfg.head_dim}
    return about | {"resnet_time_scale_shift": "scale_shift" if cfg.scale_shift else "default"}


def about_text_proj(cfg, widths):
    """The config.json of the projections that diffusers keeps apart from a decoder's U-Net."""
    return {
        "_class_name": "UnCLIPTextProjModel",
        "clip_extra_context_tokens": 4,
        "clip_embeddings_dim": widths[0],
        "time_embed_dim": 4 * cfg.width,
        "cross_attention_dim": cfg.cond_width,
    }


def write_folder(folder, about, tensors, config_name="config", name="diffusion_pytorch_model"):
    """Write a folder of diffusers or peft."""
    safetensors = need("safetensors.torch", "export", "safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(about, folder / f"{config_name}.json")
    safetensors.save_file(tensors, folder / f"{name}.safetensors")
    print(f"wrote {folder}")


def export_command(args):
    out = Path(args.out)
    if not args.out or any(out.glob("*")):
        raise UserError(f"--out {args.out}: expected a new folder, or an empty one")
    path = checkpoint.model_file(args.run_dir)
    cfg, contents = checkpoint.read_model(CONFIGS, path)
    kind = contents["kind"]
    widths = contents["widths"]
    model = make(kind, cfg, widths)
    about = about_prior(cfg, widths) if kind == "prior" else about_unet(cfg, widths, path)
    print(f"note: it predicts {cfg.objective}, which diffusers' scheduler has to be told")
    if any(widths) and not cfg.raw_embeddings:
        print("note: embeddings are scaled to length √D here, which diffusers' pipelines do not do")
    if "lora" in contents:
        write_adapters(out, model, contents)
        return
    tensors = published(model, checkpoint.strip_prefixes(contents["model"]))
    if kind != "base":
        write_folder(out, about, tensors)
        if kind == "prior" and cfg.objective == "x0":
            scheduler = {
                "_class_name": "UnCLIPScheduler",
                "prediction_type": "sample",
                "clip_sample_range": cfg.x0_bound,
            }
            checkpoint.write_json(scheduler, out / "scheduler/scheduler_config.json")
        return
    prefix = "text_proj."
    names = [name for name in tensors if name.startswith(prefix)]
    text_proj = {name.removeprefix(prefix): tensors.pop(name) for name in names}
    write_folder(out / "decoder", about, tensors)
    write_folder(out / "text_proj", about_text_proj(cfg, widths), text_proj)


def write_adapters(out, model, contents):
    """Write a run of adapters for peft.

    The halves of a joined key and value share A, and B is cut in two.
    """
    names = published_names(model)
    adapters = contents["model"]
    targets = []
    tensors = {}
    for name, b in adapters.items():
        layer, _, matrix = name.rpartition(".")
        if matrix == "A":
            continue
        weights = names[layer.replace("/", ".") + ".weight"]
        for weight, piece in zip(weights, b.chunk(len(weights))):
            target = weight.removesuffix(".weight")
            targets.append(target)
            tensors[f"base_model.model.{target}.lora_A.weight"] = adapters[f"{layer}.A"].clone()
            tensors[f"base_model.model.{target}.lora_B.weight"] = piece.contiguous()
    info = contents["lora"]
    rank = info["rank"]
    about = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": targets,
        "base_model_name_or_path": info.get("source", info["base"]),
    }
    write_folder(out, about, tensors, "adapter_config", "adapter_model")


def main():
    if re.match("import [^-]", " ".join(sys.argv[1:])):
        sys.argv.insert(2, "--source")
    config.run(
        {"import": (import_command, ImportConfig), "export": (export_command, ExportConfig)},
        __doc__,
    )


if __name__ == "__main__":
    main()
