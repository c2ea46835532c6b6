"""Import published weights of Karlo and Kandinsky in diffusers' format, and export to it.

    python -m common.interop.pretrained import kakaobrain/karlo-v1-alpha --out runs/karlo
    python -m common.interop.pretrained import OWNER/REPOSITORY/FOLDER --out runs/k22
    python -m common.interop.pretrained export --run_dir runs/mine --out my-prior

`import` reads a folder, or a repository on the Hugging Face hub, and writes run folders with a
model.pt. `export` writes a folder for diffusers or, for LoRA adapters, for peft.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import train_decoder
import train_prior
from common import checkpoint, config
from common.config import Settings, UserError, explained, field, need
from common.data import clips

CONFIGS = {"prior": train_prior.Config, **train_decoder.STAGES}

# Prefixes of parameter names: ours, then diffusers'. One of our parameters may concatenate two of
# theirs. In diffusers, the decoder's projections of image and text are a separate model, text_proj.
PRIOR = """\
positions.weight              positional_embedding
query.weight                  prd_embedding
clip_mean                     clip_mean
clip_std                      clip_std
time_in.layers.0              time_embedding.linear_1
time_in.layers.2              time_embedding.linear_2
image_in                      proj_in
text_in                       embedding_proj
encoding_in                   encoder_hidden_states_proj
{ours}.attention_norm         {theirs}.norm1
{ours}.attention.query        {theirs}.attn1.to_q
{ours}.attention.key_value    {theirs}.attn1.to_k+{theirs}.attn1.to_v
{ours}.attention.out          {theirs}.attn1.to_out.0
{ours}.ff_norm                {theirs}.norm3
{ours}.ff.up                  {theirs}.ff.net.0.proj
{ours}.ff.down                {theirs}.ff.net.2
transformer.norm              norm_out
out                           proj_to_clip_embeddings
"""
UNET = """\
stem                          conv_in
time_in.layers.0              time_embedding.linear_1
time_in.layers.2              time_embedding.linear_2
{ours}.norm1                  {theirs}.norm1
{ours}.conv1                  {theirs}.conv1
{ours}.modulation             {theirs}.time_emb_proj
{ours}.norm2                  {theirs}.norm2
{ours}.conv2                  {theirs}.conv2
{ours}.skip                   {theirs}.conv_shortcut
{ours}.attention_norm         {attention}.group_norm
{ours}.attention.query        {attention}.to_q
{ours}.attention.key_value    {attention}.to_k+{attention}.to_v
{ours}.token_key_value        {attention}.add_k_proj+{attention}.add_v_proj
{ours}.attention.out          {attention}.to_out.0
out.0                         conv_norm_out
out.2                         conv_out
"""
TEXT_PROJ = """\
null_image                    learned_classifier_free_guidance_embeddings
image_in                      clip_image_embeddings_project_to_time_embeddings
image_tokens_in               clip_extra_context_tokens_proj
text_in                       embedding_proj
encoding_in                   encoder_hidden_states_proj
encoding_norm                 text_encoder_hidden_states_norm
"""

# Folders of a pipeline ("." for a single model), and the files that they are imported to.
PARTS = {
    ".": "model.pt",
    "prior": "prior/model.pt",
    "decoder": "base/model.pt",
    "super_res_first": "upsample/model.pt",
    "super_res_last": "upsample/last_step.pt",
}
# Where the scheduler of a prior may be, relative to the prior's folder.
SCHEDULERS = "../scheduler", "../prior_scheduler", "scheduler", "prior_scheduler"
WEIGHTS = (  # the first that exists is used; fp16 is the last resort
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model-*-of-?????.safetensors",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model-*-of-?????.bin",
    "diffusion_pytorch_model.fp16*.safetensors",
    "diffusion_pytorch_model.fp16*.bin",
)
CLIPS = {768: "open_clip:ViT-L-14/openai", 1280: "open_clip:ViT-bigG-14/laion2b_s39b_b160k"}


# Names


def blocks_of(cfg):
    """Yield the names (ours, diffusers') of a model's blocks.

    Our U-Net has ADM's order: the blocks of a level, then the block that resamples.
    """
    if isinstance(cfg, train_prior.Config):
        for i in range(cfg.depth):
            yield f"transformer.blocks.{i}", f"transformer_blocks.{i}"
        return
    for i in range(2):
        yield f"middle.{i}", f"mid_block.resnets.{i}"
    for direction, blocks in (("down", cfg.num_res_blocks), ("up", cfg.num_res_blocks + 1)):
        for i in range(len(cfg.channel_mult) * (blocks + 1)):
            level, number = divmod(i, blocks + 1)
            layer = f"resnets.{number}" if number < blocks else f"{direction}samplers.0"
            yield f"{direction}s.{i}", f"{direction}_blocks.{level}.{layer}"


def published_names(cfg, table, names):
    """Return {our parameter name: published names to concatenate}.

    table: one of the tables above. names: our parameter names; those not in the table are left out.
    """
    published = {}
    for ours, theirs in blocks_of(cfg):
        attention = theirs.replace("resnets", "attentions")  # numbered like the blocks
        lines = table.format(ours=ours, theirs=theirs, attention=attention)
        for line in lines.splitlines():
            beginning, replacements = line.split()
            for name in names:
                if name.startswith(beginning):
                    end = name.removeprefix(beginning)
                    published[name] = [layer + end for layer in replacements.split("+")]
    return published


# Settings


def our_settings(about, folder):
    """Return (kind of model, settings) for the contents `about` of FOLDER/config.json.

    That file has no objective or sampling settings. They are set as in Karlo and Kandinsky.
    """
    if about["_class_name"] == "PriorTransformer":
        heads = about["num_attention_heads"]
        settings = {
            "width": heads * about["attention_head_dim"],
            "heads": heads,
            "depth": about["num_layers"],
            "max_text_len": about["num_embeddings"],
            "raw_embeddings": True,
            "text_encodings": True,
            "text_source": "clip",
            "guidance_scale": 4.0,
            "eval_timesteps": (25,),
        }
        for scheduler in SCHEDULERS:
            path = folder / scheduler / "scheduler_config.json"
            if path.is_file():  # settings of UnCLIPScheduler
                settings["x0_bound"] = config.read_json(path).get("clip_sample_range", 10.0)
        return "prior", settings

    size = about["sample_size"]
    widths = about["block_out_channels"]
    settings = {
        "image_size": size,
        "width": widths[0],
        "channel_mult": tuple(width // widths[0] for width in widths),
        "num_res_blocks": about["layers_per_block"],
        "objective": "epsilon",
        "timestep_density": "uniform",
        "eta": 1.0,
    }
    if about["_class_name"] == "UNet2DModel":
        return "upsample", {
            **settings,
            "low_res_size": size // 4,
            "random_crop": size // 4,
            "scale_shift": about["resnet_time_scale_shift"] == "scale_shift",
            "eval_steps": 7,
        }
    kinds = about["down_block_types"]
    return "base", {
        **settings,
        "attention_levels": tuple(i for i, kind in enumerate(kinds) if "CrossAttn" in kind),
        "cond_width": about["cross_attention_dim"],
        "learned_variance": about["out_channels"] == 6,
        "raw_embeddings": True,
        "text_encodings": True,
        "guidance_scale": 8.0,
        "eval_steps": 25,
    }


def their_config(cfg, widths, path):
    """diffusers' config.json for the model `path`; UserError if diffusers has no class for it.

    widths: [width of embeddings, width of text encodings].
    """
    if isinstance(cfg, train_prior.Config):
        if widths[1] not in (0, widths[0]):
            raise UserError(
                f"{path}: diffusers has no class for it: the width of its text encodings is "
                f"{widths[1]}, expected {widths[0]}, the width of its embeddings"
            )
        return {
            "_class_name": "PriorTransformer",
            "time_embed_act_fn": "silu",
            "num_attention_heads": cfg.heads,
            "attention_head_dim": cfg.width // cfg.heads,
            "num_layers": cfg.depth,
            "embedding_dim": widths[0],
            "num_embeddings": cfg.max_text_len if widths[1] else 0,
            "encoder_hid_proj_type": "linear" if widths[1] else None,
        }
    if cfg.width < 128 or cfg.width % 64 or widths[0] != widths[1] or cfg.low_res_noise:
        raise UserError(
            f"{path}: diffusers has no class for it: expected Karlo's decoder, with image and text "
            "conditions, or its upsampler, without conditions or --low_res_noise; and a --width "
            "that is a multiple of 64, at least 128"
        )
    kinds = ["Resnet{}sampleBlock2D"] * len(cfg.channel_mult)
    for level in cfg.attention_levels:
        kinds[level] = "SimpleCrossAttn{}Block2D"
    about = {
        "sample_size": cfg.image_size,
        "in_channels": 6 if cfg.low_res_size else 3,
        "out_channels": 6 if cfg.learned_variance else 3,
        "layers_per_block": cfg.num_res_blocks,
        "block_out_channels": [cfg.width * mult for mult in cfg.channel_mult],
        "down_block_types": [kind.format("Down") for kind in kinds],
        "up_block_types": [kind.format("Up") for kind in reversed(kinds)],
        "resnet_time_scale_shift": "scale_shift" if cfg.scale_shift else "default",
        # Constants in our models. The shapes of the weights would not reveal other values.
        "norm_num_groups": 32,
        "norm_eps": 1e-5,
        "act_fn": "silu",
    }
    if cfg.low_res_size:
        return about | {"_class_name": "UNet2DModel", "add_attention": False}
    return about | {
        "_class_name": "UNet2DConditionModel",
        "cross_attention_dim": cfg.cond_width,
        "attention_head_dim": 64,
        "class_embed_type": "identity",
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    }


# Import


def read_folder(folder):
    """Read (contents of config.json, tensors) from a diffusers folder. Weights may be sharded."""
    tensors = {}
    with explained(f"{folder}: expected config.json, and {WEIGHTS[0]} or .bin with only tensors"):
        about = config.read_json(folder / "config.json")
        found = [sorted(folder.glob(name)) for name in WEIGHTS]
        for path in next(filter(None, found)):
            if path.suffix == ".bin":
                tensors |= torch.load(path, map_location="cpu", weights_only=True)
            else:
                tensors |= need("safetensors.torch", str(path), "safetensors").load_file(path)
    return about, tensors


def our_weights(names, expected, tensors, path):
    """Convert the published `tensors` to our {name: tensor}, with the shapes of `expected`.

    names: from `published_names`. UserError unless all fit. Converted tensors are removed from
    `tensors` to save memory, because concatenation copies gigabytes.
    """
    weights = {}
    for name, theirs in names.items():
        shape = tuple(expected[name].shape)
        with explained(f"{path}: {', '.join(theirs)}: expected numbers of shape {shape}"):
            value = torch.cat([tensors.pop(layer) for layer in theirs]).float()
            if name.startswith("image_tokens_in"):  # diffusers has the token axis last
                value = value.unflatten(0, (-1, 4)).transpose(0, 1)
            weights[name] = value.reshape(shape)
    if tensors:
        unknown = ", ".join(sorted(tensors)[:5])
        raise UserError(f"{path}: {len(tensors)} weights are unknown: {unknown}")
    return weights


def import_folder(folder, out, spec, source):
    """Import the model in a diffusers folder to the file `out`.

    The text_proj of a decoder must be beside `folder`. spec: the CLIP, or "" for the usual CLIP for
    the model's width. source: name of the folder, stored in the file. Only an earlier import from
    the same source may be overwritten.
    """
    if out.exists() and checkpoint.load(out, mmap=True).get("source") != source:
        raise UserError(f"{out}: already exists, from another source; give another --out")
    about, tensors = read_folder(folder)
    width = about.get("embedding_dim", 0)  # of embeddings and text encodings
    with explained(
        f"{folder}: a {about.get('_class_name')}; expected a PriorTransformer, "
        "UNet2DConditionModel or UNet2DModel"
    ):
        kind, settings = our_settings(about, folder)
        # Our own exports include settings that diffusers does not know.
        settings |= config.typed(CONFIGS[kind], about.get("settings", {}), folder)
        cfg = CONFIGS[kind](**settings, run_dir=str(out.parent))
    encoding_width = width if cfg.text_encodings else 0
    for name, expected in their_config(cfg, [width, encoding_width], folder).items():
        if about.get(name, expected) != expected:
            raise UserError(
                f"{folder}: {name} is {about[name]!r}; only {expected!r} is supported"
            )
    if kind == "base":
        projection, more = read_folder(folder.parent / "text_proj")
        width = encoding_width = projection["clip_embeddings_dim"]
        tensors |= more
    with torch.device("meta"):  # takes no memory
        model_class = train_prior.Prior if kind == "prior" else train_decoder.UNet
        expected = model_class(cfg, width, encoding_width).state_dict()
    table = PRIOR if kind == "prior" else UNET + TEXT_PROJ
    names = published_names(cfg, table, expected)
    weights = our_weights(names, expected, tensors, folder)
    spec = spec or CLIPS.get(width, "")
    fingerprint = None
    if width:  # "no text" is the CLIP's encoding of ""
        clip_model = clips.load(spec, "cpu", text_only=True)
        clip_model.check_widths(f"--clip {spec} for {folder}", width, encoding_width)
        fingerprint = clip_model.fingerprint()
        for name, value in clip_model.text_condition([""], cfg.max_text_len).items():
            if f"null_text.{name}" in expected:  # a prior may have no text encodings
                weights[f"null_text.{name}"] = value
    contents = {
        "kind": kind,
        "model": weights,
        "config": {**config.as_json(cfg), "clip": spec},
        "step": 0,
        "widths": [width, encoding_width],
        "clip": spec,
        "clip_fingerprint": fingerprint,
        "source": source,
        # Karlo has a second U-Net for the last sampling step. It is used if it is imported too.
        "last_step": "last_step.pt" if folder.name == "super_res_first" else None,
    }
    checkpoint.save(contents, out)
    print(f"wrote {out}: a {kind} model; to fine-tune it, give --optimizer adamw --lr 1e-5")


@dataclass(frozen=True)
class ImportConfig(Settings):
    """What to import"""

    source: str = field(
        "", "diffusers folder, or OWNER/REPOSITORY[/FOLDER] on the Hugging Face hub"
    )
    out: str = field(
        "runs/imported", "run folder to write; for a whole pipeline, the parent of its run folders"
    )
    clip: str = field(
        "", "CLIP of the embeddings; default: ViT-L/14 or ViT-bigG/14, depending on the width"
    )


def fetch(source):
    """Download `source`, OWNER/REPOSITORY[/FOLDER], from the hub, and return its local path."""
    hub = need("huggingface_hub", f"import {source}")
    with explained(f"{source}: no such folder, nor OWNER/REPOSITORY[/FOLDER] on the hub"):
        owner, name, *inside = source.split("/", 2)
        patterns = [f"{folder}/*" for folder in inside or PARTS]
        # Also fetch a model at the top level, and the folders that the parts depend on.
        patterns += ["config.json", *WEIGHTS, "*scheduler/*", "*text_proj/*"]
        folder = hub.snapshot_download(f"{owner}/{name}", allow_patterns=patterns)
    return Path(folder, *inside)


def import_command(args):
    path = Path(args.source).resolve()
    source = path
    if not path.exists():
        path = fetch(args.source)
        source = args.source
    parts = [part for part in PARTS if (path / part / "config.json").is_file()]
    if not parts:
        raise UserError(
            f"{path}: expected a folder with a config.json in one of {', '.join(PARTS)}"
        )
    for part in parts:
        import_folder(path / part, Path(args.out, PARTS[part]), args.clip, str(Path(source, part)))


# Export


@dataclass(frozen=True)
class ExportConfig(Settings):
    """What to export"""

    run_dir: str = field(
        "runs/prior", "run folder of a prior, a stage of the decoder, or their adapters"
    )
    out: str = field("exported", "folder to write, new or empty")


def their_weights(cfg, table, weights):
    """Convert our `weights`, of a model or of adapters, to {published name: tensor}.

    Weights that are not in the table are left out.
    """
    tensors = {}
    for name, theirs in published_names(cfg, table, weights).items():
        value = weights[name]
        if name.startswith("image_tokens_in"):  # diffusers has the token axis last
            value = value.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)
        if table == PRIOR and "." not in theirs[0]:
            value = value[None]  # outside of layers, diffusers has a first axis of size 1
        if name.endswith(".A"):  # concatenated layers share the adapter's A
            value = value.repeat(len(theirs), 1)
        pieces = value.chunk(len(theirs))
        tensors |= {layer: piece.contiguous() for layer, piece in zip(theirs, pieces)}
    return tensors


def write_folder(folder, about, tensors, config_name="config", name="diffusion_pytorch_model"):
    """Write `about` as CONFIG_NAME.json, and `tensors`, to a folder for diffusers or peft."""
    safetensors = need("safetensors.torch", "export", "safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(about, folder / f"{config_name}.json")
    safetensors.save_file(tensors, folder / f"{name}.safetensors")
    print(f"wrote {folder}")


def write_adapters(out, weights, info):
    """Write adapters for peft. info: the entry "lora" of their model file."""
    tensors = {}
    layers = set()
    for name, value in weights.items():
        layer, _, matrix = name.rpartition(".")
        layers.add(layer)
        tensors[f"base_model.model.{layer}.lora_{matrix}.weight"] = value
    about = {
        "peft_type": "LORA",
        "r": info["rank"],
        "lora_alpha": info["rank"],
        "target_modules": sorted(layers),
        "base_model_name_or_path": info["source"],
    }
    write_folder(out, about, tensors, "adapter_config", "adapter_model")


def export_command(args):
    out = Path(args.out)
    if any(out.glob("*")):
        raise UserError(f"--out {out}: expected a new folder, or an empty one")
    path = checkpoint.model_file(args.run_dir)
    cfg, contents = checkpoint.read_model(CONFIGS, path)
    widths = contents["widths"]
    about = their_config(cfg, widths, path) | {"settings": config.settings_with(cfg, "model")}
    print(
        f"note: the model predicts {cfg.objective}; set diffusers' scheduler to match. Pipelines "
        f"pass raw embeddings; the model takes raw ones: {cfg.raw_embeddings} (False: it takes "
        "embeddings of length √D)"
    )
    weights = contents["model"]
    # In a file of adapters, layer a.b is named "a/b".
    weights = {name.replace("/", "."): value for name, value in weights.items()}
    table = PRIOR if contents["kind"] == "prior" else UNET
    tensors = their_weights(cfg, table, weights)
    if "lora" in contents:
        write_adapters(out, tensors, contents["lora"])
        return
    if contents["kind"] == "base":
        about_projection = {
            "_class_name": "UnCLIPTextProjModel",
            "clip_extra_context_tokens": 4,
            "clip_embeddings_dim": widths[0],
            "time_embed_dim": 4 * cfg.width,
            "cross_attention_dim": cfg.cond_width,
        }
        projection = their_weights(cfg, TEXT_PROJ, weights)
        write_folder(out / "text_proj", about_projection, projection)
        out = out / "decoder"
    write_folder(out, about, tensors)
    is_unclips = cfg.objective == "x0" and cfg.noise_schedule == "cosine"
    if contents["kind"] == "prior" and is_unclips:
        scheduler = {
            "_class_name": "UnCLIPScheduler",
            "prediction_type": "sample",
            "clip_sample_range": cfg.x0_bound if cfg.raw_embeddings else widths[0] ** 0.5,
        }
        checkpoint.write_json(scheduler, out / "scheduler/scheduler_config.json")


def main():
    if re.match("import [^-]", " ".join(sys.argv[1:])):
        sys.argv.insert(2, "--source")
    config.run(
        {"import": (import_command, ImportConfig), "export": (export_command, ExportConfig)},
        __doc__,
    )


if __name__ == "__main__":
    main()
