"""Print the ceiling of `picture_retrieval`: the score of real pictures instead of drawn ones.

    python tests/benchmarks/picture_ceiling.py --data images --clip runs/clip_images

`train_decoder.py evaluate --prior` draws a picture from each held-out caption, and counts how often
the nearest of 100 held-out real pictures has that caption. Here a training picture of the caption
takes the place of the drawn one. The data must therefore repeat captions, like a set of emoji drawn
by two artists. The splits are the scripts' default splits.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.data import clips, embed
from common.models import clip


def embed_split(data, split, clip_model):
    """(embeddings (N, D) of unit length, captions) of the readable images in a split."""
    embeds = []
    captions = []
    for batch, records in embed.read(data, clip_model.image_size, split):
        with torch.no_grad():
            embeds.append(clip_model.embed_image(torch.tensor(batch)))
        captions += [record["caption"] for record in records]
    return F.normalize(torch.cat(embeds).double(), dim=-1).numpy(), captions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="tars or a folder of captioned images")
    parser.add_argument("--clip", required=True, help="as --clip of train_decoder.py")
    args = parser.parse_args()

    clip_model = clips.load(args.clip, "cpu")
    train_embeds, train_captions = embed_split(args.data, "train", clip_model)
    embeds, captions = embed_split(args.data, "test", clip_model)
    training_rows = {caption: row for row, caption in enumerate(train_captions)}
    rows = [row for row, caption in enumerate(captions) if caption in training_rows]
    captions = [captions[row] for row in rows]
    if not rows:
        parser.error(f"--data {args.data}: expected held-out captions that are also in training")
    queries = train_embeds[[training_rows[caption] for caption in captions]]
    share = clip.retrieval(queries, embeds[rows], captions)
    print(f"picture_retrieval of real pictures {share:.4f}")


if __name__ == "__main__":
    main()
